"""Turns that could have led to a tree: look, edit, check, and some wasted calls.

How many calls a member wasted is drawn apart from its patch, so that the process says
nothing about the tree. All observations are real.
"""

import ast
import difflib
import random
from collections.abc import Iterator, Sequence

from gagar_mini.agent.loop import Workspace
from gagar_mini.types import Files, Task, ToolCall, Turn
from gagar_mini.world.sandbox.base import Sandbox

NUM_SLIPS = (0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4)
"""Drawn from: how many calls a ladder member wasted; 4 are severe (`rubric`)."""

MALFORMED = "error: the call has no end"


def draw_turns(
    rng: random.Random,
    task: Task,
    files: Files,
    num_slips: int,
    workspace: "CheckedWorkspace",
) -> tuple[Turn, ...]:
    """Turns that lead from the base to `files`, with `num_slips` wasted calls."""
    calls = direct_calls(rng, task, files)
    for _ in range(num_slips):
        add_slip(rng, task, calls)
    calls.append(ToolCall("submit", {}))
    return tuple(workspace.play(calls))


def direct_calls(rng: random.Random, task: Task, files: Files) -> list[ToolCall | None]:
    """Look at the files in scope and perhaps others, edit, and perhaps check."""
    seen = list(dict.fromkeys(target.path for target in task.targets))
    others = sorted(set(task.files) - {*seen})
    rng.shuffle(others)
    calls = [ToolCall("ls", {})] if rng.random() < 0.2 else []
    calls += [ToolCall("view", {"path": path}) for path in seen]
    calls += [
        ToolCall("view", {"path": path}) for path in others[: rng.choice((0, 0, 1, 2))]
    ]
    if rng.random() < 0.2:
        calls.append(ToolCall("run_check", {}))
    edits = list(edits_to(task.files, files))
    calls += edits
    if rng.random() < 0.5:
        calls.append(ToolCall("run_check", {}))
    return calls


def edits_to(base: Files, files: Files) -> Iterator[ToolCall]:
    """Edits and new files that make `files` of `base`; the trees differ in text."""
    for path in sorted(files):
        if path not in base:
            yield ToolCall("create", {"path": path, "text": files[path].decode()})
        elif files[path] != base[path]:
            old, new = (tree[path].decode().split("\n") for tree in (base, files))
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            # from the last to the first: the lines above an edit keep their numbers
            for tag, i, j, k, m in reversed(matcher.get_opcodes()):
                if tag != "equal":
                    yield ToolCall(
                        "edit", {"path": path} | quoted(old, new, i, j, k, m)
                    )
                    old[i:j] = new[k:m]


def quoted(
    old: list[str], new: list[str], i: int, j: int, k: int, m: int
) -> dict[str, str]:
    """Old and new text of the lines `old[i:j]` and `new[k:m]`, with the fewest lines
    around them that make the old text occur once."""
    text = "\n".join(old)
    before, after = 0, 0
    while True:
        block = "\n".join(old[i - before : j + after])
        if block.strip() and text.count(block) == 1:
            put = [*old[i - before : i], *new[k:m], *old[j : j + after]]
            return {"old": block, "new": "\n".join(put)}
        if before < i:
            before += 1
        else:
            assert j + after < len(old), "the whole text occurs once in itself"
            after += 1


def add_slip(rng: random.Random, task: Task, calls: list[ToolCall | None]) -> None:
    """Put one more wasted call into `calls`, of a kind that fits."""
    views = [i for i, c in enumerate(calls) if c is not None and c.name == "view"]
    edits = [i for i, c in enumerate(calls) if c is not None and c.name == "edit"]
    slip = rng.choice(("view", "view", "malformed", "failed", "check", "undo"))
    if slip == "undo" and edits:
        edit = calls[rng.choice(edits)]
        back = {"old": edit.arguments["new"], "new": edit.arguments["old"]}
        at = calls.index(edit) + 1
        calls[at:at] = [ToolCall("edit", {**edit.arguments, **back}), edit]
    elif slip == "check" and calls[-1] == ToolCall("run_check", {}):
        calls.append(calls[-1])
    elif slip == "failed":
        path = rng.choice(task.targets).path
        failing = ToolCall("edit", {"path": path, "old": "return  None", "new": "pass"})
        at = rng.randint(1, len(calls))
        calls[at:at] = [failing] if failing in calls[:at] else [failing, failing]
    elif slip == "malformed":
        calls.insert(rng.randint(1, len(calls)), None)
    else:
        first = rng.choice(views)
        calls.insert(rng.randint(first + 1, len(calls)), calls[first])


class CheckedWorkspace:
    """Plays calls on fresh copies of a task; remembers what the check said of a
    program, since comments and other files change none."""

    def __init__(self, task: Task, sandbox: Sandbox):
        self.task, self._sandbox = task, sandbox
        self._reports: dict[str, str] = {}

    def play(self, calls: Sequence[ToolCall | None]) -> Iterator[Turn]:
        """The turns that these calls make; None is a completion that was no call."""
        workspace = Workspace(self.task, self._sandbox)
        for call in calls:
            if call is None:
                yield Turn(None, MALFORMED, 0)
            elif call.name == "submit":
                yield Turn(call, "", 0)
            elif call.name == "run_check":
                yield Turn(call, self._check(workspace, call), 0)
            else:
                yield Turn(call, workspace.act(call), 0)

    def _check(self, workspace: Workspace, call: ToolCall) -> str:
        files = workspace.files
        modules = [path for path in sorted(self.task.files) if path.endswith(".py")]
        key = "\n".join(ast.dump(ast.parse(files[path])) for path in modules)
        if key not in self._reports:
            self._reports[key] = workspace.act(call)
        return self._reports[key]
