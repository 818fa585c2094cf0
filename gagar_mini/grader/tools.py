"""The tools of a grading agent: they look at the shared workspace and change nothing.

Paths are keys of the workspace, never of a file system, so there is nothing to escape
to. Whatever is wrong with a call comes back as text; outputs are capped. Patterns are
matched under a deadline. `run` exists only where a sandbox is given: it runs a command
on a copy of one candidate's tree, and nothing of the copy outlives the command.

The tools also remember what was looked at: a candidate that nobody looked at cannot be
ranked, and an execution that never was is no evidence.
"""

import asyncio
import difflib
import itertools
import random
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import regex

from gagar_mini.grader.workspace import Entry, SharedWorkspace, cut, visible
from gagar_mini.types import Files
from gagar_mini.world.sandbox.base import Limits, Sandbox

JsonSchema = Mapping[str, object]

MAX_OUTPUT_CHARS = 8_000
MAX_PATTERN_CHARS = 200
MAX_MATCHES = 60
MAX_LINE_CHARS = 400
GREP_S = 1.0
"""Seconds for one search over all files, whatever the pattern."""
MAX_DIFF_CELLS = 1_000_000
"""Largest product of line counts that two files are compared at."""
MAX_COMMAND_CHARS = 400
RUN_LIMITS = Limits(
    wall_s=5.0, cpu_s=4, memory_mb=512, max_output_bytes=MAX_OUTPUT_CHARS
)


@dataclass(frozen=True)
class GraderCall:
    """A call as a mind wrote it: a tool's name and arguments as JSON values."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class ToolSpec:
    """What a mind is told of a tool: `parameters` are JSON schemas by name, and those
    not in `optional` have to be given."""

    name: str
    description: str
    parameters: Mapping[str, JsonSchema]
    optional: tuple[str, ...] = ()

    @property
    def schema(self) -> JsonSchema:
        """The JSON schema of the arguments as one object."""
        return {
            "type": "object",
            "properties": dict(self.parameters),
            "required": [n for n in self.parameters if n not in self.optional],
            "additionalProperties": False,
        }


class ToolError(ValueError):
    """A call that cannot be answered; the sentence is what the mind reads instead."""


def _string(description: str) -> JsonSchema:
    return {"type": "string", "description": description}


def _number(description: str) -> JsonSchema:
    return {"type": "integer", "description": description}


ID = _string("id of a candidate, such as c-3fa91c")
PATH = _string("path of a file in the repository, such as ranges.py")

INSPECTION_TOOLS = (
    ToolSpec("list_candidates", "All candidates: id, outcome, size of the patch.", {}),
    ToolSpec(
        "stats",
        "What was counted about a candidate: lines, files, findings with locations.",
        {"id": _string("id of a candidate, or all")},
    ),
    ToolSpec(
        "diff",
        "The patch of a candidate, or its changes to one file.",
        {"id": ID, "path": PATH},
        optional=("path",),
    ),
    ToolSpec(
        "compare",
        "How the tree of candidate id_b differs from that of candidate id_a.",
        {"id_a": ID, "id_b": ID, "path": PATH},
        optional=("path",),
    ),
    ToolSpec(
        "read",
        "A file with line numbers. Besides the files of its repository a candidate has "
        "trajectory.txt (its calls) and tests.txt.",
        {
            "id": _string("id of a candidate, or base"),
            "path": PATH,
            "start": _number("first line, from 1"),
            "end": _number("last line"),
        },
        optional=("start", "end"),
    ),
    ToolSpec(
        "grep",
        "Lines that match a regular expression (without counts in braces or groups "
        "that begin with a question mark).",
        {"id": _string("id of a candidate, base, or all"), "pattern": _string("regex")},
    ),
)
RUN_TOOL = ToolSpec(
    "run",
    "Run a command on a throw-away copy of a candidate's tree, such as: python "
    'check.py, or: python -c "from ranges import clamp; print(clamp(1, 2, 3))".',
    {"id": _string("id of a candidate, or base"), "command": _string("the command")},
)


class GradingTools:
    """The tools over one workspace, and the memory of their use.

    `inspected` holds the ids of entries whose patch, files or counts were shown;
    `runs` the id that each execution ran on, "base" for the base.
    """

    def __init__(
        self, workspace: SharedWorkspace, base: Files, sandbox: Sandbox | None = None
    ):
        self.workspace = workspace
        self.inspected: set[str] = set()
        self.runs: list[str] = []
        self.specs = (
            INSPECTION_TOOLS if sandbox is None else (*INSPECTION_TOOLS, RUN_TOOL)
        )
        self._base = base
        self._sandbox = sandbox
        self._tools: dict[str, Callable[..., str]] = {
            "list_candidates": self._list,
            "stats": self._stats,
            "diff": self._diff,
            "compare": self._compare,
            "read": self._read,
            "grep": self._grep,
            "run": self._run,
        }

    async def use(self, call: GraderCall) -> str:
        """The output of a call. Raises SandboxUnavailable where `run` cannot run."""
        # grep and run take their time: other groups go on meanwhile
        return await asyncio.to_thread(self.answer, call)

    def answer(self, call: GraderCall) -> str:
        """`use`, for callers that wait. Blocking."""
        try:
            arguments = self._check(call)
            output = self._tools[call.name](**arguments)
        except ToolError as error:
            output = f"error: {error}"
        return cut(output, MAX_OUTPUT_CHARS)

    def _check(self, call: GraderCall) -> dict[str, object]:
        """The arguments, if they are those of a tool on offer, with the right types."""
        spec = next((s for s in self.specs if s.name == call.name), None)
        if spec is None:
            names = ", ".join(s.name for s in self.specs)
            raise ToolError(f"there is no such tool; there are {names}, submit_grade")
        unknown = call.arguments.keys() - spec.parameters.keys()
        missing = spec.parameters.keys() - call.arguments.keys() - set(spec.optional)
        if unknown or missing:
            raise ToolError(
                f"{spec.name} takes {', '.join(spec.parameters) or 'nothing'}"
            )
        for name, value in call.arguments.items():
            wanted = int if spec.parameters[name]["type"] == "integer" else str
            if type(value) is not wanted:
                raise ToolError(f"{name} must be of type {wanted.__name__}")
        return {"id_" if k == "id" else k: v for k, v in call.arguments.items()}

    def _entry(self, id_: str) -> Entry:
        entry = self.workspace.entry_of(id_)
        if entry is None:
            raise ToolError("no candidate has this id; list_candidates shows them all")
        return entry

    def _list(self) -> str:
        return self.workspace.files["GROUP.txt"]

    def _stats(self, id_: str) -> str:
        ids = self.workspace.entries if id_ == "all" else [self._entry(id_).id]
        # each gets an equal share, so that no page pushes the next out of the output
        share = MAX_OUTPUT_CHARS // max(1, len(ids)) - 80
        pages = []
        for entry_id in ids:
            self.inspected.add(entry_id)
            text = self.workspace.files[f"cand/{entry_id}/stats.txt"]
            pages.append(f"{entry_id}\n{cut(text, max(200, share))}")
        left = [e.id for e in self.workspace.passing if e.id not in self.inspected]
        pages.append(f"passing, not looked at yet: {', '.join(left) or 'none'}")
        return "\n\n".join(pages)

    def _diff(self, id_: str, path: str = "") -> str:
        entry = self._entry(id_)
        if not path:
            self.inspected.add(entry.id)
            return self.workspace.files[f"cand/{entry.id}/patch.diff"]
        old = self.workspace.files.get(f"base/{path}", "")
        new = self.workspace.files.get(f"cand/{entry.id}/tree/{path}", "")
        if not old and not new:
            raise ToolError("there is no such file, before or after the patch")
        self.inspected.add(entry.id)
        return compare_texts(old, new, path) or "the patch leaves this file alone"

    def _compare(self, id_a: str, id_b: str, path: str = "") -> str:
        a, b = self._entry(id_a), self._entry(id_b)
        self.inspected |= {a.id, b.id}
        old, new = self._tree_pages(a.id), self._tree_pages(b.id)
        paths = [path] if path else sorted(old.keys() | new.keys())
        parts = [compare_texts(old.get(p, ""), new.get(p, ""), p) for p in paths]
        return "\n".join(part for part in parts if part) or "no difference"

    def _tree_pages(self, id_: str) -> dict[str, str]:
        root = f"cand/{id_}/tree/"
        files = self.workspace.files
        return {p.removeprefix(root): files[p] for p in files if p.startswith(root)}

    def _read(self, id_: str, path: str, start: int = 1, end: int = 0) -> str:
        name = self._find(id_, path)
        lines = self.workspace.files[name].split("\n")
        # behind a cut, lines have no number that could be cited
        num_numbered = self.workspace.cut_after.get(name, len(lines))
        first, last = max(1, start), end if end > 0 else len(lines)
        shown = [
            f"{number if number <= num_numbered else '':>4} {line}"
            for number, line in enumerate(lines, start=1)
            if first <= number <= last
        ]
        return "\n".join(shown) or f"the file has {len(lines)} lines"

    def _find(self, id_: str, path: str) -> str:
        """The key of a file. Pages of the host win over files named like them."""
        if id_ == "base":
            root, names = "base/", [f"base/{path}"]
        else:
            entry = self._entry(id_)
            root = f"cand/{entry.id}/tree/"
            names = [f"cand/{id_}/{path}", f"cand/{entry.id}/{path}", root + path]
        for name in names:
            if name in self.workspace.files:
                self.inspected |= set() if id_ == "base" else {entry.id}
                return name
        paths = [p.removeprefix(root) for p in self.workspace.files if root in p]
        raise ToolError(f"there is no such file; there are {' '.join(paths)}")

    def _grep(self, id_: str, pattern: str) -> str:
        roots = {"all": "cand/", "base": "base/"}
        root = roots[id_] if id_ in roots else f"cand/{self._entry(id_).id}/"
        base = {text for p, text in self.workspace.files.items() if p[:5] == "base/"}
        pages = {
            path: text
            for path, text in self.workspace.files.items()
            if path.startswith(root) and not (id_ == "all" and text in base)
        }
        found = list(itertools.islice(search(pages, pattern), MAX_MATCHES + 1))
        more = ["[further matches are not shown]"] if len(found) > MAX_MATCHES else []
        return "\n".join(found[:MAX_MATCHES] + more) or "no match"

    def _run(self, id_: str, command: str) -> str:
        entry = None if id_ == "base" else self._entry(id_)
        tree = self._base if entry is None else entry.tree
        if tree is None:
            raise ToolError("the patch of this candidate does not apply")
        result = self._sandbox.run(tree, split_command(command), limits=RUN_LIMITS)
        self.runs.append("base" if entry is None else entry.id)
        ended = "out of time" if result.is_timeout else f"status {result.returncode}"
        text = (result.stdout + result.stderr).decode("utf-8", "backslashreplace")
        return f"run {len(self.runs)}: {ended}\n{visible(text)}"


def compare_texts(old: str, new: str, path: str) -> str:
    """A unified diff of two pages, "" where they are equal."""
    before, after = old.splitlines(), new.splitlines()
    if old != new and len(before) * len(after) > MAX_DIFF_CELLS:
        return f"{path}: too long to be compared; read both"
    lines = difflib.unified_diff(before, after, path, path, lineterm="")
    return "\n".join(lines)


def search(pages: Mapping[str, str], pattern: str) -> Iterator[str]:
    """ "path:line: text" of every line that matches.

    Raises ToolError for a pattern that is none, and where matching takes longer than
    `GREP_S` in all: some patterns backtrack for ever.
    """
    compiled = compile_pattern(pattern)
    deadline = time.monotonic() + GREP_S
    for path, text in pages.items():
        for number, line in enumerate(text.split("\n"), start=1):
            shown = line[:MAX_LINE_CHARS]
            left = deadline - time.monotonic()
            try:
                # a timeout that is not above 0 means none
                match = compiled.search(shown, timeout=max(left, 1e-3), concurrent=True)
            except TimeoutError:
                match = None
            if time.monotonic() > deadline:
                raise ToolError("the pattern takes too long; use a simpler one")
            if match:
                yield f"{path}:{number}: {shown}"


def compile_pattern(pattern: str) -> regex.Pattern:
    """The pattern, if it may be used. Raises ToolError.

    Counts in braces multiply when nested, until compiling alone needs gigabytes;
    extensions (recursion, lookaround) are more than a search in code needs.
    """
    if not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise ToolError(f"a pattern has 1 to {MAX_PATTERN_CHARS} characters")
    bare = re.sub(r"\\.", "", pattern)
    if "{" in bare or "(?" in bare:
        raise ToolError("no counts in braces, no (?; write \\{ for a brace")
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ToolError(f"the pattern is not valid: {error}") from None


def split_command(command: str) -> list[str]:
    """The words of a command, as a shell would split them; there is no shell."""
    if len(command) > MAX_COMMAND_CHARS:
        raise ToolError(f"a command has at most {MAX_COMMAND_CHARS} characters")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ToolError(f"the command cannot be split: {error}") from None
    if not words or "\0" in command:
        raise ToolError("there is no command")
    return words


def fence(text: str, rng: random.Random) -> str:
    """`text` between two marks that it cannot contain, since they are drawn after it.

    For minds that read one stream of text: what lies between the marks is data.
    """
    mark = ""
    while not mark or mark in text:
        mark = f"DATA-{rng.randrange(16**8):08x}"
    return f"<{mark}>\n{text}\n</{mark}>"
