"""Minds: who chooses the next call of a grading. A script, and any model behind an
OpenAI-compatible endpoint.

The endpoint's verdict counts only as a call of `submit_grade`; prose is neither parsed
nor kept. The key comes from the environment when a request is made, and is in no
object, record or message of this package.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Self

from gagar_mini.grader.agentic import Dialogue, Exchange, MindReply
from gagar_mini.grader.instructions import INSTRUCTIONS
from gagar_mini.grader.tools import GraderCall, ToolSpec, fence
from gagar_mini.types import seed_for

API_KEY = "OPENAI_API_KEY"
"""Name of the environment variable that holds the endpoint's key."""

NO_KEY = "none"
"""Sent where no key is set: a server on one's own machine asks for none."""

CHARS_PER_TOKEN = 4
"""Rough size of a token, for endpoints that do not report what they used."""


class StatelessMind:
    """A mind that reads the whole dialogue anew for each reply: its own session."""

    def session(self) -> AbstractContextManager[Self]:
        return nullcontext(self)


class ScriptedMind(StatelessMind):
    """Plays a script, a function of the dialogue: for tests, lessons and
    demonstrations. A script that returns None makes no call."""

    def __init__(
        self, script: Callable[[Dialogue], GraderCall | None], version: str = "scripted"
    ):
        self.version = version
        self._script = script

    async def reply(self, dialogue: Dialogue) -> MindReply:
        return MindReply(self._script(dialogue))


Judge = Callable[[str, str], Mapping[str, object]]
"""(stats page, patch) -> the five scores by criterion, and "flags": a list of code,
message and evidence."""


def look_then_judge(judge: Judge) -> Callable[[Dialogue], GraderCall]:
    """The plain way to grade, as a script: list all, look at each passing candidate,
    judge each by itself, submit."""

    def script(dialogue: Dialogue) -> GraderCall:
        said = dialogue.exchanges
        if not said:
            return GraderCall("list_candidates", {})
        ids = passing_ids(said[0].output)
        looks = [(tool, id_) for id_ in ids for tool in ("stats", "diff")]
        if len(said) <= len(looks):
            tool, id_ = looks[len(said) - 1]
            return GraderCall(tool, {"id": id_})
        pages = [exchange.output for exchange in said[1 : len(looks) + 1]]
        return submission(ids, list(map(judge, pages[::2], pages[1::2])))

    return script


def passing_ids(listing: str) -> list[str]:
    """The ids that `list_candidates` shows as passing."""
    lines = [line.split() for line in listing.splitlines()]
    return [words[0] for words in lines if words[1:2] == ["pass:"]]


def submission(
    ids: Sequence[str], judgements: Sequence[Mapping[str, object]]
) -> GraderCall:
    """The call that submits one judgement per id."""
    grades, flags = [], []
    for id_, judgement in zip(ids, judgements, strict=True):
        scores = {name: v for name, v in judgement.items() if name != "flags"}
        grades.append({"id": id_, **scores})
        flags += [{"id": id_, **flag} for flag in judgement.get("flags", ())]
    return GraderCall("submit_grade", {"grades": grades, "flags": flags})


@dataclass(frozen=True)
class EndpointMind(StatelessMind):
    """A chat model behind an OpenAI-compatible endpoint, such as a local vLLM server.

    `base_url` ends in "/v1", as a rule; "" is the client's default. `max_new_tokens`
    are those of one reply. Needs the extra `endpoint` (the `openai` client).
    """

    model: str
    base_url: str = ""
    max_new_tokens: int = 4_096
    temperature: float | None = None
    """None leaves it to the endpoint: some models accept no other value."""

    @property
    def version(self) -> str:
        prompt = hashlib.sha256(INSTRUCTIONS.encode()).hexdigest()[:8]
        return f"{self.base_url} {self.model} {self.temperature} {prompt}"

    async def reply(self, dialogue: Dialogue) -> MindReply:
        """One request. Raises what the client raises."""
        openai = import_openai()
        messages = chat_messages(dialogue)
        settings = {} if self.temperature is None else {"temperature": self.temperature}
        # a client per request: a connection must not outlive its event loop, nor a key
        # the request that needs it
        async with openai.AsyncOpenAI(
            api_key=os.environ.get(API_KEY) or NO_KEY, base_url=self.base_url or None
        ) as client:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=messages,
                tools=[chat_tool(spec) for spec in dialogue.tools],
                max_completion_tokens=self.max_new_tokens,
                seed=seed_for(dialogue.seed, "reply", len(messages)) % 2**31,
                **settings,
            )
        message = answer.choices[0].message if answer.choices else None
        calls = [] if message is None else (message.tool_calls or [])
        written = [(c.function.name, c.function.arguments) for c in calls if c.function]
        used = answer.usage.total_tokens if answer.usage else 0
        guess = len(json.dumps([messages, written])) // CHARS_PER_TOKEN
        return read_calls(written, used or guess)


def import_openai() -> object:
    """The `openai` module. ValueError, in a sentence, where it is not installed."""
    try:
        import openai
    except ImportError:
        raise ValueError(
            "the grader llm needs the openai client: pip install 'gagar-mini[endpoint]'"
        ) from None
    return openai


def read_calls(written: Sequence[tuple[str, str]], num_tokens: int) -> MindReply:
    """The reply in the calls of one message: (name, arguments as JSON) each.

    Of several looks the first is taken. Two verdicts, or a verdict among looks, are
    none; nor is JSON with a key twice, NaN or anything after its end.
    """
    if not written:
        return MindReply(None, num_tokens)
    name, text = written[0]
    if len(written) > 1 and any(n == "submit_grade" for n, _ in written):
        return MindReply(None, num_tokens, "malformed_call")
    try:
        arguments = json.loads(
            text or "{}", object_pairs_hook=_distinct, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return MindReply(None, num_tokens, "malformed_call")
    if not isinstance(arguments, dict):
        return MindReply(None, num_tokens, "malformed_call")
    return MindReply(GraderCall(name, arguments), num_tokens)


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def chat_tool(spec: ToolSpec) -> dict[str, object]:
    """A tool in the format of the chat completions API."""
    function = {
        "name": spec.name,
        "description": spec.description,
        "parameters": spec.schema,
    }
    return {"type": "function", "function": function}


def chat_messages(dialogue: Dialogue) -> list[dict[str, object]]:
    """The dialogue as chat messages; what candidates wrote stands in fences whose marks
    are drawn anew for each output."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task_message(dialogue)},
    ]
    for number, exchange in enumerate(dialogue.exchanges):
        messages += _exchange_messages(exchange, number, dialogue.seed)
    return messages


def _exchange_messages(
    exchange: Exchange, number: int, seed: int
) -> list[dict[str, object]]:
    if exchange.call is None:
        return [{"role": "user", "content": exchange.output}]
    call_id = f"call_{number}"
    function = {
        "name": exchange.call.name,
        "arguments": json.dumps(dict(exchange.call.arguments)),
    }
    call = {"id": call_id, "type": "function", "function": function}
    shown = shown_output(exchange, number, seed)
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": shown},
    ]


def task_message(dialogue: Dialogue) -> str:
    """What the user says first."""
    return f"The task:\n{dialogue.task}"


def shown_output(exchange: Exchange, number: int, seed: int) -> str:
    """The output of exchange `number` as a chat model reads it: data in a fence."""
    if exchange.call is None or not exchange.is_data:
        return exchange.output
    return fence(exchange.output, random.Random(seed_for(seed, "fence", number)))
