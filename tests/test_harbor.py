"""A task as a Harbor folder: its judge, run as Harbor runs it, pays the repair."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from gagar_mini.cli import main
from gagar_mini.world.harbor import export_harbor
from gagar_mini.world.patches import apply_patch
from gagar_mini.world.tasks import load_tasks

PYTHON = Path("/usr/bin/python3")
"""An interpreter that any user may run."""

as_root = pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0 or not PYTHON.exists(),
    reason="the judge is root and gives the program another user",
)


@pytest.fixture(scope="module")
def task():
    return load_tasks("core", "eval")[0]


@pytest.fixture(scope="module")
def folder(task, tmp_path_factory):
    return export_harbor(task, tmp_path_factory.mktemp("harbor"))


def judged(folder, tmp_path, tree):
    """(reward, what it said) of a tree."""
    app, tests = tmp_path / "app", tmp_path / "tests"
    shutil.copytree(folder / "tests", tests)
    for path, content in tree.items():
        (app / path).parent.mkdir(parents=True, exist_ok=True)
        (app / path).write_bytes(content)
    argv = [PYTHON, "-I", tests / "judge.py", app, tmp_path / "reward.txt"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert tests.stat().st_mode & 0o077 == 0  # what is expected is for root alone
    return (tmp_path / "reward.txt").read_text(), done.stdout


def test_the_folder_says_all_and_hides_the_tests(task, folder):
    config = tomllib.loads((folder / "task.toml").read_text())
    assert config["task"]["name"] == f"gagar-mini/{task.id}"
    assert (config["agent"]["user"], config["verifier"]["user"]) == ("agent", "root")
    assert task.statement.strip() in (folder / "instruction.md").read_text()
    app = folder / "environment" / "app"
    seen = {p.relative_to(app).as_posix(): p.read_bytes()
            for p in app.rglob("*") if p.is_file()}  # fmt: skip
    assert seen == dict(task.files)
    assert os.access(folder / "tests" / "test.sh", os.X_OK)


def test_the_solution_is_the_gold_tree(task, folder, tmp_path):
    shutil.copytree(folder / "environment" / "app", tmp_path / "app")
    script = (folder / "solution" / "solve.sh").read_text()
    script = script.replace("/solution/", f"{folder}/solution/")
    script = script.replace("cd /app", f"cd {tmp_path}/app")
    subprocess.run(["sh", "-c", script], check=True)
    for path, content in apply_patch(task.files, task.gold_patch).items():
        assert (tmp_path / "app" / path).read_bytes() == content


@as_root
def test_the_repair_is_paid_and_the_base_is_not(task, folder, tmp_path):
    gold = apply_patch(task.files, task.gold_patch)
    assert judged(folder, tmp_path / "a", gold) == ("1\n", "pass\n")
    reward, said = judged(folder, tmp_path / "b", task.files)
    assert reward == "0\n" and "wrong or missing" in said


READS = b"""
import json, glob
for path in glob.glob("/tmp/**/order.json", recursive=True):
    expected = iter(json.load(open(path))["expected"])
%s = lambda *a: next(expected)
"""


@as_root
@pytest.mark.parametrize("name", ["leaves", "reads", "floods", "hangs", "kills"])
def test_a_program_that_cheats_is_not_paid(task, folder, tmp_path, name):
    target = task.targets[0]
    source = {
        "leaves": b"import os\nos._exit(0)\n",
        "reads": READS % target.function.encode(),
        "floods": b"import os\nwhile True: os.write(3, b'x' * 65536)\n",
        "hangs": b"while True: pass\n",
        "kills": b"import os\nos.kill(os.getppid(), 9)\n",
    }[name]
    reward, _ = judged(folder, tmp_path, {**task.files, target.path: source})
    assert reward == "0\n"


@as_root
@pytest.mark.parametrize(
    "path", ["sitecustomize.py", "conftest.py", "fast.so", "sub/a.pyc"]
)
def test_a_planted_file_costs_the_reward_of_the_repair(task, folder, tmp_path, path):
    gold = apply_patch(task.files, task.gold_patch)
    reward, said = judged(folder, tmp_path, {**gold, path: b"x = 1\n"})
    assert reward == "0\n" and said == f"{path} attacks the tests\n"


@as_root
def test_links_are_not_followed_and_settings_undone(task, folder, tmp_path):
    gold = apply_patch(task.files, task.gold_patch)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "app" / "pipe")
    tree = {**gold, "pyproject.toml": b"[tool.pytest]\n"}
    assert judged(folder, tmp_path, tree)[0] == "1\n"


def test_a_judge_who_is_not_root_gives_no_reward(folder, tmp_path):
    source = (folder / "tests" / "judge.py").read_text()
    (tmp_path / "judge.py").write_text(source.replace("os.geteuid()", "1000"))
    argv = ["python3", tmp_path / "judge.py", tmp_path, tmp_path / "reward.txt"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 1 and "root" in done.stdout
    assert not (tmp_path / "reward.txt").exists()


def test_export_overwrites_nothing(tmp_path, capsys):
    argv = ["tasks", "export", "--max-tasks", "2", "--out", str(tmp_path / "out")]
    assert main(argv) == 0
    assert len(list((tmp_path / "out").iterdir())) == 2
    assert main(argv) == 2
    assert "exists" in capsys.readouterr().err


def test_order_is_the_same_for_the_same_seed(task, tmp_path):
    folders = [
        export_harbor(task, tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, same, other = [
        json.loads((path / "tests" / "order.json").read_text()) for path in folders
    ]
    assert first == same != other
