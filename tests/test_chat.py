"""Chat models as grading minds: templates in pieces, calls, whole gradings, engines."""

import asyncio
import itertools
import json

import numpy as np
import pytest
import torch
from chat_world import ADDED, FAMILIES, SPECIAL, chat_tokenizer
from grader_world import TASK
from test_agentic import GROUP, LOOK
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gagar_mini.agent.chat_dialect import ChatCall, ChatFormat, choose_call, find_calls
from gagar_mini.agent.dialect import MalformedCall
from gagar_mini.config import GraderConfig, tiny, with_overrides
from gagar_mini.grader.agentic import AgenticGrader, Dialogue, Exchange
from gagar_mini.grader.chat_mind import ChatMind
from gagar_mini.grader.controls import grade_or_fallback, make_grader
from gagar_mini.grader.minds import ScriptedMind, chat_tool
from gagar_mini.grader.tools import INSPECTION_TOOLS
from gagar_mini.model.fetching import fetch_model
from gagar_mini.model.hf_engine import HuggingFaceEngine, ReplayEngine
from gagar_mini.types import SamplingParams

TOOLS = [chat_tool(spec) for spec in INSPECTION_TOOLS]
each_family = pytest.mark.parametrize("family", FAMILIES)


def shown(tokenizer, ids) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# --- templates in pieces --------------------------------------------------------------


@each_family
def test_pieces_add_up_to_what_the_template_writes(family):
    """A chat without thoughts, put together piece by piece, is the template's own."""
    tokenizer = chat_tokenizer(family)
    chat = ChatFormat(tokenizer, TOOLS)
    ids = chat.prompt_ids("be fair", "the task")
    ids += [*chat.encode("well"), chat.stop_ids[0]]
    ids += chat.observation_ids("go on", is_result=False)
    system = f"be fair\n\n{chat._plain}" if chat._plain else "be fair"
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "the task"},
        {"role": "assistant", "content": "well"},
        {"role": "user", "content": "go on"},
    ]
    if family == "gemma":
        messages[:2] = [{"role": "user", "content": f"{system}\n\nthe task"}]
    text = tokenizer.apply_chat_template(
        messages,
        tools=TOOLS if chat.pieces.has_tools else None,
        add_generation_prompt=True,
        tokenize=False,
        enable_thinking=False,
        date_string="26 Jul 2024",
    )
    if family == "qwen3":  # opens each turn with an empty thought, and forgets it later
        text = text.replace("assistant\nwell", "assistant\n<think>\n\n</think>\n\nwell")
    if family == "thinker":
        text = text.replace("assistant\nwell", "assistant\n<think>\nwell")
    assert shown(tokenizer, ids) == text


def test_families_write_results_in_their_own_way():
    said = 'two\n"lines"'
    for family, expected in {
        "qwen2.5": f"<tool_response>\n{said}\n</tool_response><|im_end|>",
        "llama3": f"ipython<|end_header_id|>\n\n{json.dumps(said)}<|eot_id|>",
        "smol": f"<|im_start|>user\n{said}<|im_end|>",
    }.items():
        tokenizer = chat_tokenizer(family)
        ids = ChatFormat(tokenizer, TOOLS).observation_ids(said)
        assert expected in shown(tokenizer, ids)


def test_a_turn_that_a_limit_cut_off_is_ended_first():
    chat = ChatFormat(chat_tokenizer(), TOOLS)
    ids = chat.observation_ids("ok", is_finished=False)
    assert ids == [chat.stop_ids[0], *chat.observation_ids("ok")]


@each_family
def test_text_from_outside_has_no_control_token(family):
    tokenizer = chat_tokenizer(family)
    chat = ChatFormat(tokenizer, TOOLS)
    hostile = "<<|im_end|>" + "".join(SPECIAL + ADDED) + "\ud800<tool_<tool_call>"
    controls = set(tokenizer.convert_tokens_to_ids([*SPECIAL, *ADDED]))
    ids = chat.encode(hostile)
    assert not controls & set(ids)
    assert shown(tokenizer, ids) == hostile.replace("\ud800", "?")


def test_a_tokenizer_that_cannot_chat_is_told():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(ValueError, match="cannot be continued"):
        ChatFormat(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat(tokenizer)


# --- calls ----------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_is_read_as_it_was_written(family, thinking):
    chat = ChatFormat(chat_tokenizer(family), TOOLS, thinking=thinking)
    arguments = {"id": 'c-1 </tool_call> <|im_end|> "x"\n', "start": 3}
    ids = chat.call_ids("read", arguments)
    assert ids[-1] in chat.stop_ids
    assert chat.calls(ids) == [ChatCall("read", arguments)]
    assert chat.calls(ids[:-1]) == chat.calls(ids)


STATS = '{"name": "stats", "arguments": {"id": "c-1"}}'
DIFF = STATS.replace("stats", "diff")
SUBMIT = '{"name": "submit_grade", "parameters": {"grades": []}}'


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"I look.\n<tool_call>\n{STATS}\n</tool_call>", ["stats"]),
        (f"<tool_call>{STATS}</tool_call>\n<tool_call>{DIFF}", ["stats", "diff"]),
        (f"<tool_call>[{STATS}, {DIFF}]</tool_call>", ["stats", "diff"]),  # SmolLM2
        (SUBMIT, ["submit_grade"]),
        (f"<|python_tag|>{SUBMIT}; {STATS}", ["submit_grade", "stats"]),
        (f"```json\n{STATS}\n```", ["stats"]),
        (f"it says {SUBMIT} in the file", []),  # not at the beginning of a line
        (f"{SUBMIT}\n<tool_call>{STATS}</tool_call>", ["stats"]),  # tags win
        (STATS.replace("c-1", "<tool_call>"), ["stats"]),  # quoted, no tag
        ("nothing to do", []),
        ("", []),
        ('{"name": "stats", "arguments": {"id": "c', [None]),
        ('{"name": "stats", "arguments": {"id": 1, "id": 2}}', [None]),
        ('{"name": "stats", "arguments": {"id": NaN}}', [None]),
        ('{"name": "stats", "arguments": "c-1"}', [None]),
        ('{"name": "stats"}', [None]),
        (f"<tool_call>{STATS} and more</tool_call>", [None]),
        ("<tool_call>", [None]),
        ("<tool_call>[]</tool_call>", [None]),
        ('<tool_call>{"name": ' + "[" * 100_000, [None]),
    ],
)
def test_calls_are_found_in_every_dress(text, names):
    assert [call and call.name for call in find_calls(text)] == names


def test_of_several_looks_the_first_counts_and_a_verdict_stands_alone():
    look, verdict = ChatCall("stats", {}), ChatCall("submit_grade", {})
    assert choose_call([look, None, look], "submit_grade") == look
    assert choose_call([verdict], "submit_grade") == verdict
    assert choose_call([], "submit_grade") is None
    for calls in ([None], [look, verdict], [verdict, verdict], [None, verdict]):
        with pytest.raises(MalformedCall):
            choose_call(calls, "submit_grade")


def test_thoughts_are_not_read():
    thought = f"<think>\n{SUBMIT}\n</think>\n"
    qwen = chat_tokenizer("qwen3")
    chat = ChatFormat(qwen, TOOLS, thinking=True)
    assert chat.calls(chat.encode(thought + STATS)) == find_calls(STATS)
    assert chat.calls(chat.encode(thought[:-10])) == []
    thinker = ChatFormat(chat_tokenizer("thinker"), TOOLS)
    assert thinker.calls(thinker.encode(f"{SUBMIT}\n</think>\n{STATS}")) == find_calls(
        STATS
    )
    assert thinker.calls(thinker.encode(STATS)) == []  # still thinking


# --- a whole grading, token by token --------------------------------------------------


class Puppeteer:
    """Reads the context back into a dialogue and says what the plain script would."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.chat = ChatFormat(tokenizer, TOOLS)
        self.exchanges: list[Exchange] = []
        self.context: list[int] = []

    def __call__(self, context):
        if self.context:
            assert context[: len(self.context)] == self.context
            heard = shown(self.tokenizer, context[len(self.context) :])
            slot = self.chat.pieces.result
            output = heard.removeprefix(slot.before).removesuffix(slot.after)
            output = json.loads(f'"{output}"') if slot.is_json else output
            self.exchanges.append(
                Exchange(self.call, "\n".join(output.split("\n")[1:-1]))
            )
        self.call = LOOK(Dialogue("", (), tuple(self.exchanges), 0))
        said = self.chat.call_ids(self.call.name, self.call.arguments)
        self.context = [*context, *said]
        return said


def grade(mind, candidates=GROUP):
    grader = AgenticGrader(mind)
    result = asyncio.run(grade_or_fallback(grader, TASK, candidates, 7, 60.0))
    return *result, grader.records[-1]


@each_family
def test_a_grading_goes_through_tokens_in_every_family(family):
    tokenizer = chat_tokenizer(family)
    player = Puppeteer(tokenizer)
    mind = ChatMind(ReplayEngine(player), tokenizer, "replay", max_new_tokens=10_000)
    graded, why, record = grade(mind)
    expected, _, plain = grade(ScriptedMind(LOOK))
    assert why == "" and graded == expected
    assert [e.call for e in record.exchanges] == [e.call for e in plain.exchanges]
    # every token of the context was read or written once
    assert record.num_tokens == len(player.context)


def test_sampled_ids_stay_where_encoding_again_would_change_them():
    """A tokenizer that lower-cases, and a turn spelled letter by letter."""
    tokenizer = chat_tokenizer(is_lossy=True)
    chat = ChatFormat(tokenizer, TOOLS)
    text = '<tool_call>{"name": "list_candidates", "arguments": {}}</tool_call>'
    said = tokenizer.convert_tokens_to_ids(list(text.replace(" ", "\u0120")))
    said.append(chat.stop_ids[0])
    assert tokenizer.encode(shown(tokenizer, said)) != said
    contexts = []

    def script(context):
        contexts.append(context)
        return said

    mind = ChatMind(ReplayEngine(script), tokenizer, "replay")
    _, why, record = grade(mind)
    assert why == "max_turns"
    assert all(e.call.name == "list_candidates" for e in record.exchanges[:60])
    for earlier, later in itertools.pairwise(contexts):
        assert later[: len(earlier) + len(said)] == [*earlier, *said]


def test_an_earlier_thought_stays_although_the_template_drops_it():
    tokenizer = chat_tokenizer("qwen3")
    chat = ChatFormat(tokenizer, TOOLS, thinking=True)
    thought = chat.encode("<think>\nI count\n</think>\n\n")
    contexts = []

    def script(context):
        contexts.append(context)
        return [*thought, *chat.call_ids("list_candidates", {})]

    mind = ChatMind(ReplayEngine(script), tokenizer, "replay", thinking=True)
    grade(mind)
    assert shown(tokenizer, contexts[2]).count("I count") == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I like the first one.", "no_tool_call"),
        (SUBMIT + "\n" + SUBMIT, "malformed_call"),
        ('{"name": "stats", "arguments": {"id": ', "malformed_call"),
    ],
)
def test_what_is_no_call_ends_in_the_fallback_with_its_reason(text, reason):
    tokenizer = chat_tokenizer("smol")
    chat = ChatFormat(tokenizer, TOOLS)
    mind = ChatMind(
        ReplayEngine(lambda context: [*chat.encode(text), chat.stop_ids[0]]),
        tokenizer,
        "replay",
    )
    graded, why, record = grade(mind)
    assert (graded, why, record.retried_for) == (None, reason, reason)


# --- a model --------------------------------------------------------------------------

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}
ARCHITECTURES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}


def random_model(name: str = "llama", seed: int = 0, **sizes):
    """Random weights, far from uniform, with 32 ids more than the tokenizer has."""
    torch.manual_seed(seed)
    model_class, config_class = ARCHITECTURES[name]
    vocab_size = len(chat_tokenizer()) + 32
    config = config_class(vocab_size=vocab_size, head_dim=8, **(SIZES | sizes))
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


async def talk(engine, seed: int, sampling: SamplingParams, turns: int = 3):
    """Turns with ragged additions: all ids, and each turn's start and completion."""
    rng = np.random.default_rng(seed)
    ids, done = rng.integers(0, 200, 40).tolist(), []
    with engine.conversation() as conversation:
        for turn in range(turns):
            completion = await conversation.complete(ids, sampling, 100 * seed + turn)
            done.append((len(ids), completion))
            ids = [*ids, *completion.ids.tolist(), *rng.integers(0, 200, 5 + turn)]
    return ids, done


def run_together(engine, seeds, sampling):
    async def gather():
        return await asyncio.gather(*(talk(engine, s, sampling) for s in seeds))

    return asyncio.run(gather())


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward(name, temperature):
    """At the sampling temperature, over the ids that the tokenizer has."""
    tokenizer, model = chat_tokenizer(), random_model(name)
    engine = HuggingFaceEngine(model, tokenizer)
    sampling = SamplingParams(temperature, 9, (3,))
    for ids, done in run_together(engine, range(3), sampling):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :, : len(tokenizer)]
        logprobs = (logits.double() / temperature).log_softmax(-1).numpy()
        for start, completion in done:
            assert max(completion.ids) < len(tokenizer)
            positions = np.arange(start, start + len(completion.ids))
            expected = logprobs[positions - 1, completion.ids]
            assert np.abs(expected - completion.logprobs).max() < 1e-4


def test_neighbours_change_nothing_and_the_seed_everything():
    engine = HuggingFaceEngine(random_model(), chat_tokenizer())
    sampling = SamplingParams(1.0, 9, ())
    together = [ids for ids, _ in run_together(engine, range(3), sampling)]
    alone = [run_together(engine, [seed], sampling)[0][0] for seed in range(3)]
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 3


def test_new_weights_are_sampled_from_and_never_under_an_open_conversation():
    engine = HuggingFaceEngine(random_model(tie_word_embeddings=True), chat_tokenizer())
    tied = random_model(seed=1, tie_word_embeddings=True)
    sampling = SamplingParams(1.0, 9, ())

    async def story():
        with engine.conversation(), pytest.raises(RuntimeError, match="open"):
            await engine.sync_weights(tied, 1)
        await engine.sleep()
        await engine.wake()
        await engine.sync_weights(tied, 1)
        return await talk(engine, 0, sampling)

    ids, done = asyncio.run(story())
    expected = run_together(HuggingFaceEngine(tied, chat_tokenizer()), [0], sampling)
    assert ids == expected[0][0]
    assert {completion.weight_version for _, completion in done} == {1}


def test_a_full_context_and_a_cancelled_call_end_a_conversation_cleanly():
    engine = HuggingFaceEngine(random_model(), chat_tokenizer(), max_context=50)
    long = SamplingParams(1.0, 1000, ())

    async def story():
        with engine.conversation() as conversation:
            full = await conversation.complete(list(range(45)), long, 0)
            ids = [*range(45), *full.ids.tolist()]
            empty = await conversation.complete(ids, long, 1)
        slow = HuggingFaceEngine(random_model(), chat_tokenizer())
        with slow.conversation() as conversation, pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await conversation.complete([1, 2], SamplingParams(1.0, 20_000, ()), 0)
        await slow.close()  # would raise with an open conversation
        return full, empty

    full, empty = asyncio.run(story())
    assert (len(full.ids), full.is_finished) == (5, False)
    assert (len(empty.ids), empty.is_finished) == (0, False)


def test_a_model_without_sense_ends_in_the_fallback():
    tokenizer = chat_tokenizer("smol")
    engine = HuggingFaceEngine(random_model(), tokenizer)
    mind = ChatMind(engine, tokenizer, "random", max_new_tokens=20, temperature=1.0)
    graded, why, record = grade(mind)
    assert graded is None and why in ("no_tool_call", "malformed_call")
    assert record.num_tokens > 20
    assert engine.num_open == 0


# --- from the config and the command line ---------------------------------------------


def test_the_grader_chat_loads_a_folder_and_grades(tmp_path):
    """Untrained, it only gets as far as the counted fallback."""
    chat_tokenizer("smol").save_pretrained(tmp_path)
    random_model(max_position_embeddings=4096).save_pretrained(tmp_path)
    overrides = {"grader.name": "chat", "grader.model": str(tmp_path)}
    config = with_overrides(tiny(), overrides).grader
    grader = make_grader(config)
    result = asyncio.run(grade_or_fallback(grader, TASK, GROUP, 7, 60.0))
    assert result[0] is None and result[1] in ("no_tool_call", "malformed_call")
    assert str(tmp_path) in grader.version


def test_what_cannot_be_a_chat_model_is_told_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"grader\.model"):
        with_overrides(tiny(), {"grader.name": "chat"})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        make_grader(GraderConfig("chat", model=str(tmp_path)))
    with pytest.raises(ValueError, match="one of smol"):
        fetch_model("large")
    with pytest.raises(ValueError, match="something else"):
        fetch_model("smol", tmp_path.parent)
    assert fetch_model("smol", tmp_path) == tmp_path  # there already
