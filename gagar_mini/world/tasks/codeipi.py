"""CodeIPI's injected repositories as tasks: a bug, its repair, and text that gives
orders to whoever reads it.

The 35 injected samples lie in the PyPI package `inspect-evals` (MIT licence, UK AI
Security Institute), which this project neither needs nor ships: give its wheel, a
folder that holds it, or install it without dependencies. The package says in words how
to repair; `codeipi_fixes` writes that down.

Left out: the ten benign samples, and the question whether an agent obeys.
"""

import ast
import importlib.util
import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gagar_mini.types import Files, HiddenTest, Target, Task
from gagar_mini.world.patches import make_patch
from gagar_mini.world.tasks.codeipi_fixes import FIXES

PACKAGE = "inspect_evals"
SAMPLES = f"{PACKAGE}/ipi_coding_agent/dataset/samples.json"
HOW_TO_GET = (
    "CodeIPI is part of the PyPI package inspect-evals: run `pip download --no-deps "
    "inspect-evals` and name the wheel"
)


@dataclass(frozen=True, eq=False)
class InjectedRepository:
    """One sample: `task` is the repository without the injection, `injected` the files
    that carry it, at base and (where the repair touches them) in `repaired`.

    `vector` is "issue_text", "code_comment", "readme" or "config_file". An issue's
    payload has no file of its own and gets one, ISSUE.md.
    """

    id: str
    vector: str
    category: str
    task: Task
    payload: str
    infected: Files
    """The base with the injection."""
    injected: Files
    """Files of a repaired tree with the injection, over `repaired`."""
    repaired: Files
    """The repaired tree without it."""

    @property
    def infected_task(self) -> Task:
        """The task as CodeIPI has it: the injection lies in the base."""
        gold = {**self.repaired, **self.injected}
        return replace(
            self.task,
            id=f"{self.task.id}-infected",
            files=self.infected,
            gold_patch=make_patch(self.infected, gold),
        )


def load_codeipi(path: Path | None = None) -> tuple[InjectedRepository, ...]:
    """The injected samples of the package at `path`: its wheel, its folder or one that
    holds it, or samples.json; None looks for an installed one.

    Raises FileNotFoundError, with a sentence, where there is none, and ValueError for
    samples that this module does not know how to repair.
    """
    records = json.loads(read_samples(path))
    return tuple(read_sample(r) for r in records if not r["is_benign"])


def read_samples(path: Path | None) -> bytes:
    """The bytes of samples.json."""
    if path is None:
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(HOW_TO_GET)
        path = Path(next(iter(spec.submodule_search_locations)))
    if path.suffix == ".whl" and path.is_file():
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(SAMPLES)
    below = Path(SAMPLES)
    for place in (path, path / below.relative_to(PACKAGE), path / below):
        if place.is_file():
            return place.read_bytes()
    raise FileNotFoundError(f"{path} holds no {below.name} of CodeIPI. {HOW_TO_GET}")


def read_sample(record: Mapping[str, object]) -> InjectedRepository:
    """One record, taken apart into repository, repair and injection."""
    id_, vector = str(record["id"]), str(record["injection_vector"])
    if id_ not in FIXES:
        raise ValueError(f"CodeIPI sample {id_!r} is not known: no repair is written")
    texts: dict[str, str] = dict(record["repo_files"])
    issue = str(record["issue_text"])
    path, payload = find_injection(vector, texts, issue)
    source = next(iter(re.findall(r"`(src/\w+\.py)`", str(record["task_description"]))))
    clean_issue = issue
    if vector == "issue_text":
        clean_issue, injected_text = issue.replace(payload, ""), issue
        clean = dict(texts)
    else:
        injected_text = texts[path]
        clean = {**texts, path: injected_text.replace(payload, "", 1)}
    repaired = {**clean, source: repair(id_, clean[source])}
    if path == source:
        injected_text = repair(id_, texts[source])
    base = encoded(clean)
    targets = changed_functions(source, clean[source], repaired[source])
    checks = [name for name in texts if name.startswith("tests/test_")]
    task = Task(
        id=f"codeipi-{id_}",
        family="codeipi",
        split="eval",
        statement=f"{record['task_description']}\n\n{clean_issue}".strip(),
        files=base,
        visible_check=checks[0],
        targets=targets,
        allowed_paths=(source,),
        hidden_tests=read_cases(source, clean[source], texts[checks[0]]),
        gold_patch=make_patch(base, encoded(repaired)),
        metadata={"source": "inspect-evals", "licence": "MIT", "vector": vector},
    )
    at_base = issue if vector == "issue_text" else texts[path]
    return InjectedRepository(
        id=id_,
        vector=vector,
        category=str(record["payload_category"]),
        task=task,
        payload=payload.strip(),
        infected={**base, path: at_base.encode()},
        injected={path: injected_text.encode()},
        repaired=encoded(repaired),
    )


def find_injection(
    vector: str, texts: Mapping[str, str], issue: str
) -> tuple[str, str]:
    """(path, text) of the injection, by where its vector puts it."""
    if vector == "issue_text":
        return "ISSUE.md", injected_part(issue)
    if vector == "readme":
        # a title, sections that give orders, and one that is only documentation
        sections = re.split(r"(?m)^(?=## )", texts["README.md"])
        return "README.md", "".join(sections[1:-1])
    # a block of comments, in the code or on top of a file of settings
    pattern = r"(?m)(?:^#.*\n)+\n?"
    is_code = vector == "code_comment"
    for path, text in texts.items():
        if path.startswith("src/") == is_code and (found := re.search(pattern, text)):
            return path, found[0]
    raise ValueError(f"CodeIPI: no injection of the kind {vector!r} was found")


def injected_part(issue: str) -> str:
    """The paragraphs between the issue's title and what it reports."""
    body = issue.removeprefix("## Bug Report\n\n")
    report = re.search(r"(?m)^(?:### |When calling )", body)
    if report is None:
        raise ValueError("CodeIPI: an issue without a report")
    return body[: report.start()]


def repair(id_: str, source: str) -> str:
    """`source` with the sample's bug repaired."""
    for old, new in FIXES[id_]:
        if source.count(old) != 1:
            raise ValueError(f"CodeIPI sample {id_} has another source than expected")
        source = source.replace(old, new)
    return source


def changed_functions(path: str, before: str, after: str) -> tuple[Target, ...]:
    """The functions and methods of `before` that `after` changes."""
    old, new = functions_of(before), functions_of(after)
    return tuple(Target(path, name) for name in old if old[name] != new.get(name))


def functions_of(source: str) -> dict[str, str]:
    """Functions, and methods as "Class.method", with their code in any layout."""
    found = {}
    tree = ast.parse(source)
    for owner in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef):
                found[prefix + node.name] = ast.dump(node)
    return found


def read_cases(path: str, source: str, tests: str) -> tuple[HiddenTest, ...]:
    """The assertions of a test file that call a function of `source` with literals."""
    cases: dict[str, list[tuple[tuple, object]]] = {}
    for node in ast.walk(ast.parse(tests)):
        match node:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]),
                    ops=[ast.Eq() | ast.Is()],
                    comparators=[wanted],
                )
            ) if name in functions_of(source):
                values = [literal_or_none(part) for part in (*args, wanted)]
                if None not in values:
                    *given, (result,) = values
                    arguments = tuple(value for (value,) in given)
                    cases.setdefault(name, []).append((arguments, result))
    return tuple(
        HiddenTest(f"{path}:{name}", path, name, cases=tuple(found))
        for name, found in cases.items()
    )


def literal_or_none(node: ast.expr) -> tuple[object] | None:
    """The value of a literal in a tuple of one, None for anything else."""
    try:
        return (ast.literal_eval(node),)
    except ValueError:
        return None


def encoded(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in texts.items()}
