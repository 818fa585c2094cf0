"""The promises of a task, checked by running its own (trusted) code in this process."""

import builtins
import contextlib
import functools
import io
import types
from collections.abc import Sequence

from gagar_mini.types import Files, Task
from gagar_mini.world.tasks import draw_cases
from gagar_mini.world.tasks.faults import passes

SEEDS = (0, 1, 2)
"""Gradings simulated for every task; its faults have passed many more."""


@functools.lru_cache(maxsize=256)
def load_module(text: bytes, name: str) -> types.ModuleType:
    """A module of a micro-repository (they import nothing)."""
    module = types.ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


def failing_tests(task: Task, files: Files, seed: int) -> set[str]:
    """Ids of the hidden tests that fail on a tree."""
    failing = set()
    for test in task.hidden_tests:
        module = load_module(files[test.path], test.path.removesuffix(".py"))
        function = getattr(module, test.function)
        if not passes(function, draw_cases(test, seed)):
            failing.add(test.id)
    return failing


def run_check(task: Task, files: Files) -> tuple[int, str]:
    """Exit status and output of the visible check on a tree."""

    def import_from_files(name: str, *_: object) -> types.ModuleType:
        return load_module(files[f"{name}.py"], name)

    namespace = {"__builtins__": vars(builtins) | {"__import__": import_from_files}}
    output = io.StringIO()
    code = compile(files[task.visible_check], task.visible_check, "exec")
    try:
        with contextlib.redirect_stdout(output):
            exec(code, namespace)
    except SystemExit as stop:
        return int(stop.code or 0), output.getvalue()
    raise AssertionError("the visible check always exits")


def flaw(task: Task, gold: Files, partial: Sequence[tuple[str, Files]]) -> str:
    """Which promise a task breaks, "" if none.

    `gold` is the repaired tree; `partial` lists, for each fault, the id of its hidden
    test and the tree in which that fault alone is left. The caller limits the time.
    """
    targets = {test_id for test_id, _ in partial}
    for seed in SEEDS:
        if failing_tests(task, task.files, seed) != targets:
            return "at base other tests fail than those of the targets"
        if failing_tests(task, gold, seed):
            return "the gold tree fails"
        for test_id, files in partial:
            if failing_tests(task, files, seed) != {test_id}:
                return f"{test_id} does not fail alone"
    for test_id, files in partial:
        if run_check(task, files)[0] != 1:
            return f"the visible check does not see the fault of {test_id}"
    if run_check(task, task.files)[0] != 1:
        return "the visible check passes at base"
    if run_check(task, gold) != (0, "ok\n"):
        return "the visible check fails on the gold tree"
    return ""
