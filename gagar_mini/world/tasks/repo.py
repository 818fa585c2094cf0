"""Repository tasks: real packages with a one-line fault, judged by their own tests.

A fault is a mutation (`mutations`) of one line of a function. It makes a task when the
package's tests, run three times in the sandbox, say the same each time: some fail
(fail-to-pass) and at least half pass (pass-to-pass). All of them pass, three times, on
the sound tree, which is what the gold patch makes. What ships is a line of metadata and
the patch; the package itself is fetched by `packages` and must be at hand to load a
task. The tests reach neither the agent's tree nor the statement, which shows a call
instead, where the function takes plain values.
"""

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from gagar_mini.paths import find_data
from gagar_mini.types import Files, HiddenTest, Target, Task, seed_for
from gagar_mini.world.patches import tree_hash
from gagar_mini.world.pytest_runner import (
    ARCHIVE,
    SUITE,
    Suite,
    encode_suite,
    is_test_file,
    limits_of,
    pytest_archive,
    run_suite,
)
from gagar_mini.world.sandbox.base import Sandbox
from gagar_mini.world.tasks.mutations import Mutation, mutate
from gagar_mini.world.tasks.packages import (
    Package,
    find_package,
    source_files,
    test_files,
)
from gagar_mini.world.tasks.repository import unified_patch
from gagar_mini.world.tasks.visible import CHECK, CHECK_PATH

VERSION = 1
"""Version of the builder, raised by a change that moves any byte of a data file."""
RUNS = 3
"""Runs of the tests that must agree on a tree."""
MAX_BROKEN_SHARE = 0.5
"""A fault that breaks more of the tests is no puzzle."""
BUILD_CPU_S = 4
"""Processor seconds of the tests while faults are looked for: a fault that makes them
slow is no task. The tests of a package here take 1 to 2."""
MAX_SOURCE_BYTES = 200_000
SPLITS = ("train", "eval", "eval_unseen")
UNSEEN_PACKAGE = "tabulate"
"""Its tasks are the split eval_unseen: none of its code occurs in another split."""
EVAL_SHARE = 6
"""One in so many functions of the other packages is kept for evaluation."""


@dataclass(frozen=True)
class Example:
    """A call as text, what it gives at base, and its right value."""

    call: str
    given: str
    want: str


@dataclass(frozen=True)
class Fault:
    """One task as it ships. `line` counts from 1; `gold` and `buggy` are that line."""

    id: str
    package: str
    split: str
    path: str
    function: str
    line: int
    operator: str
    gold: str
    buggy: str
    fail_to_pass: tuple[str, ...]
    message: str
    examples: tuple[Example, ...] = ()


@dataclass(frozen=True, eq=False)
class Repository:
    """A package ready for faults: the sound tree, its suite, and calls of its functions
    by "path:function"."""

    package: Package
    files: Files
    suite: Suite
    calls: dict[str, list[str]]


# --- from a record to a task ----------------------------------------------------------


def load(split: str) -> tuple[Task, ...]:
    """The shipped tasks of a split.

    Raises FileNotFoundError, in a sentence, without the data or without the packages.
    """
    return read_faults(find_data("tasks/repo"), split)


def read_faults(folder: Path, split: str) -> tuple[Task, ...]:
    """The tasks of a folder that `build` wrote."""
    known = json.loads((folder / "packages.json").read_text())
    suites = {name: read_suite(name, entry) for name, entry in known.items()}
    tasks = []
    for line in (folder / f"{split}.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("patch")
        examples = tuple(Example(*example) for example in record.pop("examples"))
        tests = tuple(record.pop("fail_to_pass"))
        fault = Fault(**record, examples=examples, fail_to_pass=tests)
        tasks.append(make_task(fault, *suites[fault.package]))
    return tuple(tasks)


def read_suite(name: str, entry: dict) -> tuple[Package, Suite]:
    package = find_package(name)
    if entry["sha256"] != package.sha256:
        raise ValueError(
            f"the tasks were made of {name} {entry['version']}, this program knows "
            f"{package.version}: build them anew"
        )
    return package, Suite(test_files(package), tuple(entry["ids"]), package.roots)


def make_task(fault: Fault, package: Package, suite: Suite) -> Task:
    """The task of a fault. Raises ValueError where the line is not the package's."""
    sound = source_files(package)
    base = with_line(sound, fault.path, fault.line, fault.gold, fault.buggy)
    check = render_check(fault).encode()
    base, gold = base | {CHECK_PATH: check}, sound | {CHECK_PATH: check}
    return Task(
        id=fault.id,
        family="repo",
        split=fault.split,
        statement=statement_of(fault, package),
        files=dict(sorted(base.items())),
        visible_check=CHECK_PATH,
        targets=(Target(fault.path, fault.function),),
        allowed_paths=(fault.path,),
        hidden_tests=hidden_tests(suite.ids),
        gold_patch=unified_patch(base, gold),
        metadata={
            SUITE: _encoded(package, suite),
            "package": package.title,
            "licence": package.licence,
            "operator": fault.operator,
            "fail_to_pass": json.dumps(fault.fail_to_pass),
        },
    )


_SUITES: dict[tuple[Package, tuple[str, ...]], str] = {}


def _encoded(package: Package, suite: Suite) -> str:
    """One string for all tasks of a package."""
    key = package, suite.ids
    if key not in _SUITES:
        _SUITES[key] = encode_suite(suite)
    return _SUITES[key]


@cache
def hidden_tests(ids: tuple[str, ...]) -> tuple[HiddenTest, ...]:
    return tuple(HiddenTest(id_, id_.partition("::")[0], "") for id_ in ids)


def with_line(
    files: Files, path: str, line: int, old: str, new: str
) -> dict[str, bytes]:
    """`files` with one line, counted from 1, replaced. Bytes elsewhere stay."""
    lines = files[path].split(b"\n")
    if not 0 < line <= len(lines) or lines[line - 1] != old.encode():
        raise ValueError(f"line {line} of {path} is not {old!r}")
    lines[line - 1] = new.encode()
    return {**files, path: b"\n".join(lines)}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def statement_of(fault: Fault, package: Package) -> str:
    """What is wrong, by an example where there is one, and a bounded scope."""
    where = f"`{fault.function}` in {fault.path} ({package.name}) does the wrong thing"
    if fault.examples:
        shown = fault.examples[0]
        given = "" if shown.given.startswith("raises ") else "gives "
        what = f"{where}: `{shown.call}` {given}{shown.given}, not {shown.want}."
    else:
        said = " ".join(fault.message.split())[:200]
        what = f"{where}. A test of the package fails with: {said or 'an exception'}"
    scope = "Repair that and leave the rest of the repository as it is."
    return f"{what}\n\n{scope} The tests of the package are not shown."


def render_check(fault: Fault) -> str:
    """A script that tries the examples, or only imports the module where there are
    none."""
    module = module_of(fault.path)
    cases = [
        f"    {json.dumps(e.call)}: {e.want},"
        for e in fault.examples
        if not e.want.startswith("raises ")
    ]
    if not cases:
        return f"import {module}\n\nprint('ok')\n"
    imports = f"from {module} import {fault.function}"
    return CHECK.format(imports=imports, cases="\n".join(cases))


# --- building -------------------------------------------------------------------------


def open_repository(package: Package, sandbox: Sandbox) -> Repository:
    """The package with the tests that pass, each time, on its sound tree."""
    if not package.tests:
        raise ValueError(f"package {package.name!r} carries no tests of its own")
    files = source_files(package)
    suite = Suite(test_files(package), (), package.roots)
    passing: set[str] | None = None
    order: tuple[str, ...] = ()
    for _ in range(RUNS):
        report = run_suite(suite, files, sandbox)
        if report.complaint:
            raise ValueError(f"the tests of {package.title} fail: {report.complaint}")
        passed = {id_ for id_, said in report.outcomes.items() if said == "pass"}
        passing = passed if passing is None else passing & passed
        order = tuple(report.outcomes)
    ids = tuple(id_ for id_ in order if id_ in passing)
    suite = replace(suite, ids=ids)
    return Repository(package, files, suite, record_calls(suite, files, sandbox))


def record_calls(suite: Suite, files: Files, sandbox: Sandbox) -> dict[str, list[str]]:
    """Calls that the tests make with plain values, by "path:function"."""
    order = {
        "mode": "record",
        "archive": ARCHIVE,
        "sources": [path for path in files if path.endswith(".py")],
        "paths": sorted(path for path in suite.files if is_test_file(path)),
        "roots": suite.roots,
    }
    tree = {**files, **suite.files, ARCHIVE: pytest_archive()}
    return run_recorder(order, suite, tree, sandbox) or {}


def run_recorder(
    order: dict, suite: Suite, tree: Files, sandbox: Sandbox
) -> dict | list | None:
    """What `call_recorder` answers; None where it gave no answer."""
    program = Path(__file__).with_name("call_recorder.py").read_text()
    result = sandbox.run(
        tree,
        ["python", "-I", "-c", program],
        stdin=json.dumps(order).encode(),
        limits=limits_of(suite),
    )
    try:
        return json.loads(result.stdout)
    except ValueError:
        return None


def candidates(repository: Repository, seed: int) -> Iterator[Fault]:
    """Every one-line mutation in a function, one function after the other in turns, so
    that the first ones spread over the package. Their tests are not known yet."""
    rng = random.Random(seed_for("repo", VERSION, repository.package.name, seed))
    queues: dict[tuple[str, str], list[Fault]] = {}
    for path, content in sorted(repository.files.items()):
        if not path.endswith(".py") or len(content) > MAX_SOURCE_BYTES:
            continue
        text = content.decode()
        if "\r" in text or text.splitlines() != text.removesuffix("\n").split("\n"):
            continue
        for name, mutation in mutations_of_functions(text):
            fault = candidate(repository, path, name, text, mutation)
            queues.setdefault((path, name), []).append(fault)
    for queue in queues.values():
        rng.shuffle(queue)
        queue.sort(key=lambda fault: fault.operator == "name")  # by far the most
    while any(queues.values()):
        turn = [queue for queue in queues.values() if queue]
        rng.shuffle(turn)
        yield from [queue.pop(0) for queue in turn]


def candidate(
    repository: Repository, path: str, function: str, text: str, mutation: Mutation
) -> Fault:
    name = repository.package.name
    return Fault(
        id="",
        package=name,
        split=split_of(name, path, function),
        path=path,
        function=function,
        line=mutation.line + 1,
        operator=mutation.operator,
        gold=text.split("\n")[mutation.line],
        buggy=mutation.text,
        fail_to_pass=(),
        message="",
    )


def split_of(package: str, path: str, function: str) -> str:
    """A function belongs to one split, whatever is wrong in it."""
    if package == UNSEEN_PACKAGE:
        return "eval_unseen"
    number = seed_for("repo-split", package, path, function)
    return "eval" if number % EVAL_SHARE == 0 else "train"


def find_functions(text: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module, and methods of its classes as "Class.method"."""

    def visit(
        body: Sequence[ast.stmt], prefix: str
    ) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.FunctionDef):
                yield f"{prefix}{node.name}", node

    yield from visit(ast.parse(text).body, "")


def lines_of_body(node: ast.FunctionDef) -> set[int]:
    """The lines of a function, from 1, without signature and docstring."""
    skip = int(ast.get_docstring(node) is not None)
    return {
        line
        for statement in node.body[skip:]
        for line in range(statement.lineno, statement.end_lineno + 1)
    }


def mutations_of_functions(text: str) -> Iterator[tuple[str, Mutation]]:
    """Every one-line mutation in the body of a function, with the function's name.

    Each function is mutated on its own: to check the syntax of a long file again for
    each of its mutations would take many minutes.
    """
    lines = text.split("\n")
    for name, node in find_functions(text):
        first, inside = node.lineno - 1, lines_of_body(node)
        segment = lines[first : node.end_lineno]
        indent = " " * node.col_offset
        alone = "\n".join(line.removeprefix(indent) for line in segment) + "\n"
        for mutation in mutate(alone):
            line = first + mutation.line
            if line + 1 in inside and lines[line].startswith(indent):
                changed = indent + mutation.text
                yield name, replace(mutation, line=line, text=changed)


def examine(
    repository: Repository, fault: Fault, sandbox: Sandbox
) -> tuple[Fault | None, str]:
    """The fault with its failing tests, or None, and why it was dropped."""
    files = with_line(repository.files, fault.path, fault.line, fault.gold, fault.buggy)
    seen: list[tuple[str, ...]] = []
    suite = replace(repository.suite, cpu_s=BUILD_CPU_S)
    for run in range(1, RUNS + 1):
        report = run_suite(suite, files, sandbox, with_messages=run == RUNS)
        if report.complaint:
            return None, "timeout" if report.result.is_timeout else "broken"
        failing = tuple(
            id_ for id_ in repository.suite.ids if report.outcomes.get(id_) != "pass"
        )
        if not failing:
            return None, "flaky" if seen else "survivor"
        if len(failing) > MAX_BROKEN_SHARE * len(repository.suite.ids):
            return None, "breaks too much"
        if seen and failing != seen[-1]:
            return None, "flaky"
        seen.append(failing)
    message = without_prefix(report.messages.get(failing[0], ""))
    examples = find_examples(repository, fault, files, sandbox)
    found = replace(fault, fail_to_pass=failing, message=message, examples=examples)
    return found, ""


def without_prefix(message: str) -> str:
    """`message` with the interpreter's own files named from `lib/` on: where they lie
    is of the machine that built the task."""
    return re.sub(r"(?:/[^/\s'\"]+)+/(lib/python\d)", r"\1", message)


def find_examples(
    repository: Repository, fault: Fault, files: Files, sandbox: Sandbox
) -> tuple[Example, ...]:
    """A short call that shows the fault and one that does not; () without the
    former."""
    calls = repository.calls.get(f"{fault.path}:{fault.function}", [])
    order = {
        "mode": "replay",
        "module": module_of(fault.path),
        "function": fault.function,
        "calls": calls,
        "roots": repository.suite.roots,
    }
    if not calls:
        return ()
    want, given = (
        run_recorder(order, repository.suite, tree, sandbox)
        for tree in (repository.files, files)
    )
    if want is None or given is None:
        return ()
    found = [
        Example(f"{fault.function}({call})", bad, good)
        for call, good, bad in zip(calls, want, given, strict=True)
        if good and bad and not good.startswith("raises ")
    ]
    found.sort(key=lambda e: (len(e.call) + len(e.given) + len(e.want), e.call))
    telling = [example for example in found if example.given != example.want]
    others = [example for example in found if example.given == example.want]
    return tuple(telling[:1] + others[:1]) if telling else ()


def find_faults(
    repository: Repository,
    count: int,
    sandbox: Sandbox,
    *,
    seed: int = 0,
    on_fault: Callable[[Fault], None] = lambda fault: None,
) -> tuple[list[Fault], Counter[str]]:
    """The first `count` faults that make tasks, one a line, and how many candidates
    were dropped for what."""
    found: list[Fault] = []
    dropped: Counter[str] = Counter()
    lines: set[tuple[str, int]] = set()
    for fault in candidates(repository, seed):
        if len(found) >= count:
            break
        if (fault.path, fault.line) in lines:
            continue
        kept, why = examine(repository, fault, sandbox)
        if kept is None:
            dropped[why] += 1
            continue
        lines.add((fault.path, fault.line))
        found.append(kept)
        on_fault(kept)
    return found, dropped


def build(
    packages: Sequence[Package],
    out_dir: Path,
    sandbox: Sandbox,
    *,
    count: int = 60,
    seed: int = 0,
    on_fault: Callable[[Fault], None] = lambda fault: None,
) -> dict[str, object]:
    """Write `<out_dir>/repo/<split>.jsonl` and packages.json, after each package;
    returns the latter.

    `count` is per package. The packages must have been fetched. The same seed gives the
    same bytes where the same Python runs the tests.
    """
    entries: dict[str, object] = {}
    faults: list[Fault] = []
    folder = out_dir / "repo"
    folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        repository = open_repository(package, sandbox)
        found, dropped = find_faults(
            repository, count, sandbox, seed=seed, on_fault=on_fault
        )
        faults += found
        entries[package.name] = describe(repository, seed, len(found), dropped)
        for split in SPLITS:
            chosen = [fault for fault in faults if fault.split == split]
            write_faults(folder, split, chosen)
        text = json.dumps(entries, indent=1)
        (folder / "packages.json").write_text(text + "\n")
    return entries


def describe(
    repository: Repository, seed: int, num_tasks: int, dropped: Counter[str]
) -> dict[str, object]:
    """What the data say of a package: where it is from, and which tests count."""
    package = repository.package
    return {
        "version": package.version,
        "sha256": package.sha256,
        "licence": package.licence,
        "builder": VERSION,
        "seed": seed,
        "tree": tree_hash(repository.files),
        "num_tasks": num_tasks,
        "dropped": dict(sorted(dropped.items())),
        "ids": repository.suite.ids,
    }


def write_faults(folder: Path, split: str, faults: Sequence[Fault]) -> None:
    """One JSON object a line: the fault, and its gold patch for who reads along."""
    lines = []
    for number, fault in enumerate(faults):
        named = replace(fault, id=f"repo-{split}-{number:05d}")
        sound = source_files(find_package(fault.package))
        base = with_line(sound, fault.path, fault.line, fault.gold, fault.buggy)
        examples = [[e.call, e.given, e.want] for e in named.examples]
        record = asdict(named) | {"examples": examples}
        record["patch"] = unified_patch(base, sound).decode()
        lines.append(json.dumps(record, ensure_ascii=True))
    (folder / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
