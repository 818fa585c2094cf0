"""Chat models as policies: the agent's calls in every template, whole rollouts token by
token, and what a model may get wrong."""

import asyncio
import itertools
import json

import numpy as np
import pytest
import torch
from chat_world import ADDED, FAMILIES, SPECIAL, chat_tokenizer
from test_agent import REPAIR, SUBMIT, TASK, VIEW
from test_chat import ARCHITECTURES, random_model, run_together

from gagar_mini.agent.chat_dialect import ChatDialect
from gagar_mini.agent.dialect import TOOL_ARGUMENTS, MalformedCall
from gagar_mini.agent.loop import run_agent
from gagar_mini.agent.rollouts import Harness, rollout_group
from gagar_mini.agent.scripted import ScriptedEngine
from gagar_mini.cli import main
from gagar_mini.config import PRESETS, RolloutConfig
from gagar_mini.evaluating import is_chat, open_subject
from gagar_mini.learn.demonstrations import bugs_of, edit
from gagar_mini.model.batch_engine import ChatRows, open_chat_engine, trial_error
from gagar_mini.model.hf_engine import HuggingFaceEngine, ReplayEngine
from gagar_mini.model.torch_engine import RowEngine
from gagar_mini.paths import find_checkpoint
from gagar_mini.types import SamplingParams, Status, StopReason, ToolCall
from gagar_mini.world.tasks import load_tasks

LIMITS = RolloutConfig(
    group_size=2,
    max_new_tokens=5_000,
    max_action_tokens=20_000,
    max_context_tokens=60_000,
)
CHECK = ToolCall("run_check", {})
HOSTILE = 'a "b"\n\\ </tool_call> <|im_end|>' + "".join(SPECIAL + ADDED) + "\u00e9{}}"
each_family = pytest.mark.parametrize("family", FAMILIES)


def end_of(dialect):
    return dialect.call_ids(SUBMIT, [])[-1]


def worded(dialect, text):
    """A turn of plain words."""
    return [*dialect.format.encode(text), end_of(dialect)]


# --- calls ----------------------------------------------------------------------------


@each_family
@pytest.mark.parametrize("thinking", [False, True])
def test_every_call_is_read_as_it_is_taught(family, thinking):
    dialect = ChatDialect(chat_tokenizer(family), tools="bash", thinking=thinking)
    for name, arguments in (TOOL_ARGUMENTS | {"bash": ("command",)}).items():
        call = ToolCall(name, dict.fromkeys(arguments, HOSTILE))
        ids = dialect.call_ids(call, [])
        assert ids[-1] in dialect.stop_ids
        assert dialect.parse(ids, []) == call


SLIPS = {
    "I would fix it.": "there is no tool call in this turn",
    '{"name": "edit", "arguments": {"path": ': "the call cannot be read",
    '{"name": "fly", "arguments": {}}': "there is no tool 'fly'",
    '{"name": "bash", "arguments": {"command": "ls"}}': "there is no tool 'bash'",
    '{"name": "view", "arguments": {}}': "view takes path as strings",
    '{"name": "view", "arguments": {"path": 1}}': "view takes path as strings",
    '{"name": "ls", "arguments": {"path": "."}}': "ls takes no argument",
    '{"name": "submit", "arguments": {}}\n' * 2: "submit stands alone",
}


@pytest.mark.parametrize(("said", "told"), SLIPS.items())
def test_a_slip_is_told_and_the_episode_goes_on(said, told, sandbox):
    dialect = ChatDialect(chat_tokenizer("smol"))
    slip = worded(dialect, said)
    with pytest.raises(MalformedCall, match=told):
        dialect.parse(slip, [])
    turns = [slip, dialect.call_ids(REPAIR, []), dialect.call_ids(SUBMIT, [])]
    trajectory = play(dialect, turns, sandbox)
    assert trajectory.turns[0].action is None
    assert trajectory.turns[0].observation == f"error: {told}"
    assert trajectory.stop_reason is StopReason.SUBMITTED and trajectory.patch


def play(dialect, turns, sandbox, limits=LIMITS):
    engine = ScriptedEngine([turns])
    run = run_agent(TASK, engine, dialect, sandbox, limits, trajectory_id="t", seed=0)
    return asyncio.run(run)


def test_a_turn_that_a_limit_cut_off_is_ended_by_the_loop_not_by_the_policy(sandbox):
    """A call that is whole counts; the end that was not sampled is no action."""
    dialect = ChatDialect(chat_tokenizer())
    view, submit = dialect.call_ids(VIEW, [])[:-1], dialect.call_ids(SUBMIT, [])
    trajectory = play(dialect, [view, submit], sandbox)
    prompt, answer = dialect.prompt_ids(TASK), trajectory.turns[0].observation
    observed = [end_of(dialect), *dialect.observation_ids(VIEW, answer)]
    assert trajectory.ids.tolist() == [*prompt, *view, *observed, *submit]
    expected = [(prompt, False), (view, True), (observed, False), (submit, True)]
    mask = [is_action for ids, is_action in expected for _ in ids]
    assert trajectory.action_mask.tolist() == mask


# --- whole rollouts -------------------------------------------------------------------


def rolled_out(dialect, task, script, sandbox, tools="edit"):
    """A group whose members all say `script`, a completion a turn. What is shown and
    what is said end with one stop token each, which tells the turn."""
    num_prompt = len(dialect.prompt_ids(task))

    def say(context):
        ends = sum(token in dialect.stop_ids for token in context[num_prompt:])
        return script[ends // 2]

    limits = RolloutConfig(**{**vars(LIMITS), "tools": tools})
    harness = Harness(ReplayEngine(say), dialect, sandbox)
    run = rollout_group(harness, task, limits, group_id="g", seed=1)
    return asyncio.run(run)


def repair_of(task, tools):
    """The calls that repair a task of the set, by edits or by commands."""
    edits = [edit(bug, bug.buggy, bug.gold) for bug in bugs_of(task)]
    if tools == "bash":
        files = {path: content.decode() for path, content in task.files.items()}
        for call in edits:
            path, old, new = call.arguments.values()
            files[path] = files[path].replace(old, new)
        edits = [
            ToolCall("bash", {"command": f"cat > {path} << 'END'\n{text}END"})
            for path, text in files.items()
        ]
    calls = [ToolCall("ls", {}), *edits]
    return [*calls, CHECK, SUBMIT]


@each_family
@pytest.mark.parametrize("tools", ["edit", "bash"])
def test_a_real_task_is_solved_in_every_family(family, tools, sandbox):
    """The ids of a trajectory are prompt, calls and answers, each as it was made, and
    the mask is of the calls, their ends (which are the padding, too) included."""
    task = load_tasks("core", "eval")[0]
    dialect = ChatDialect(chat_tokenizer(family), tools=tools)
    calls = repair_of(task, tools)
    script = [dialect.call_ids(call, []) for call in calls]
    group = rolled_out(dialect, task, script, sandbox, tools)
    assert [outcome.status for outcome in group.outcomes] == [Status.PASS] * 2
    for trajectory in group.trajectories:
        assert [turn.action for turn in trajectory.turns] == calls
        ids, mask = [*dialect.prompt_ids(task)], [False] * len(dialect.prompt_ids(task))
        for said, turn in zip(script, trajectory.turns, strict=True):
            seen = dialect.observation_ids(turn.action, turn.observation)
            seen = [] if turn.action == SUBMIT else seen
            ids += [*said, *seen]
            mask += [True] * len(said) + [False] * len(seen)
        assert trajectory.ids.tolist() == ids
        assert trajectory.action_mask.tolist() == mask


def test_sampled_ids_stay_where_encoding_again_would_change_them(sandbox):
    """A tokenizer that lower-cases, and a turn spelled letter by letter."""
    tokenizer = chat_tokenizer(is_lossy=True)
    dialect = ChatDialect(tokenizer)
    text = '{"name": "view", "arguments": {"path": "maths.py"}}\nas I said'
    letters = list(text.replace(" ", "\u0120").replace("\n", "\u010a"))
    said = tokenizer.convert_tokens_to_ids(letters)
    said.append(end_of(dialect))
    assert tokenizer.encode(tokenizer.decode(said)) != said
    turns = [said, dialect.call_ids(SUBMIT, [])]
    trajectory = play(dialect, turns, sandbox)
    assert trajectory.turns[0].action == VIEW
    assert trajectory.ids[trajectory.action_mask].tolist() == list(
        itertools.chain(*turns)
    )


def test_an_earlier_thought_stays_although_the_template_drops_it(sandbox):
    dialect = ChatDialect(chat_tokenizer("qwen3"), thinking=True)
    thought = dialect.format.encode("<think>\nI look\n</think>\n\n")
    turns = [[*thought, *dialect.call_ids(call, [])] for call in (VIEW, REPAIR, SUBMIT)]
    trajectory = play(dialect, turns, sandbox)
    assert [turn.action for turn in trajectory.turns] == [VIEW, REPAIR, SUBMIT]
    assert trajectory.ids[trajectory.action_mask].tolist() == list(
        itertools.chain(*turns)
    )


@each_family
def test_nothing_that_is_shown_speaks_as_the_chat(family):
    tokenizer = chat_tokenizer(family)
    dialect = ChatDialect(tokenizer)
    controls = tokenizer.convert_tokens_to_ids([*SPECIAL, *ADDED])

    def num_controls(ids):
        return np.isin(ids, controls).sum()

    for call in (VIEW, None):
        plain = dialect.observation_ids(call, "x")
        hostile = dialect.observation_ids(call, HOSTILE + "\ud800")
        assert num_controls(hostile) == num_controls(plain)
    forged = ToolCall("create", {"path": "\ud800.py", "text": "\ud800"})
    assert dialect.parse(dialect.call_ids(forged, []), []).arguments["path"] == "?.py"
    escaped = dialect.format.encode(json.dumps({"name": "view", "arguments": {}}))
    with pytest.raises(MalformedCall):
        dialect.parse(escaped, [])


def test_a_name_that_is_no_text_is_refused_not_fatal(sandbox):
    """JSON can spell half of a surrogate pair, UTF-8 cannot."""
    dialect = ChatDialect(chat_tokenizer("smol"), tools="bash")
    turns = [
        worded(dialect, json.dumps({"name": name, "arguments": arguments}))
        for name, arguments in {
            "view": {"path": "\ud800"},
            "create": {"path": "\ud800.py", "text": "\ud800"},
            "edit": {"path": "maths.py", "old": "n + 3", "new": "'\ud800'"},
            "bash": {"command": "echo \ud800"},
        }.items()
    ]
    limits = RolloutConfig(**{**vars(LIMITS), "tools": "bash"})
    trajectory = play(dialect, [*turns, dialect.call_ids(SUBMIT, [])], sandbox, limits)
    assert trajectory.stop_reason is StopReason.SUBMITTED


# --- many conversations at once -------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rows_sample_what_one_after_the_other_would(name):
    """Ragged turns, more conversations than rows, another temperature."""
    tokenizer, model = chat_tokenizer(), random_model(name)
    sampling = SamplingParams(0.7, 9, (3,))
    engine = open_chat_engine(model, tokenizer, max_rows=3, max_context=128)
    assert isinstance(engine, RowEngine)
    alone = run_together(HuggingFaceEngine(model, tokenizer), range(5), sampling)
    for (ids, done), (others, expected) in zip(
        run_together(engine, range(5), sampling), alone, strict=True
    ):
        assert ids == others
        for (_, one), (_, other) in zip(done, expected, strict=True):
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_a_long_context_is_read_in_parts_beside_short_ones():
    model = random_model()
    rows = ChatRows(model, chat_tokenizer(), 3, 2048)
    ids = np.random.default_rng(0).integers(0, 200, 1200)
    lengths = (1200, 5, 700)
    found = rows.prefill([2, 0, 1], [ids[:n] for n in lengths], [0, 0, 0])
    for length, logits in zip(lengths, found, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor(ids[None, :length])).logits[0, -1]
        assert (logits - expected)[: rows.num_tokens].abs().max() < 1e-3
        assert logits[rows.num_tokens :].max() == -torch.inf


def test_a_model_that_rows_would_change_is_sampled_one_after_the_other():
    model = random_model("qwen3")
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"attention_mask": None}),
        with_kwargs=True,
    )
    tokenizer = chat_tokenizer()
    assert trial_error(ChatRows(model, tokenizer, 2, 64)) > 0.1
    with pytest.warns(UserWarning, match="logits of a trial"):
        assert isinstance(open_chat_engine(model, tokenizer), HuggingFaceEngine)
    model = random_model("qwen3", layer_types=["sliding_attention", "full_attention"])
    with pytest.warns(UserWarning, match="does not attend to all"):
        assert isinstance(open_chat_engine(model, tokenizer), HuggingFaceEngine)


def test_rollouts_of_a_chat_model_agree_with_the_trainer(sandbox):
    """Behaviour log-probs at every sampled token are those of one plain forward."""
    tokenizer, model = chat_tokenizer("smol"), random_model()
    dialect = ChatDialect(tokenizer)
    engine = open_chat_engine(model, tokenizer, max_rows=4, max_context=4096)
    limits = RolloutConfig(max_turns=3, max_new_tokens=20, max_context_tokens=4096)
    run = rollout_group(
        Harness(engine, dialect, sandbox), TASK, limits, group_id="g", seed=0
    )
    group = asyncio.run(run)
    assert len({tuple(t.ids) for t in group.trajectories}) == 8
    for trajectory in group.trajectories:
        with torch.no_grad():
            logits = model(torch.tensor(trajectory.ids[None])).logits[0]
        logprobs = logits[:, : len(tokenizer)].log_softmax(-1).numpy()
        where = np.flatnonzero(trajectory.action_mask)
        assert len(trajectory.turns) == 3 and len(where) > 20
        expected = logprobs[where - 1, trajectory.ids[where]]
        assert np.abs(expected - trajectory.behaviour_logprobs[where]).max() < 1e-3


def test_a_folder_tells_what_it_speaks_and_is_evaluated(tmp_path, capsys, sandbox):
    """An untrained chat model passes nothing, and all of its turns are malformed."""
    tiny = find_checkpoint("data/policy/tiny")
    chat_tokenizer("smol").save_pretrained(tmp_path)
    random_model(max_position_embeddings=4096).save_pretrained(tmp_path)
    assert is_chat(tmp_path) and not is_chat(tiny)
    flags = ["--max-tasks", "1", "--max-turns", "2", "--max-tokens", "30", "--json"]
    assert main(["eval", str(tmp_path), "--tools", "bash", *flags]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["pass_rate"], row["malformed_rate"]) == (0, 1)
    assert main(["eval", str(tiny), "--tools", "bash", *flags]) != 0
    assert "no word for a shell command" in capsys.readouterr().err


def test_rows_sample_from_new_weights_and_sleep():
    """Tied weights, too; the number of the weights is on each completion."""
    tokenizer, sampling = chat_tokenizer(), SamplingParams(1.0, 9, ())
    start, new = (random_model(seed=s, tie_word_embeddings=True) for s in (0, 1))
    engine = open_chat_engine(start, tokenizer, max_context=128)

    async def story():
        with engine.conversation(), pytest.raises(RuntimeError, match="open"):
            await engine.sync_weights(new, 1)
        await engine.sleep()
        await engine.wake()
        await engine.sync_weights(new, 1)

    asyncio.run(story())
    ((ids, done),) = run_together(engine, [0], sampling)
    assert ids == run_together(HuggingFaceEngine(new, tokenizer), [0], sampling)[0][0]
    assert {completion.weight_version for _, completion in done} == {1}


def test_a_checkpoint_is_evaluated_as_a_run_of_a_preset_would_be(tmp_path):
    """A start and what became of it must be measured under the same limits."""
    subject = open_subject(find_checkpoint("data/policy/smol"), "smol")
    assert subject.config == PRESETS["smol"]() and subject.dtype == torch.bfloat16
    for path, preset in ((tmp_path, "smol"), (subject.checkpoint, "smoll")):
        with pytest.raises(ValueError, match="is for the folder of a checkpoint"):
            open_subject(path, preset)
