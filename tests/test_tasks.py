"""Tasks: mutations, splits, the promises of a task, formats, reproducible data."""

import json
import random
from pathlib import Path

import pytest

from gagar_mini.paths import find_data
from gagar_mini.types import HiddenTest, Target, Task
from gagar_mini.world.patches import apply_patch
from gagar_mini.world.tasks import (
    FAMILIES,
    SPLITS,
    TEMPLATES,
    draw_cases,
    find_task,
    load_tasks,
    micro,
)
from gagar_mini.world.tasks.faults import faults_of, same_value
from gagar_mini.world.tasks.formats import encode_tasks, read_tasks, write_tasks
from gagar_mini.world.tasks.mutations import RULES, mutate
from gagar_mini.world.tasks.templates import call_reference, draw_inputs
from gagar_mini.world.tasks.templates_core import CORE_TEMPLATES
from gagar_mini.world.tasks.templates_full import FULL_TEMPLATES
from gagar_mini.world.tasks.validation import failing_tests, run_check

SETS = [(family, split) for family in FAMILIES for split in SPLITS]


def bugs_of(task):
    return json.loads(task.metadata["bugs"])


def faults_key(task):
    """The faults in their arrangement."""
    faults = sorted((b["template"], b["gold"], b["buggy"]) for b in bugs_of(task))
    return (*faults, task.metadata["arrangement"])


def with_line(files, bug, text):
    """The tree with the text of a bug's damaged line replaced."""
    lines = files[bug["path"]].decode().splitlines()
    lines[bug["line"] - 1] = text
    return {**files, bug["path"]: ("\n".join(lines) + "\n").encode()}


def sample(family, split, size):
    return random.Random(0).sample(load_tasks(family, split), size)


# --- mutations ------------------------------------------------------------------------


def test_a_mutation_is_one_changed_line():
    source = "def small(x, limit):\n    x = abs(x)\n    return x <= limit\n"
    found = {(m.operator, m.line, m.text) for m in mutate(source)}
    assert ("boundary", 2, "    return x < limit") in found
    assert ("direction", 2, "    return x >= limit") in found
    assert ("call-lost", 1, "    x = x") in found
    assert ("name", 1, "    x = abs(limit)") in found


def test_columns_count_bytes_where_the_text_is_not_ascii():
    source = 'def f(x):\n    return "\u00e9\u00e8" + x[1:]\n'
    texts = [m.text for m in mutate(source) if m.operator == "bound-lost"]
    assert texts == ['    return "\u00e9\u00e8" + x[:]']


def test_same_value_is_exact_about_types():
    assert same_value([1, {"a": (2,)}], [1, {"a": (2,)}])
    for left, right in [(1, True), (1, 1.0), ([1], (1,)), ({"a": [1]}, {"a": [True]})]:
        assert not same_value(left, right)


# --- templates ------------------------------------------------------------------------


def test_numbers_of_templates():
    assert len(CORE_TEMPLATES) == 28
    assert sum(template.is_held_out for template in CORE_TEMPLATES) == 4
    assert len(TEMPLATES) == len(CORE_TEMPLATES) + len(FULL_TEMPLATES) >= 60


def test_every_template_draws_inputs_that_json_can_hold():
    for template in TEMPLATES.values():
        inputs = draw_inputs(template, random.Random(0), 14)
        assert len(inputs) >= 10, template.name
        for arguments in inputs:
            assert json.loads(json.dumps(arguments)) == list(arguments)
            call_reference(template, arguments)
        assert template.purpose.startswith("return")


def test_every_core_template_has_faults_with_a_plausible_wrong_repair():
    for template in CORE_TEMPLATES:
        lines = template.source.splitlines()
        assert 2 <= len(lines) <= 5
        assert max(map(len, lines)) <= 47
    for template in CORE_TEMPLATES[::4]:
        faults = faults_of(template, micro.CORE.faults_per_template)
        assert len(faults) >= 4, template.name
        assert all(fault.wrong for fault in faults)


# --- the shipped sets -----------------------------------------------------------------


@pytest.mark.parametrize(("family", "split"), SETS)
def test_sizes_ids_and_statements(family, split):
    tasks = load_tasks(family, split)
    assert len(tasks) == micro.COUNTS[split]
    assert [t.id for t in tasks] == [
        f"{family}-{split}-{i:05d}" for i in range(len(tasks))
    ]
    assert len({task.statement for task in tasks}) == len(tasks)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_combination_of_faults_is_in_train_and_eval(family):
    train = set(map(faults_key, load_tasks(family, "train")))
    assert train.isdisjoint(map(faults_key, load_tasks(family, "eval")))


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_templates_are_damaged_in_eval_unseen_and_occur_nowhere_else(family):
    for split in SPLITS:
        for task in load_tasks(family, split):
            damaged = {TEMPLATES[bug["template"]].is_held_out for bug in bugs_of(task)}
            assert damaged == {split == "eval_unseen"}
            names = {test.template for test in task.hidden_tests}
            unseen = sum(TEMPLATES[name].is_held_out for name in names)
            assert unseen == (len(task.targets) if split == "eval_unseen" else 0)


def test_core_is_short_and_has_every_kind_of_operator():
    tasks = load_tasks("core", "train")
    assert max(len(task.statement) for task in tasks) <= 180
    assert max(len(task.files["check.py"]) for task in tasks) <= 560
    operators = {bug["operator"] for task in tasks for bug in bugs_of(task)}
    assert len(operators & set(RULES)) >= 12


def test_about_one_full_task_in_seven_asks_to_write_a_function():
    tasks = load_tasks("full", "train")
    missing = [t for t in tasks if any(b["operator"] == "missing" for b in bugs_of(t))]
    assert 0.1 < len(missing) / len(tasks) < 0.2


# --- promises of a task ---------------------------------------------------------------


@pytest.mark.parametrize(("family", "split"), SETS)
def test_base_fails_its_targets_alone_and_gold_passes(family, split):
    for task in sample(family, split, 12):
        targets = {f"{t.path.removesuffix('.py')}.{t.function}" for t in task.targets}
        gold = apply_patch(task.files, task.gold_patch)
        assert set(gold) == set(task.files)
        assert failing_tests(task, task.files, seed=99) == targets
        assert failing_tests(task, gold, seed=99) == set()
        assert run_check(task, task.files)[0] == 1
        assert run_check(task, gold) == (0, "ok\n")


def test_a_single_repair_is_not_enough():
    pairs = [task for task in load_tasks("core", "eval") if len(bugs_of(task)) == 2]
    for task in pairs[:12]:
        for bug in bugs_of(task):
            half = with_line(task.files, bug, bug["gold"])
            assert len(failing_tests(task, half, seed=5)) == 1
            assert run_check(task, half)[0] == 1


def test_wrong_repairs_fail_and_the_visible_check_misses_some():
    seen = []
    for task in sample("core", "train", 24):
        first, *others = bugs_of(task)
        half = task.files
        for other in others:
            half = with_line(half, other, other["gold"])
        for wrong in first["wrong"]:
            files = with_line(half, first, wrong)
            assert failing_tests(task, files, seed=7)
            seen.append(run_check(task, files)[0])
    assert 0.5 < sum(seen) / len(seen) < 1


def test_hidden_inputs_are_fresh_for_each_seed_and_the_same_for_one():
    test = find_task("core-train-00000").hidden_tests[0]
    assert draw_cases(test, 1) == draw_cases(test, 1)
    assert draw_cases(test, 1) != draw_cases(test, 2)
    assert 12 <= len(draw_cases(test, 1)) <= 16


def test_literal_cases_are_taken_as_they_are():
    cases = (((1, "a"), (2, 3)),)
    assert draw_cases(HiddenTest("m.f", "m.py", "f", cases=cases), 0) == cases


# --- data files -----------------------------------------------------------------------


def literal_task():
    return Task(
        id="own-train-00000",
        family="own",
        split="train",
        statement="Fix f in m.py.",
        files={"m.py": b"def f(): pass\n", "latin.txt": b"caf\xe9", "empty": b""},
        visible_check="check.py",
        targets=(Target("m.py", "f"),),
        allowed_paths=("m.py",),
        hidden_tests=(HiddenTest("m.f", "m.py", "f", cases=(((), (1, [2.5], None)),)),),
        gold_patch=b"\xff\x00",
        metadata={"note": "x"},
    )


@pytest.mark.parametrize("name", ["tasks.jsonl.gz", "tasks.jsonl"])
def test_tasks_survive_a_file(tmp_path, name):
    tasks = (literal_task(), find_task("core-eval-00003"))
    path = tmp_path / name
    if name.endswith(".gz"):
        write_tasks(path, tasks)
    else:
        path.write_bytes(encode_tasks(tasks))
    assert read_tasks(path) == tasks


def test_a_malformed_record_names_its_line(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(encode_tasks([literal_task()]) + b'{"id": "x"}\n')
    with pytest.raises(ValueError, match=r"tasks\.jsonl:2"):
        read_tasks(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rebuild_gives_the_bytes_that_ship(tmp_path, family):
    counts = {"train": 2, "eval": 1, "eval_unseen": 1}
    micro.build(family, tmp_path, seed=0, counts=counts)
    for split, count in counts.items():
        rebuilt = read_tasks(tmp_path / family / f"{split}.jsonl.gz")
        shipped = load_tasks(family, split)[:count]
        assert encode_tasks(rebuilt) == encode_tasks(shipped)
        again = tmp_path / "again" / f"{split}.jsonl.gz"
        write_tasks(again, rebuilt)
        assert again.read_bytes() == (tmp_path / family / again.name).read_bytes()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: load_tasks("cores", "train"), "'cores' is none of core, full"),
        (lambda: load_tasks("core", "test"), "'test' is none of train"),
        (lambda: find_task("core-train-99999"), "no task has the id"),
        (lambda: find_task("17"), "ids look like"),
        (lambda: micro.build("tiny", Path(".")), "'tiny' is none of core, full"),
    ],
)
def test_unknown_names_are_errors_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_missing_data_says_where_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("GAGAR_MINI_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="Clone the repository"):
        find_data("tasks/core")
    (tmp_path / "tasks").mkdir()
    assert find_data("tasks") == tmp_path / "tasks"
