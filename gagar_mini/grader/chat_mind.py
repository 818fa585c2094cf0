"""A mind from any chat model that an engine samples: token in, token out.

A grading is one append-only context: instructions, tools and task are rendered once;
then the model's own ids and, for each answer, its rendered delta. What candidates wrote
stands in fences, as for an endpoint, and yields no control token. The verdict counts as
a call of `submit_grade` alone.
"""

import hashlib

from transformers import PreTrainedTokenizerBase

from gagar_mini.agent.chat_dialect import ChatCall, ChatFormat, choose_call
from gagar_mini.agent.dialect import MalformedCall
from gagar_mini.grader.agentic import Dialogue, Exchange, MindReply
from gagar_mini.grader.instructions import INSTRUCTIONS
from gagar_mini.grader.minds import chat_tool, shown_output, task_message
from gagar_mini.grader.tools import GraderCall
from gagar_mini.grader.verdict import SUBMIT_TOOL
from gagar_mini.model.hf_engine import HuggingFaceEngine, load_chat_model
from gagar_mini.types import Engine, SamplingParams, seed_for


class ChatMind:
    """Grades through a chat model (protocol: `agentic.GraderMind`).

    `name` tells the model apart in the version. `max_new_tokens` are those of one
    reply; `temperature` 0 is greedy.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        max_new_tokens: int = 1024,
        temperature: float = 0.0,
        thinking: bool = False,
    ):
        ChatFormat(tokenizer)  # a sentence now, not a crash in every grading
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.thinking = thinking

    @property
    def version(self) -> str:
        prompt = hashlib.sha256(INSTRUCTIONS.encode()).hexdigest()[:8]
        how = f"{self.temperature} {self.thinking} {self.max_new_tokens}"
        return f"chat {self.name} {self.engine.weight_version} {how} {prompt}"

    def session(self) -> "ChatSession":
        return ChatSession(self)


def load_chat_mind(name: str) -> ChatMind:
    """The mind of a chat model: a folder, or an id of the hub. ValueError, in a
    sentence, where it cannot be loaded or cannot chat."""
    model, tokenizer = load_chat_model(name)
    return ChatMind(HuggingFaceEngine(model, tokenizer), tokenizer, name)


class ChatSession:
    """One grading: its context, its conversation with the engine."""

    def __init__(self, mind: ChatMind):
        self.context: list[int] = []
        self._mind = mind
        self._conversation = mind.engine.conversation()
        self._known: tuple[Exchange, ...] = ()
        self._is_finished = True

    async def reply(self, dialogue: Dialogue) -> MindReply:
        """One completion behind what is new in the dialogue."""
        if not self.context:
            tools = [chat_tool(spec) for spec in dialogue.tools]
            mind = self._mind
            self._format = ChatFormat(mind.tokenizer, tools, thinking=mind.thinking)
            fresh = self._format.prompt_ids(INSTRUCTIONS, task_message(dialogue))
        else:
            fresh = self._answers(dialogue)
        self.context += fresh
        sampling = SamplingParams(
            self._mind.temperature, self._mind.max_new_tokens, self._format.stop_ids
        )
        seed = seed_for(dialogue.seed, "reply", len(dialogue.exchanges))
        done = await self._conversation.complete(self.context, sampling, seed)
        said = done.ids.tolist()
        self.context += said
        self._is_finished = done.is_finished
        return as_reply(self._format.calls(said), len(fresh) + len(said))

    def _answers(self, dialogue: Dialogue) -> list[int]:
        """The delta of what was answered since the last reply."""
        num_known = len(self._known)
        assert dialogue.exchanges[:num_known] == self._known, "the past has changed"
        self._known = dialogue.exchanges
        ids: list[int] = []
        for number, exchange in enumerate(dialogue.exchanges[num_known:], num_known):
            ids += self._format.observation_ids(
                shown_output(exchange, number, dialogue.seed),
                is_result=exchange.call is not None,
                is_finished=self._is_finished,
            )
        return ids

    def __enter__(self) -> "ChatSession":
        self._conversation.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._conversation.__exit__(*exc_info)


def as_reply(calls: list[ChatCall | None], num_tokens: int) -> MindReply:
    """The reply in the calls of one turn: of several looks the first."""
    try:
        call = choose_call(calls, SUBMIT_TOOL.name)
    except MalformedCall:
        return MindReply(None, num_tokens, "malformed_call")
    if call is None:
        return MindReply(None, num_tokens)
    return MindReply(GraderCall(call.name, call.arguments), num_tokens)
