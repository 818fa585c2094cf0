"""How a conversation becomes tokens: the compact dialect of the tiny policy.

A trajectory is one append-only sequence of token ids:

    <|task|> statement and file list
    <|view|> ranges.py <|end|>                  an action, sampled by the policy
    <|obs|> def f(x): <|l0|> return x <|l1|>    its observation, appended by the loop
    <|edit|> ranges.py <|old|> <|l1|> <|new|> return 2 * x <|end|>
    <|obs|> ok
    <|submit|> <|end|>

Each tool is one token, arguments are separated by tokens, and `<|end|>` closes a call.
In a file that is viewed a *line tag* stands for each line break, and where an edit of
that file quotes old text the tag stands for the line as it was shown: to quote is to
point, which a policy of a million parameters learns much sooner than to copy. The tool
itself gets the text of the line, so an edit still names what it replaces, and one that
is stale finds nothing.

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
"""Given to the lines of a view in turn, from the first again after the last. In an edit
a tag means the line that it closed in the newest view of the same file."""

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
        self, call: ToolCall | None, text: str, *, is_finished: bool = True
    ) -> list[int]:
        """What is appended for the answer to a call (None: a malformed one). A turn is
        not `is_finished` where a limit cut it off before a stop token."""
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
                f"the tokenizer lacks {missing[0]} and {len(missing) - 1} more special "
                "tokens: the compact dialect needs the tokenizer of the tiny policy"
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
        self, call: ToolCall | None, text: str, *, is_finished: bool = True
    ) -> list[int]:
        if call is None or call.name != "view":
            return [self._id[OBSERVATION], *self._encode(text)]
        ids = [self._id[OBSERVATION]]
        for number, line in enumerate(text.removesuffix("\n").split("\n")):
            ids += [*self._encode(line), self._tags[number % len(self._tags)]]
        return ids

    def call_ids(self, call: ToolCall, context: Sequence[int]) -> list[int]:
        ids = [self._id[f"<|{call.name}|>"]]
        for argument in TOOL_ARGUMENTS[call.name]:
            if argument in SEPARATORS:
                ids.append(self._id[SEPARATORS[argument]])
            text = call.arguments[argument]
            if argument == "old":
                shown = self._shown_lines(context, call.arguments["path"])
                ids += self._tags_of(text, shown) or self._encode(text)
            else:
                ids += self._encode(text)
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
        arguments: dict[str, str] = {}
        for name, part in zip(names, parts, strict=False):
            if not self._is_tag & set(part):
                arguments[name] = self._decode(part)
            elif name == "old" and self._is_tag.issuperset(part):
                shown = self._shown_lines(context, arguments["path"])
                arguments[name] = self._quoted(part, dict(shown))
            else:
                raise MalformedCall("line tags stand alone, in the old text of an edit")
        return ToolCall(tool, arguments)

    def _quoted(self, tags: Sequence[int], shown: dict[int, list[int]]) -> str:
        """The lines that `tags` closed."""
        if not shown.keys() >= set(tags):
            raise MalformedCall("no line of that file was shown with this tag")
        return "\n".join(self._decode(shown[tag]) for tag in tags)

    def _tags_of(self, text: str, shown: list[tuple[int, list[int]]]) -> list[int]:
        """The tags of the lines `text`; empty where they were not shown in a row."""
        shown = shown[-len(self._tags) :]
        wanted = [self._encode(line) for line in text.split("\n")]
        for start in range(len(shown) - len(wanted) + 1):
            run = shown[start : start + len(wanted)]
            if [line for _, line in run] == wanted:
                return [tag for tag, _ in run]
        return []

    def _shown_lines(
        self, context: Sequence[int], path: str
    ) -> list[tuple[int, list[int]]]:
        """(tag, ids of the line) of every line in the newest view of `path`."""
        shown: list[tuple[int, list[int]]] = []
        part: list[int] = []  # the tokens since the last special one
        is_view, is_wanted = False, False
        for token in context:
            if token in self._is_tool:
                is_view, is_wanted, part = self._name[token] == "<|view|>", False, []
            elif token == self.stop_ids[0]:
                is_wanted = is_view and self._decode(part) == path
            elif token == self._id[OBSERVATION]:
                shown, part = ([] if is_wanted else shown), []
            elif token in self._is_tag and is_wanted:
                shown.append((token, part))
                part = []
            else:
                part.append(token)
        return shown

    def _encode(self, text: str) -> list[int]:
        return encode_text(self.tokenizer, text)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_ids(self.tokenizer, ids)
