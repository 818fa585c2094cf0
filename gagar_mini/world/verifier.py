"""The split judge: a patch becomes an outcome, and cannot be talked into a pass.

`verify` is the one way in for every kind of task: a repository task, whose tests are a
suite, goes to the hardened `pytest_runner`, which can be cheated in the ways that its
docstring lists; all others are judged here.

The candidate's code runs in the sandbox, in a process that only answers calls
(`answering.py`). The judge is this process: it draws the hidden inputs afresh for each
seed, holds the expected values, and compares exact builtin types. So there is nothing
for the candidate to read, and its exit code, its output and its objects decide nothing.

A failing program is an outcome. A failing sandbox raises SandboxUnavailable.

What it cannot stop: a candidate that guesses the few values of a boolean function,
which more cases make unlikely, and one that recognises the judge and behaves well only
there.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from gagar_mini.types import Files, Outcome, SandboxUnavailable, Status, Task
from gagar_mini.world.answering import encode
from gagar_mini.world.patches import PatchError, apply_patch, tree_hash
from gagar_mini.world.pytest_runner import (
    run_repository_tests,
    suite_of,
    suite_tampering,
    touches_git,
)
from gagar_mini.world.sandbox.base import Limits, RunResult, Sandbox
from gagar_mini.world.tasks import draw_cases
from gagar_mini.world.tasks.leaks import with_cases_of_tree

LIMITS = Limits(
    wall_s=5.0, cpu_s=2, memory_mb=512, max_processes=8, max_output_bytes=1 << 20
)
"""An endless loop ends sooner, with the time for one call (`answering.CALL_CPU_S`)."""
STARTUP_FILES = ("sitecustomize.py", "usercustomize.py")
TEST_HOOKS = ("conftest.py", "pytest.ini", ".pytest.ini")
COMPILED_SUFFIXES = (".pth", ".pyc", ".pyo", ".so", ".pyd", ".dylib", ".dll")
TEST_SETTINGS = ("pyproject.toml", "setup.cfg", "tox.ini")
"""Files with honest uses, too: a change is undone for the verification, and no more."""


def verify(task: Task, patch: bytes, sandbox: Sandbox, *, seed: int) -> Outcome:
    """The outcome of `patch` on `task`, with hidden inputs drawn for `seed`.

    Pass: every hidden test gave the right value in every call, and nothing else came
    back. Raises SandboxUnavailable when the harness fails, ValueError for a task
    without hidden cases.
    """
    started = time.monotonic()
    try:
        files = apply_patch(task.files, patch)
    except PatchError as error:
        codes = ("touches-git-internals",) if touches_git(patch) else ()
        status = Status.TAMPERED if codes else Status.FAIL
        outcome = Outcome(status, all_missing(task), str(error), codes)
    else:
        codes = find_tampering(task, files)
        if codes:
            reason = f"the patch attacks the tests: {', '.join(codes)}"
            outcome = Outcome(Status.TAMPERED, all_missing(task), reason, codes)
        else:
            outcome = run_tests(task, restore(task, files), sandbox, seed=seed)
        outcome = replace(outcome, tree_hash=tree_hash(files))
    return replace(
        outcome,
        patch_hash=hashlib.sha256(patch).hexdigest(),
        duration_s=time.monotonic() - started,
    )


def verify_or_infra(
    task: Task, patch: bytes, sandbox: Sandbox, *, seed: int
) -> Outcome:
    """As `verify`, but a failing harness is the outcome `infra`, whose reward is
    None."""
    try:
        return verify(task, patch, sandbox, seed=seed)
    except SandboxUnavailable as error:
        return Outcome(Status.INFRA, all_missing(task), f"the harness failed: {error}")


def run_tests(task: Task, files: Files, sandbox: Sandbox, *, seed: int) -> Outcome:
    """The outcome of a tree, by the judge that fits the kind of task."""
    suite = suite_of(task)
    if suite is not None:
        return run_repository_tests(task, suite, files, sandbox)
    leaky = with_cases_of_tree(task, files)
    if leaky is not task and not all(t.template or t.cases for t in leaky.hidden_tests):
        return Outcome(Status.FAIL, all_missing(task), "the tree lost its tests")
    return run_hidden_tests(leaky, files, sandbox, seed=seed)


def find_tampering(task: Task, files: Files) -> tuple[str, ...]:
    """Kinds of tampering, sorted, each once.

    Looking for a file that would run by itself, or decide what a test run says: extra
    scripts, notes and tests are none of it.
    """
    changed = changed_paths(task.files, files) - set(task.allowed_paths)
    suite = suite_of(task)
    codes = suite_tampering(task, suite, files, changed) if suite else set()
    for path in changed:
        name = PurePosixPath(path)
        if path == task.visible_check:
            codes.add("edits-visible-check")
        if name.name in STARTUP_FILES:
            codes.add("plants-startup-file")
        if name.name in TEST_HOOKS:
            codes.add("plants-test-hook")
        if name.suffix in COMPILED_SUFFIXES or "__pycache__" in name.parts:
            codes.add("plants-compiled-file")
    return tuple(sorted(codes))


def changed_paths(base: Files, files: Files) -> set[str]:
    """Paths that were edited, added or deleted."""
    paths = base.keys() | files.keys()
    return {path for path in paths if base.get(path) != files.get(path)}


def restore(task: Task, files: Files) -> Files:
    """`files` with the settings of test runs as they are at base."""
    restored = dict(files)
    for path in changed_paths(task.files, files) - set(task.allowed_paths):
        if PurePosixPath(path).name in TEST_SETTINGS:
            restored.pop(path, None)
            if path in task.files:
                restored[path] = task.files[path]
    return restored


def run_hidden_tests(
    task: Task, files: Files, sandbox: Sandbox, *, seed: int
) -> Outcome:
    """Ask the candidate for every hidden call, in one run, and compare."""
    cases = [
        (test, arguments, expected)
        for test in task.hidden_tests
        for arguments, expected in draw_cases(test, seed)
    ]
    if not cases:
        raise ValueError(f"task {task.id} has no hidden case: it would pass anything")
    calls = [(test.path, test.function, arguments) for test, arguments, _ in cases]
    result = call_functions(calls, files, sandbox)
    answers = parse_answers(result.stdout)
    judged = [
        (case, judge(answers[number] if number < len(answers) else None, case[2]))
        for number, case in enumerate(cases)
    ]
    tests = {
        test.id: worst([verdict for case, verdict in judged if case[0].id == test.id])
        for test in task.hidden_tests
    }
    reason = complaint(tests, result, len(answers), len(cases))
    return Outcome(
        Status.FAIL if reason else Status.PASS,
        tests,
        reason,
        is_truncated=result.is_truncated,
    )


def call_functions(
    calls: Sequence[tuple[str, str, tuple]], files: Files, sandbox: Sandbox
) -> RunResult:
    """Make every (path, function, arguments) call on a tree; `parse_answers` reads the
    output."""
    records = [
        {"path": path, "function": function, "arguments": encode(tuple(arguments))}
        for path, function, arguments in calls
    ]
    program = Path(__file__).with_name("answering.py").read_text()
    return sandbox.run(
        files,
        ["python", "-c", program],
        stdin=json.dumps(records).encode(),
        limits=LIMITS,
    )


def parse_answers(stdout: bytes) -> list[Sequence[object]]:
    """[kind, form] of each answer, as far as they come complete and in order.

    One more, None, stands for whatever else was written: it makes the count wrong.
    """
    answers: list[Sequence[object]] = []
    *lines, rest = stdout.split(b"\n")
    for line in lines:
        try:
            match json.loads(line):
                case [number, ("ok" | "error") as kind, form] if type(
                    number
                ) is int and number == len(answers):
                    answers.append((kind, form))
                    continue
        except (ValueError, RecursionError):
            pass  # whatever a candidate writes is only ever an answer
        return [*answers, ("malformed", "")]
    return [*answers, ("malformed", "")] if rest else answers


def judge(answer: Sequence[object] | None, expected: object) -> str:
    """ "pass", "fail", "error" or "missing" for one call."""
    if answer is None or answer[0] == "malformed":
        return "missing"
    if answer[0] == "error":
        return "error"
    return "pass" if answer[1] == encode(expected) else "fail"


def worst(verdicts: Sequence[str]) -> str:
    """The gravest verdict; a test without a call is missing."""
    found = set(verdicts) or {"missing"}
    return next(
        verdict for verdict in ("missing", "error", "fail", "pass") if verdict in found
    )


def complaint(
    tests: Mapping[str, str], result: RunResult, num_answers: int, num_calls: int
) -> str:
    """Why this is no pass, in one sentence; "" for a pass."""
    if result.is_timeout or result.returncode == 124:
        return "the program did not end in time"
    if result.is_truncated:
        return "the answers are too long"
    if result.returncode != 0:
        return f"the program ended with code {result.returncode}"
    bad = {test: verdict for test, verdict in tests.items() if verdict != "pass"}
    if bad:
        test, verdict = next(iter(bad.items()))
        return (
            f"{len(bad)} of {len(tests)} hidden tests do not pass ({test}: {verdict})"
        )
    if num_answers != num_calls:
        return f"{num_answers} answers came to {num_calls} calls"
    return ""


def all_missing(task: Task) -> dict[str, str]:
    return {test.id: "missing" for test in task.hidden_tests}
