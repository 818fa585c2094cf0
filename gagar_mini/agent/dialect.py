"""How a conversation becomes tokens: the compact dialect of the tiny policy.

A trajectory is one append-only sequence of token ids:

    <|task|> statement and file list
    <|view|> ranges.py <|end|>                  an action, sampled by the policy
    <|obs|> def f(x): <|l0|> return x <|l1|>    its observation, appended by the loop
    <|edit|> ranges.py <|old|> <|l1|> <|new|> return 2 * x <|end|>
    <|obs|> ok
    <|submit|> <|end|>

Each tool is one token, arguments are separated by tokens, and `<|end|>` closes a call.
In a file that is viewed a *line tag* stands for each line break, and where an edit
quotes old text the tag stands for its line: to quote is to point, which a policy of a
million parameters learns much sooner than to copy. The tool itself gets the text of the
line, so an edit still names what it replaces, and one that is stale finds nothing.

None of these tokens can be written by text: `encode_text` never yields a special token,
so a file or a program's output cannot speak as the policy or as the loop.
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

LINE_TAGS = tuple(f"<|l{number}|>" for number in range(64))
"""Given to the lines shown in a trajectory in turn, from the first again after the
last; a tag means the line that it closed most recently."""

SPECIAL_TOKENS = (
    PAD,
    TASK,
    OBSERVATION,
    END,
    *SEPARATORS.values(),
    *(f"<|{name}|>" for name in TOOL_ARGUMENTS),
    *LINE_TAGS,
)


class MalformedCall(ValueError):
    """A completion that is no tool call; the sentence becomes the observation."""


@runtime_checkable
class Dialect(Protocol):
    """Conversation <-> tokens. One parser serves training, evaluation and grading."""

    stop_ids: tuple[int, ...]

    def prompt_ids(self, task: Task) -> list[int]:
        """What the policy sees first; rendered once, never again."""
        ...

    def parse(self, ids: Sequence[int], context: Sequence[int]) -> ToolCall:
        """The call that a completion makes after `context`. Raises MalformedCall."""
        ...

    def observation_ids(
        self, call: ToolCall | None, text: str, context: Sequence[int]
    ) -> list[int]:
        """What is appended to `context` for the answer to a call."""
        ...

    def call_ids(self, call: ToolCall, context: Sequence[int]) -> list[int]:
        """The completion that makes `call`: what demonstrations teach."""
        ...


class CompactDialect:
    """One token per tool, per separator and per quoted line."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        self._id = {
            name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS
        }
        missing = [name for name, token_id in self._id.items() if token_id is None]
        if missing:
            raise ValueError(
                f"the tokenizer lacks {', '.join(missing)}: the compact dialect needs "
                "the tokenizer of the tiny policy"
            )
        self._name = {token_id: name for name, token_id in self._id.items()}
        self._tags = tuple(self._id[tag] for tag in LINE_TAGS)
        self._is_tag = frozenset(self._tags)
        self._is_tool = frozenset(self._id[f"<|{name}|>"] for name in TOOL_ARGUMENTS)
        self.stop_ids = (self._id[END],)

    def prompt_ids(self, task: Task) -> list[int]:
        """The statement and the names of the files."""
        listing = " ".join(sorted(task.files))
        return [self._id[TASK], *self._encode(f"{task.statement}\n{listing}\n")]

    def observation_ids(
        self, call: ToolCall | None, text: str, context: Sequence[int]
    ) -> list[int]:
        if call is None or call.name != "view":
            return [self._id[OBSERVATION], *self._encode(text)]
        ids = [self._id[OBSERVATION]]
        first = len(self._shown_lines(context))
        for number, line in enumerate(text.removesuffix("\n").split("\n"), first):
            ids += [*self._encode(line), self._tags[number % len(self._tags)]]
        return ids

    def call_ids(self, call: ToolCall, context: Sequence[int]) -> list[int]:
        ids = [self._id[f"<|{call.name}|>"]]
        for argument in TOOL_ARGUMENTS[call.name]:
            if argument in SEPARATORS:
                ids.append(self._id[SEPARATORS[argument]])
            text = call.arguments[argument]
            tags = self._tags_of(text, context) if argument == "old" else []
            ids += tags or self._encode(text)
        return [*ids, self._id[END]]

    def parse(self, ids: Sequence[int], context: Sequence[int]) -> ToolCall:
        marks = [
            (i, self._name[t])
            for i, t in enumerate(ids)
            if t in self._name and t not in self._is_tag
        ]
        if not marks or marks[-1] != (len(ids) - 1, END):
            raise MalformedCall("the call has no end")
        tool = marks[0][1].strip("<|>")
        if marks[0][0] != 0 or tool not in TOOL_ARGUMENTS:
            raise MalformedCall("a call begins with the name of a tool")
        names = TOOL_ARGUMENTS[tool]
        expected = [SEPARATORS[name] for name in names if name in SEPARATORS]
        if [name for _, name in marks[1:-1]] != expected:
            raise MalformedCall(f"{tool} takes {', '.join(names) or 'no argument'}")
        parts = [ids[a + 1 : b] for (a, _), (b, _) in itertools.pairwise(marks)]
        if not names and parts != [[]]:
            raise MalformedCall(f"{tool} takes no argument")
        arguments = {
            name: self._argument(name, list(part), context)
            for name, part in zip(names, parts, strict=False)
        }
        return ToolCall(tool, arguments)

    def _argument(self, name: str, ids: list[int], context: Sequence[int]) -> str:
        """The text of one argument; tags in a quotation become the lines they close."""
        if not self._is_tag & set(ids):
            return self._decode(ids)
        if name != "old" or not self._is_tag.issuperset(ids):
            raise MalformedCall("line tags stand alone, in the old text of an edit")
        shown = dict(self._shown_lines(context))
        if not shown.keys() >= set(ids):
            raise MalformedCall("a line tag that no line has")
        return "\n".join(self._decode(shown[tag]) for tag in ids)

    def _tags_of(self, text: str, context: Sequence[int]) -> list[int]:
        """The tags of the lines `text`, as they were shown last; empty if never."""
        shown = self._shown_lines(context)[-len(self._tags) :]
        wanted = [self._encode(line) for line in text.split("\n")]
        for start in range(len(shown) - len(wanted), -1, -1):
            run = shown[start : start + len(wanted)]
            if [line for _, line in run] == wanted:
                return [tag for tag, _ in run]
        return []

    def _shown_lines(self, context: Sequence[int]) -> list[tuple[int, list[int]]]:
        """(tag, ids of the line) of every line shown so far, in order."""
        shown, line, is_observation = [], [], False
        for token in context:
            if token in self._is_tool:
                is_observation = False
            elif token == self._id[OBSERVATION]:
                is_observation, line = True, []
            elif is_observation and token in self._is_tag:
                shown.append((token, line))
                line = []
            elif is_observation:
                line.append(token)
        return shown

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_ids(self.tokenizer, ids)
