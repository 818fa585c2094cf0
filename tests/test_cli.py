"""The command line as a stranger meets it: help that teaches, slips in one sentence."""

import json
from pathlib import Path

import pytest

from gagar_mini.cli import COMMANDS, main
from gagar_mini.world.tasks import load_tasks

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def task():
    return load_tasks("core", "eval")[0]


def refusal(capsys, *argv: str) -> str:
    """What a command says when it refuses: one line on stderr, nothing on stdout."""
    assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gagar-mini: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", COMMANDS)
def test_help_gives_an_example(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code in (0, None)
    out = capsys.readouterr().out
    assert f"gagar-mini {name}" in out and "Example" in out


def test_overview_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("trian",), "there is no command 'trian'"),
        (("tasks", "shwo"), "tasks list, tasks show"),
        (("tasks", "show", "no/such"), "no/such"),
        (("tasks", "list", "--split", "nowhere"), "nowhere"),
        (("train", "--preset", "huge"), "there is no preset 'huge'"),
        (("train", "--rollout.group-siz", "4"), "--rollout.group-size"),
        (("train", "--rollout.group-size", "1"), "at least 2"),
        (("train", "--rollout.temperature", "0"), "temperature"),
        (("train", "--steps", "many"), "many"),
        (("train", "--credit", "gagar"), "needs a grader"),
        (("train", "--credit", "magic"), "magic"),
        (("eval", "no/such/run"), "no/such/run"),
        (("compare", "no/such/run"), "no/such/run"),
        (("grade", "no/such/file.json"), "No such file"),
        (("grade", "x", "--max-scale", "nan"), "at least 1"),
        (("grade", "x", "--timeout-s", "0"), "above 0"),
        (("grade", "x", "--credit", "magic"), "gagar-mini: invalid choice"),
        (("train", "--rollout.temperature", "nan"), "finite"),
        (("train", "--optim.warmup-steps", "-1"), "below 0"),
        (("train", "--policy", "no/such/policy"), "cannot be loaded"),
        (("eval", "x", "--temperature", "inf"), "--temperature"),
        (("compare", "x", "--out", "figure"), "let it end in .png"),
        (("compare", "x", "--out", "figure.foo"), "let it end in .png"),
        (("sft", "policy", "--out", "README.md/x"), "no folder"),
        (("sft", "policy", "--out", "no/such", "--num-tokens", "0"), "above 0"),
        (("tasks", "build", "--out", "README.md"), "no folder"),
        (("experiment", "--out", "no/such", "--seeds", "0", "0"), "each once"),
        (("experiment", "--out", "no/such", "--arms"), "at least one"),
        (("experiment", "--out", "no/such", "--budgets", "0x9"), "above 0"),
        (("experiment", "--out", "no/such", "--jobs", "0"), "above 0"),
    ],
)
def test_a_slip_is_one_sentence(argv, told, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert told in refusal(capsys, *argv)
    assert not (ROOT / "no").exists()


def test_dry_run_prints_the_config_and_touches_nothing(capsys, tmp_path):
    run_dir = tmp_path / "run"
    argv = ["train", "--credit", "gagar", "--grader=rubric", "--dry-run"]
    assert main([*argv, "--optim.lr", "1e-4", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "rule: gagar" in out and "lr: 0.0001" in out
    assert not run_dir.exists()


def test_a_folder_that_is_in_use_is_left_alone(capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    refusal(capsys, "sft", "policy", "--out", str(tmp_path))
    assert "--resume" in refusal(capsys, "train", "--run-dir", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_verify_tells_a_repair_from_none(sandbox, task, capsys, tmp_path):
    for name, patch, status in [("gold", task.gold_patch, "pass"), ("no", b"", "fail")]:
        file = tmp_path / name
        file.write_bytes(patch)
        argv = ["verify", "--task", task.id, "--patch", str(file), "--json"]
        assert main(argv) == 0
        assert json.loads(capsys.readouterr().out)["status"] == status


def test_verify_refuses_what_is_no_patch(task, capsys, tmp_path):
    file = tmp_path / "fix.diff"
    said = refusal(capsys, "verify", "--task", task.id, "--patch", str(file))
    assert "No such file" in said
    file.write_text(
        "--- a/no_such_file.py\n+++ b/no_such_file.py\n@@ -1 +1 @@\n-x\n+y\n"
    )
    said = refusal(capsys, "verify", "--task", task.id, "--patch", str(file))
    assert "does not apply" in said


def group_of(task, **settings):
    """Two passes and two failures, graded T1 and T3 unless told otherwise."""
    gold = task.gold_patch.decode()
    told = {"a": True, "b": True, "c": False, "d": False}
    return {
        "task_id": task.id,
        "candidates": [
            {"id": name, "patch": gold if passed else "", "passed": passed}
            for name, passed in told.items()
        ],
        "grade": {"a": {"tier": "T1"}, "b": {"tier": "T3"}},
    } | settings


def test_grade_shares_credit_by_the_grade_in_the_file(task, capsys, tmp_path):
    file = tmp_path / "group.json"
    file.write_text(json.dumps(group_of(task)))
    argv = ["grade", str(file), "--grader", "none", "--json"]
    assert main([*argv, "--credit", "gagar-exact"]) == 0
    exact = json.loads(capsys.readouterr().out)
    # f = (1, .2): lambda = 1 / .6 = 5/3
    after = [member["redistributed"] for member in exact["members"]]
    assert after == pytest.approx([5 / 6, 1 / 6, -0.5, -0.5])
    assert main([*argv, "--credit", "gagar"]) == 0
    bounded = json.loads(capsys.readouterr().out)
    after = [member["redistributed"] for member in bounded["members"]]
    assert after == pytest.approx([0.775, 0.175, -0.475, -0.475])
    assert bounded["is_cap_hit"]


def test_rubric_grades_a_group_of_patches(sandbox, task, capsys, tmp_path):
    file = tmp_path / "group.json"
    group = group_of(task, grade=None)
    group["candidates"][0]["passed"] = None  # hidden tests decide, and it passes
    file.write_text(json.dumps(group))
    assert main(["grade", str(file), "--grader", "rubric", "--json"]) == 0
    graded = json.loads(capsys.readouterr().out)
    tiers = {member["id"]: member["tier"] for member in graded["members"]}
    assert tiers["a"] == tiers["b"] is not None  # the same patch is the same quality
    assert tiers["c"] is tiers["d"] is None


BAD_IDS = ("", " a", "a\nb", "\x1b[31mred", "\u202eabc", "\ud800", "x" * 201, 5, None)


def first(**settings):
    """Two candidates, the first of them with these settings."""
    candidates = [{"id": name, "patch": "", "passed": False} for name in "ab"]
    return [candidates[0] | settings, candidates[1]]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"grade": {"a": {"tier": "T1"}}}, "lacks ['b']"),
        ({"grade": {n: {"tier": "T1"} for n in "abc"}}, "names ['c']"),
        ({"grade": {"a": {"tier": "T9"}, "b": {"tier": "T1"}}}, "tier"),
        ({"candidates": []}, "at least 2"),
        ({"candidates": [{"id": "a"}, {"id": "b"}]}, "candidate number 0"),
        ({"task_id": "no/such"}, "no/such"),
        ({"grade": {"a": {"tier": "T1", "order": -1}, "b": {"tier": "T1"}}}, "order"),
        *(({"candidates": first(id=name)}, "printable") for name in BAD_IDS),
        *(({"candidates": first(passed=told)}, "passed") for told in (1, 1.0, "true")),
        ({"candidates": first(patch="\ud800")}, "lone surrogate"),
        ({"candidates": first(patch="hello")}, "it is not a git diff"),
    ],
)
def test_a_broken_group_file_is_one_sentence(settings, told, task, capsys, tmp_path):
    file = tmp_path / "group.json"
    file.write_text(json.dumps(group_of(task, **settings)))
    assert told in refusal(capsys, "grade", str(file), "--grader", "none")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no valid JSON"),
        (b"\xff\xfe", "no valid JSON"),
        (b"[" * 10**5, "nested too deeply"),
        (
            b'{"task_id": "x", "candidates": [], "task_id": "y"}',
            "'task_id' is there tw",
        ),
        (b"[]", "must be an object"),
    ],
)
def test_a_file_that_is_no_group_is_one_sentence(content, told, capsys, tmp_path):
    file = tmp_path / "group.json"
    file.write_bytes(content)
    said = refusal(capsys, "grade", str(file))
    assert told in said and str(file) in said


def test_tasks_show_keeps_the_hidden_tests_hidden(task, capsys):
    assert main(["tasks", "show", task.id]) == 0
    out = capsys.readouterr().out
    assert task.statement.splitlines()[0] in out
    assert task.gold_patch.decode() not in out


def test_doctor_always_answers(capsys):
    assert main(["doctor", "--json"]) == 0
    checks = {check["part"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["python"]["is_there"] and checks["torch"]["is_there"]
    assert all(check["purpose"] and check["remedy"] for check in checks.values())


@pytest.mark.slow
def test_train_eval_compare_from_the_shipped_policy(sandbox, capsys, tmp_path):
    runs = [tmp_path / "binary", tmp_path / "gagar"]
    arms = [["--credit", "binary"], ["--credit", "gagar", "--grader", "rubric"]]
    for run, arm in zip(runs, arms, strict=True):
        assert main(["train", *arm, "--steps", "2", "--run-dir", str(run)]) == 0
        assert main(["eval", str(run), "--max-tasks", "4"]) == 0
    capsys.readouterr()
    figure = tmp_path / "compare.png"
    assert main(["compare", *map(str, runs), "--out", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "gagar + rubric" in out and figure.exists()
    assert "exists" in refusal(capsys, "compare", str(runs[0]), "--out", str(figure))


@pytest.mark.slow
def test_bench_measures_a_step(sandbox, capsys):
    assert main(["bench", "--steps", "1", "--json"]) == 0
    figures = {f["name"]: f["value"] for f in json.loads(capsys.readouterr().out)}
    assert figures["step"] > 0 and figures["sampled tokens"] > 0
