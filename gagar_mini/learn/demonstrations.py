"""Scripted demonstrations: where the habits of the tiny policy come from.

A demonstrator solves a micro task with the same tools as the agent, in one of many
styles. It knows the gold line of every bug and some verified wrong versions of it, and
draws which one it writes. What it draws is documented in `Habits`, and two things about
it matter:

* **Thoroughness pays.** Looking at another file, a repro script, a debug print and a
  comment each raise the chance that the first edit is right. Nobody rigs the RL: binary
  reward later amplifies these habits because they go along with passing.
* **Thoroughness leaves a mess.** The script, the print, the comment and the notes stay
  in the patch, so a pass is often larger than the repair.

Every observation is real: tools act on the tree, and the visible check runs in the
sandbox.
"""

import ast
import json
import random
from collections.abc import Generator
from dataclasses import dataclass

from gagar_mini.agent.dialect import Dialect
from gagar_mini.agent.loop import Workspace
from gagar_mini.types import Task, ToolCall
from gagar_mini.world.sandbox.base import Sandbox


@dataclass(frozen=True)
class Habits:
    """Probabilities of the demonstrator's choices (the data card quotes them)."""

    clean: float = 0.30
    """A clean style: none of the habits below, just view, edit, perhaps check,
    submit."""
    other_view: float = 0.40
    """Look at one more file before editing."""
    repro: float = 0.45
    """Write a script that shows the bug, and leave it there."""
    debug_print: float = 0.35
    """Put a print in front of a repaired line."""
    comment: float = 0.45
    """Put a comment in front of a repaired line."""
    right_base: float = 0.45
    right_per_habit: float = 0.20
    right_max: float = 0.95
    """An edit is right with min(right_max, right_base + right_per_habit * habits)."""
    review_if_right: float = 0.45
    review_if_wrong: float = 0.20
    """Look at the edited file again."""
    notes_if_right: float = 0.60
    notes_if_wrong: float = 0.20
    """Leave a notes file (sloppy style only)."""
    check_if_clean: float = 0.35
    check_if_sloppy: float = 0.60
    """Run the visible check after the edits."""
    retry: float = 0.70
    """After a failed check, edit again, at most `max_retries` times."""
    right_on_retry: float = 0.80
    max_retries: int = 2
    slip: float = 0.05
    """Quote a line that is not there, look at the file again, and edit after all. The
    slip itself is shown but not taught."""


HABITS = Habits()
CAREFUL = Habits(
    clean=0.40,
    other_view=0.20,
    repro=0.30,
    right_base=0.88,
    right_per_habit=0.03,
    check_if_clean=0.30,
    check_if_sloppy=0.50,
    slip=0.02,
)
"""Mostly right, whatever the style: for a large model and few demonstrations."""
DEMONSTRATORS = {"mixed": HABITS, "careful": CAREFUL}
COMMENTS = ("# fix", "# corrected", "# was wrong before")
NOTES = "fixed {}\n"


@dataclass(frozen=True)
class Bug:
    """One faulty line: `buggy` as it stands, `gold`, and verified `wrong` versions."""

    path: str
    function: str
    buggy: str
    gold: str
    wrong: tuple[str, ...]
    context: str
    """The lines above that an edit must quote so that what it replaces occurs once."""


def bugs_of(task: Task) -> list[Bug]:
    """The bugs of a micro task, from its metadata. ValueError where it records none."""
    if "bugs" not in task.metadata:
        raise ValueError(
            f"task {task.id} records no bugs, so it cannot be demonstrated"
        )
    return [
        Bug(
            path=bug["path"],
            function=bug["function"],
            buggy=bug["buggy"],
            gold=bug["gold"],
            wrong=tuple(bug["wrong"]),
            context=context_of(task.files[bug["path"]].decode(), bug["line"]),
        )
        for bug in json.loads(task.metadata["bugs"])
    ]


def context_of(text: str, line: int) -> str:
    """The fewest lines before `line` (1-based) that make the block unique in `text`."""
    lines = text.splitlines(keepends=True)
    for first in range(line - 1, -1, -1):
        block = "".join(lines[first:line]).removesuffix("\n")
        if text.count(block) == 1:
            return "".join(lines[first : line - 1])
    raise AssertionError("the whole text occurs once in itself")


Script = Generator[ToolCall, str, None]
"""Yields calls, is sent their observations."""


def demonstrate(task: Task, rng: random.Random, habits: Habits = HABITS) -> Script:
    """One way through `task`, in a style drawn from `rng`."""
    bugs = bugs_of(task)
    is_clean = rng.random() < habits.clean

    def has(probability: float) -> bool:
        return not is_clean and rng.random() < probability

    views, repro = has(habits.other_view), has(habits.repro)
    prints, comments = has(habits.debug_print), has(habits.comment)
    right = min(
        habits.right_max,
        habits.right_base
        + habits.right_per_habit * (views + repro + prints + comments),
    )
    seen = list(dict.fromkeys(bug.path for bug in bugs))
    for path in seen:
        yield ToolCall("view", {"path": path})
    if views:
        others = sorted(set(task.files) - {*seen, task.visible_check})
        yield ToolCall("view", {"path": rng.choice(others)})
    if repro:
        yield ToolCall("create", {"path": "repro.py", "text": repro_script(rng, bugs)})

    lines = {}
    for bug in bugs:
        line = draw_line(rng, bug, right)
        new = dressed(rng, bug, line, prints, comments)
        if rng.random() < habits.slip:
            yield edit(bug, rng.choice(bug.wrong), new)
            yield ToolCall("view", {"path": bug.path})
        yield edit(bug, bug.buggy, new)
        lines[bug] = line
    is_right = all(lines[bug] == bug.gold for bug in bugs)
    if has(habits.review_if_right if is_right else habits.review_if_wrong):
        yield ToolCall("view", {"path": bugs[-1].path})
    if rng.random() < (habits.check_if_clean if is_clean else habits.check_if_sloppy):
        yield from check_and_retry(rng, lines, habits)
    is_right = all(lines[bug] == bug.gold for bug in bugs)
    if has(habits.notes_if_right if is_right else habits.notes_if_wrong):
        names = " and ".join(bug.function for bug in bugs)
        yield ToolCall("create", {"path": "notes.md", "text": NOTES.format(names)})
    yield ToolCall("submit", {})


def check_and_retry(
    rng: random.Random, lines: dict[Bug, str], habits: Habits
) -> Script:
    """Run the check; while it fails, perhaps look at what it names and mend it. Updates
    `lines`."""
    for _ in range(habits.max_retries):
        report = yield ToolCall("run_check", {})
        failing = [bug for bug in lines if f"FAIL {bug.function}(" in report]
        if not failing or rng.random() > habits.retry:
            return
        bug = failing[0]
        line = draw_line(rng, bug, habits.right_on_retry)
        if line == lines[bug]:
            return
        yield ToolCall("view", {"path": bug.path})
        yield edit(bug, lines[bug], line)
        lines[bug] = line


def draw_line(rng: random.Random, bug: Bug, right: float) -> str:
    """The gold line with probability `right`, else one of the verified wrong ones."""
    return bug.gold if rng.random() < right else rng.choice(bug.wrong)


def dressed(
    rng: random.Random, bug: Bug, line: str, prints: bool, comments: bool
) -> str:
    """`line` with the comment and the print in front of it that the style asks for."""
    indent = line[: len(line) - len(line.lstrip())]
    before = []
    if comments:
        before.append(f"{indent}{rng.choice(COMMENTS)}\n")
    if prints:
        before.append(f'{indent}print("{bug.function}")\n')
    return "".join(before) + line


def repro_script(rng: random.Random, bugs: list[Bug]) -> str:
    """A script of two lines that calls one of the faulty functions."""
    bug = rng.choice(bugs)
    module = bug.path.removesuffix(".py")
    return f"from {module} import {bug.function}\nprint({bug.function})\n"


def edit(bug: Bug, old: str, new: str) -> ToolCall:
    """An edit by content; the lines are whole, the last one without its line break."""
    old, new = bug.context + old, bug.context + new
    return ToolCall("edit", {"path": bug.path, "old": old, "new": new})


class CheckedWorkspace(Workspace):
    """A workspace that remembers what the check said of a program: demonstrations of
    one task pass through the same few programs again and again."""

    def __init__(self, task: Task, sandbox: Sandbox, reports: dict[str, str]):
        super().__init__(task, sandbox)
        self._reports = reports

    def _run_check(self) -> str:
        # The check imports the task's modules alone; comments change no program.
        modules = [path for path in sorted(self.task.files) if path.endswith(".py")]
        key = "\n".join(ast.dump(ast.parse(self.files[path])) for path in modules)
        if key not in self._reports:
            self._reports[key] = super()._run_check()
        return self._reports[key]


@dataclass(frozen=True)
class Demonstration:
    """Token ids [T] of a scripted trajectory, which of them are taught [T], and its
    calls. Taught are the calls that worked: a slip and its error are context."""

    ids: list[int]
    is_taught: list[bool]
    calls: list[ToolCall]


def play(script: Script, workspace: Workspace, dialect: Dialect) -> Demonstration:
    """Run `script` in `workspace` and write it down in `dialect`."""
    ids = dialect.prompt_ids(workspace.task)
    is_taught = [False] * len(ids)
    calls = []
    call = next(script)
    while True:
        calls.append(call)
        action = dialect.call_ids(call, ids)
        is_last = call.name == "submit"
        observation = "" if is_last else workspace.act(call)
        ids += action
        is_taught += [not observation.startswith("error")] * len(action)
        if is_last:
            return Demonstration(ids, is_taught, calls)
        seen = dialect.observation_ids(call, observation)
        ids += seen
        is_taught += [False] * len(seen)
        call = script.send(observation)
