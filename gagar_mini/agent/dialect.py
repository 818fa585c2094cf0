"""How a conversation becomes tokens: the compact dialect of the tiny policy.

A trajectory is one append-only sequence of token ids:

    <|task|> statement and file list
    <|view|> ranges.py <|end|>                  an action, sampled by the policy
    <|obs|> the file                            its observation, appended by the loop
    <|edit|> ranges.py <|old|> ... <|new|> ... <|end|>
    <|obs|> ok
    <|submit|> <|end|>

Each tool is one token, arguments are separated by tokens, and `<|end|>` closes a call.
None of these can be written by text: `encode_text` never yields a special token, so a
file or a program's output cannot speak as the policy or as the loop.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from transformers import PreTrainedTokenizerFast

from gagar_mini.model.tokenizer import decode_ids, encode_text
from gagar_mini.types import Task, ToolCall

TOOL_ARGUMENTS = {
    "ls": (),
    "view": ("path",),
    "edit": ("path", "old", "new"),
    "create": ("path", "text"),
    "run_check": (),
    "submit": (),
}
"""Every tool and the names of its arguments, in the order in which they are written."""

PAD, TASK, OBSERVATION, END = "<|pad|>", "<|task|>", "<|obs|>", "<|end|>"
SEPARATORS = {"old": "<|old|>", "new": "<|new|>", "text": "<|text|>"}
"""The token that precedes an argument; a first argument follows the tool's token."""

SPECIAL_TOKENS = (
    PAD,
    TASK,
    OBSERVATION,
    END,
    *SEPARATORS.values(),
    *(f"<|{name}|>" for name in TOOL_ARGUMENTS),
)


class MalformedCall(ValueError):
    """A completion that is no tool call; the sentence becomes the observation."""


@runtime_checkable
class Dialect(Protocol):
    """Conversation <-> tokens. One parser serves training, evaluation and grading."""

    stop_ids: tuple[int, ...]

    def prompt_ids(self, task: Task) -> list[int]: ...
    def call_ids(self, call: ToolCall) -> list[int]: ...
    def observation_ids(self, text: str) -> list[int]: ...
    def parse(self, ids: Sequence[int]) -> ToolCall: ...


class CompactDialect:
    """One token per tool and per separator: short enough for a policy of 1M
    parameters."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self._id = {
            name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS
        }
        missing = [name for name, token_id in self._id.items() if token_id is None]
        if missing:
            raise ValueError(
                f"the tokenizer lacks {', '.join(missing)}: the compact dialect "
                "needs the tokenizer of the tiny policy"
            )
        self._name = {token_id: name for name, token_id in self._id.items()}
        self.stop_ids = (self._id[END],)

    def prompt_ids(self, task: Task) -> list[int]:
        """The statement and the names of the files; rendered once, never again."""
        listing = " ".join(sorted(task.files))
        return [self._id[TASK], *self._encode(f"{task.statement}\n{listing}\n")]

    def observation_ids(self, text: str) -> list[int]:
        return [self._id[OBSERVATION], *self._encode(text)]

    def call_ids(self, call: ToolCall) -> list[int]:
        """The completion that makes `call`: what demonstrations teach."""
        ids = [self._id[f"<|{call.name}|>"]]
        for argument in TOOL_ARGUMENTS[call.name]:
            if argument in SEPARATORS:
                ids.append(self._id[SEPARATORS[argument]])
            ids += self._encode(call.arguments[argument])
        return [*ids, self._id[END]]

    def parse(self, ids: Sequence[int]) -> ToolCall:
        """The call that a completion makes. Raises MalformedCall, with a reason to
        show."""
        specials = [(i, self._name[t]) for i, t in enumerate(ids) if t in self._name]
        if not specials or specials[-1] != (len(ids) - 1, END):
            raise MalformedCall("the call has no end")
        tool = specials[0][1].strip("<|>")
        if specials[0][0] != 0 or tool not in TOOL_ARGUMENTS:
            raise MalformedCall("a call begins with the name of a tool")
        names = TOOL_ARGUMENTS[tool]
        expected = [SEPARATORS[name] for name in names if name in SEPARATORS]
        if [name for _, name in specials[1:-1]] != expected:
            raise MalformedCall(f"{tool} takes {', '.join(names) or 'no argument'}")
        ends = [i for i, _ in specials]
        texts = [self._decode(ids[a + 1 : b]) for a, b in itertools.pairwise(ends)]
        if not names and texts != [""]:
            raise MalformedCall(f"{tool} takes no argument")
        return ToolCall(tool, dict(zip(names, texts, strict=False)))

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_ids(self.tokenizer, ids)
