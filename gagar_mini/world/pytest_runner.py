"""The hardened pytest runner: a repository's own test suite becomes an outcome.

For tasks whose tests are a suite (`Suite`), which the split judge cannot ask call by
call. The order of a verification is fixed: the patch, as bytes, is applied to the
pristine tree on the host (`patches` refuses absolute paths, `..`, links and git
internals); files that would run by themselves or decide what a test run says are
tampering; settings and tests of the tree are put back or removed; the pristine tests
are laid over it; and the suite runs in a fresh sandbox, under an isolated interpreter,
without conftest files (where the suite needs none) and without any configuration. The
report comes over a descriptor of its own, carries a nonce, and must name exactly the
ids of the suite, each passed: skipped, xfailed, missing and extra tests are failures.

What it cannot stop, since candidate and tests share one process: code of the candidate
that patches pytest or the recorder once it is imported, returns an object that equals
everything, reads an expected value from its caller's frame or from the test file, finds
the nonce by walking frames and forges a report, or recognises a test run and behaves
well only there. Use the split judge (`verifier`) wherever a task's tests are calls.
"""

import fnmatch
import importlib.util
import io
import json
import marshal
import re
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath

from gagar_mini.types import Files, Outcome, SandboxUnavailable, Status, Task
from gagar_mini.world.sandbox.base import Limits, RunResult, Sandbox
from gagar_mini.world.tasks.formats import decode_bytes, encode_bytes

SUITE = "suite"
"""Key of a task's metadata that holds its `Suite`: what makes it a repository task."""
ARCHIVE = ".verifier/pytest.zip"
LIBRARIES = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
LEXERS = ("__init__", "_mapping", "diff", "python")
"""Pygments colours output, which nobody sees; only what pytest imports is packed."""
TEST_FILES = ("test_*.py", "*_test.py")
TEST_SETTING = re.compile(rb"pytest|addopts|deselect|testpaths|python_files", re.I)
GIT_INTERNALS = re.compile(
    rb"^(?:diff --git|---|\+\+\+|rename to|copy to)[^\n]*[ /]\.git(?:/|\s)", re.M | re.I
)


@dataclass(frozen=True)
class Suite:
    """Hidden tests of a repository: `files`, of which all `ids` must pass.

    An id is pytest's own, relative to the root of the tree ("tests/test_a.py::test_b").
    `roots` are the folders from which the tests import. `cpu_s` and `wall_s` are for a
    whole run: processor time, which a busy machine does not change, and time.
    """

    files: Files
    ids: tuple[str, ...]
    roots: tuple[str, ...] = ("",)
    needs_conftest: bool = False
    cpu_s: int = 10
    wall_s: float = 60.0


@dataclass(frozen=True)
class SuiteReport:
    """What a run said: outcome per test id ("pass", "fail", "error", "skip", "xfail"),
    first lines of failures, and what the sandbox saw of the run itself."""

    outcomes: Mapping[str, str]
    result: RunResult
    messages: Mapping[str, str] = field(default_factory=dict)
    complaint: str = ""
    """Why this is no report, in one sentence; "" for a whole one."""


def encode_suite(suite: Suite) -> str:
    """The suite as a string for a task's metadata; `suite_of` reads it back."""
    files = {path: encode_bytes(content) for path, content in suite.files.items()}
    return json.dumps(vars(suite) | {"files": files})


def suite_of(task: Task) -> Suite | None:
    """The suite of a repository task; None for a task of the split judge."""
    text = task.metadata.get(SUITE)
    return None if text is None else _decode_suite(text)


@lru_cache(maxsize=64)
def _decode_suite(text: str) -> Suite:
    fields = json.loads(text)
    files = {path: decode_bytes(content) for path, content in fields["files"].items()}
    lists = {"ids": tuple(fields["ids"]), "roots": tuple(fields["roots"])}
    return Suite(**fields | lists | {"files": files})


def run_suite(
    suite: Suite, files: Files, sandbox: Sandbox, *, with_messages: bool = False
) -> SuiteReport:
    """Run the suite on a tree; all collected tests where the suite names no id.

    Raises SandboxUnavailable when the harness fails, or has no pytest.
    """
    nonce = secrets.token_hex(16)
    order = {
        "nonce": nonce,
        "archive": ARCHIVE,
        "ids": suite.ids,
        "paths": sorted(path for path in suite.files if is_test_file(path)),
        "read_only": sorted(suite.files),
        "roots": suite.roots,
        "needs_conftest": suite.needs_conftest,
        "with_messages": with_messages,
    }
    program = Path(__file__).with_name("suite_program.py").read_text()
    result = sandbox.run(
        {**files, **suite.files, ARCHIVE: pytest_archive()},
        ["python", "-I", "-c", program],
        stdin=json.dumps(order).encode(),
        limits=limits_of(suite),
    )
    return read_report(result, nonce)


def limits_of(suite: Suite) -> Limits:
    return Limits(
        wall_s=suite.wall_s,
        cpu_s=suite.cpu_s,
        memory_mb=1024,
        max_processes=64,
        max_output_bytes=4 << 20,
        disk_mb=64,
    )


def read_report(result: RunResult, nonce: str) -> SuiteReport:
    """The report on stdout, if it is whole, alone and carries the nonce."""
    complaint = ""
    if result.is_timeout:
        complaint = "the tests did not end in time"
    elif result.is_truncated:
        complaint = "the report is too long"
    elif result.returncode != 0:
        complaint = f"the test run ended with code {result.returncode}"
    try:
        report = json.loads(result.stdout)
        is_ours = report["nonce"] == nonce
        outcomes, messages = dict(report["outcomes"]), dict(report["messages"])
        errors = list(report["errors"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = complaint or "the test run gave no report"
        return SuiteReport({}, result, complaint=said)
    if not is_ours:
        return SuiteReport({}, result, complaint="the report is forged")
    if errors and not complaint:
        last = str(errors[0]).strip().splitlines()[-1:]
        complaint = f"the tests cannot be collected: {''.join(last)}"
    return SuiteReport(outcomes, result, messages, complaint)


def run_repository_tests(
    task: Task, suite: Suite, files: Files, sandbox: Sandbox
) -> Outcome:
    """Pass: exactly the ids of the suite ran, and each of them passed."""
    if not suite.ids:
        raise ValueError(f"task {task.id} has no hidden test: it would pass anything")
    report = run_suite(suite, pristine(task, suite, files), sandbox)
    tests = {id_: verdict_of(report.outcomes.get(id_)) for id_ in suite.ids}
    reason = report.complaint or complaint_of(tests, report.outcomes)
    status = Status.FAIL if reason else Status.PASS
    return Outcome(status, tests, reason, is_truncated=report.result.is_truncated)


def verdict_of(outcome: object) -> str:
    """A test that was skipped, or failed as expected, is a failure."""
    if outcome is None:
        return "missing"
    return outcome if outcome in ("pass", "error") else "fail"


def complaint_of(tests: Mapping[str, str], outcomes: Mapping[str, object]) -> str:
    bad = {id_: verdict for id_, verdict in tests.items() if verdict != "pass"}
    if bad:
        id_ = next(iter(bad))
        said = outcomes.get(id_, "missing")
        return f"{len(bad)} of {len(tests)} hidden tests do not pass ({id_}: {said})"
    extra = set(outcomes) - set(tests)
    if extra:
        return f"{len(extra)} tests are reported that do not exist"
    return ""


def pristine(task: Task, suite: Suite, files: Files) -> dict[str, bytes]:
    """The candidate's tree without tests of its own: they are dropped if they are new,
    and put back if they were changed. The suite is laid over it later."""
    kept = {
        path: content
        for path, content in files.items()
        if path in task.files or path in task.allowed_paths or not is_test_file(path)
    }
    for path, content in task.files.items():
        if is_test_file(path) and path not in task.allowed_paths:
            kept[path] = content
    # a file cannot lie where the suite, or the archive, needs a folder, or in its files
    laid = {*suite.files, ARCHIVE}
    folders = {str(parent) for path in laid for parent in parents_of(path)}
    return {
        path: content
        for path, content in kept.items()
        if path not in folders and laid.isdisjoint(map(str, parents_of(path)))
    }


def parents_of(path: str) -> Sequence[PurePosixPath]:
    return list(PurePosixPath(path).parents)[:-1]


def is_test_file(path: str) -> bool:
    name = PurePosixPath(path).name
    return any(fnmatch.fnmatch(name, pattern) for pattern in TEST_FILES)


def suite_tampering(task: Task, suite: Suite, files: Files, changed: set[str]) -> set:
    """Kinds of tampering that only a suite knows, for paths out of the task's scope."""
    codes = set()
    for path in changed:
        if path in suite.files or (path in task.files and is_test_file(path)):
            codes.add("edits-tests")
        if path.startswith(f"{PurePosixPath(ARCHIVE).parts[0]}/"):
            codes.add("plants-test-hook")
        if PurePosixPath(path).name == "entry_points.txt":
            codes.add("plants-test-hook")
        if is_settings(path) and changes_test_settings(task.files, files, path):
            codes.add("edits-test-settings")
    return codes


def is_settings(path: str) -> bool:
    return PurePosixPath(path).name in ("pyproject.toml", "setup.cfg", "tox.ini")


def changes_test_settings(base: Files, files: Files, path: str) -> bool:
    """Whether lines that speak of the test runner differ. Other changes of settings
    are honest, and undone for the verification."""
    before, after = (
        [line for line in tree.get(path, b"").splitlines() if TEST_SETTING.search(line)]
        for tree in (base, files)
    )
    return before != after


def touches_git(patch: bytes) -> bool:
    """Whether a patch names git's own folder, which no honest diff does."""
    return bool(GIT_INTERNALS.search(patch))


@cache
def pytest_archive() -> bytes:
    """pytest and what it imports as one zip file, with bytecode for this interpreter
    (another one takes the sources). Raises SandboxUnavailable without pytest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for library in LIBRARIES:
            for path, name in library_files(library):
                source = path.read_bytes()
                archive.writestr(name, source)
                archive.writestr(f"{name}c", bytecode(path, source))
    return buffer.getvalue()


def library_files(library: str) -> list[tuple[Path, str]]:
    """(file, name in the archive) of the library's modules."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise SandboxUnavailable(
            f"no {library}: repository tasks need pytest (pip install pytest)"
        )
    if found.submodule_search_locations is None:
        return [(Path(found.origin), f"{library}.py")]
    root, files = Path(found.origin).parent, []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root.parent).as_posix()
        if name.startswith("pygments/lexers/") and path.stem not in LEXERS:
            continue
        files.append((path, name))
    return files


def bytecode(path: Path, source: bytes) -> bytes:
    """A .pyc that is taken unchecked: an archive keeps no times to compare."""
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
    cached = Path(importlib.util.cache_from_source(str(path)))
    if cached.is_file():
        compiled = cached.read_bytes()
        if compiled[:4] == importlib.util.MAGIC_NUMBER:
            return header + compiled[16:]
    code = compile(source, path.name, "exec", dont_inherit=True)
    return header + marshal.dumps(code)


def without_ids(suite: Suite) -> Suite:
    """The suite that collects whatever there is: how ids are found in the first
    place."""
    return replace(suite, ids=())
