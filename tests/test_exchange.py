"""Tasks of other projects: read as they are published, written back the same."""

import json

import pytest
from test_patches import BASE, CHANGES, changed

from gagar_mini.cli import main
from gagar_mini.world.patches import PatchError, apply_patch, make_patch
from gagar_mini.world.reversal import reverse_patch
from gagar_mini.world.tasks.exchange import (
    instance_record,
    make_task,
    read_instance,
    read_instances,
    write_instances,
)
from gagar_mini.world.tasks.formats import read_tasks

SOUND = {"pkg/a.py": b"def f(x):\n    return x + 1\n", "latin.txt": b"caf\xe9\n"}
BROKEN = {**SOUND, "pkg/a.py": b"def f(x):\n    return x - 1\n"}
BUG, FIX = make_patch(SOUND, BROKEN), make_patch(BROKEN, SOUND)
BENCH = {
    "instance_id": "owner__name-1",
    "repo": "owner/name",
    "base_commit": "c0ffee",
    "patch": FIX.decode(),
    "test_patch": "diff --git a/t.py b/t.py\n",
    "problem_statement": "f() is off\u2028by two",
    "hints_text": "",
    "created_at": "2026-01-01",
    "version": "1.0",
    "FAIL_TO_PASS": ["t.py::test_f"],
    "PASS_TO_PASS": ['t.py::test_g[a,"b"]', "t.py::test_h"],
    "environment_setup_commit": "c0ffee",
}
SMITH = {
    "instance_id": "owner__name.c0ffee.lm_rewrite__x",
    "repo": "swesmith/owner__name.c0ffee",
    "patch": BUG.decode(),
    "FAIL_TO_PASS": ["t.py::test_f"],
    "PASS_TO_PASS": [],
    "image_name": "swesmith.x86_64.owner__name.c0ffee",
    "problem_statement": None,
}
INNER = {
    "instance_id": "format-code-task-000001",
    "problem_statement": "repair it",
    "docker_image": "format-code-task-000001:latest",
    "cwd": "/testbed",
    "test_patch": "diff --git a/mimo_test_command.sh b/mimo_test_command.sh\n",
    "test_command": "bash mimo_test_command.sh",
    "whatever": 1,
}
MIMO = {
    "data_source": "code",
    "prompt": [{"role": "user", "content": "repair it"}],
    "reward_model": {"style": "rule", "ground_truth": ""},
    "extra_info": {"instance_json": json.dumps(INNER)},
}


def read(folder, record, kind, **options):
    path = folder / "x.jsonl"
    path.write_text(json.dumps(record, ensure_ascii=False) + "\n")
    (instance,) = read_instances(path, kind, **options)
    return instance


def test_swe_bench_comes_back_as_it_was(tmp_path):
    instance = read(tmp_path, BENCH, "swe-bench")
    assert instance_record(instance) == BENCH
    assert apply_patch(BROKEN, instance.gold_patch) == SOUND


def test_test_ids_may_be_a_list_or_a_text_of_one(tmp_path):
    texts = {key: json.dumps(BENCH[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    as_texts = read(tmp_path, BENCH | texts, "swe-bench")
    assert as_texts == read(tmp_path, BENCH, "swe-bench")


def test_in_swe_smith_the_patch_is_the_bug(tmp_path):
    instance = read(tmp_path, SMITH, "swe-smith")
    assert (instance.bug_patch, instance.gold_patch) == (BUG, FIX)
    assert apply_patch(apply_patch(SOUND, instance.bug_patch), instance.gold_patch) == (
        SOUND
    )
    assert instance.statement == "" and instance.image == SMITH["image_name"]


def test_mimo_has_hidden_tests_and_no_repair(tmp_path):
    instance = read(tmp_path, MIMO, "mimo")
    assert instance.test_command == INNER["test_command"]
    assert instance.image == "xiaomimimo/mimo-v2.6-rl-oss:format-code-task-000001"
    assert (instance.gold_patch, instance.workdir) == (b"", "/testbed")


def test_every_kind_survives_the_form_in_which_it_is_written(tmp_path):
    kinds = {"swe-bench": BENCH, "swe-smith": SMITH, "mimo": MIMO}
    instances = tuple(read(tmp_path, row, kind) for kind, row in kinds.items())
    write_instances(tmp_path / "all.jsonl", instances)
    assert read_instances(tmp_path / "all.jsonl", "swe-bench") == instances


@pytest.mark.parametrize("patch", [b"caf\xe9\r\n", b"\x80no newline"])
def test_bytes_that_are_no_utf8_survive(tmp_path, patch):
    text = patch.decode("utf-8", "surrogateescape")
    path = tmp_path / "x.json"
    path.write_text(json.dumps([BENCH | {"patch": text}]))
    instances = read_instances(path, "swe-bench")
    assert instances[0].gold_patch == patch
    write_instances(tmp_path / "y.jsonl", instances)
    assert read_instances(tmp_path / "y.jsonl", "swe-bench") == instances


def test_parquet_gives_what_json_lines_give(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for kind, record in {"swe-bench": BENCH, "swe-smith": SMITH, "mimo": MIMO}.items():
        path = tmp_path / "x.parquet"
        parquet.write_table(pyarrow.Table.from_pylist([record]), path)
        assert read_instances(path, kind) == (read(tmp_path, record, kind),)


def without(record, key):
    return {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize(
    ("kind", "record", "told"),
    [
        ("swe-bench", without(BENCH, "patch"), "(owner__name-1) lacks patch"),
        ("swe-bench", BENCH | {"patch": None}, "lacks patch"),
        ("swe-bench", BENCH | {"meta": {}}, "the field 'meta'"),
        ("swe-bench", BENCH | {"patch": 3}, "patch is '3': it must be text"),
        ("swe-bench", BENCH | {"patch": "\ud800"}, "lone surrogate"),
        ("swe-bench", BENCH | {"FAIL_TO_PASS": "t.py::x"}, "FAIL_TO_PASS is no valid"),
        ("swe-bench", BENCH | {"FAIL_TO_PASS": '"t"'}, "must be a list of test ids"),
        ("swe-bench", BENCH | {"FAIL_TO_PASS": [1]}, "must be a list of test ids"),
        ("swe-bench", SMITH, "lacks base_commit, test_patch, problem_statement"),
        ("swe-smith", SMITH | {"patch": "x"}, "does not begin like a git diff"),
        ("mimo", BENCH, "the field 'FAIL_TO_PASS', which mimo has not"),
        ("mimo", MIMO | {"extra_info": {}}, "lacks extra_info.instance_json"),
        ("mimo", MIMO | {"extra_info": {"instance_json": "{"}}, "no valid JSON"),
        ("mimo", MIMO | {"extra_info": {"instance_json": "{}"}}, "lacks instance_id"),
        ("swe-bench", [BENCH], "is no object"),
        ("swebench", BENCH, "is none of swe-bench, swe-smith, mimo"),
    ],
)  # fmt: skip
def test_a_slip_is_one_sentence(tmp_path, kind, record, told):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError) as error:
        read_instances(path, kind)
    assert told in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", b"a,b\n", "must end in"),
        ("x.json", b"\xff", "is no UTF-8"),
        ("x.jsonl", b"{}\n{\n", "x.jsonl:2 is no valid JSON"),
        ("x.json", json.dumps([BENCH, BENCH]).encode(), "x.json:2: instance"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=told):
        read_instances(tmp_path / name, "swe-bench")


def test_an_unknown_field_can_be_left_out(tmp_path):
    instance = read(tmp_path, BENCH | {"meta": {}}, "swe-bench", ignore=("meta",))
    assert instance == read(tmp_path, BENCH, "swe-bench")


@pytest.mark.parametrize("kind", CHANGES)
def test_the_reverse_of_a_patch_undoes_it(kind):
    tree = changed(BASE, CHANGES[kind])
    patch = make_patch(BASE, tree)
    assert apply_patch(tree, reverse_patch(patch)) == BASE
    assert reverse_patch(reverse_patch(patch)) == patch


def test_the_reverse_of_a_rename_and_of_a_mode():
    body = b"@@ -1 +1 @@\n-1\n+2\n"
    patch = b'diff --git a/x y "b/q\\"z"\nold mode 100644\nnew mode 100755\n'
    patch += b'similarity index 50%\nrename from x y\nrename to "q\\"z"\n'
    patch += b"index 1..2\n--- a/x y\t\n" + b'+++ "b/q\\"z"\n' + body
    assert apply_patch({"x y": b"1\n"}, patch) == {'q"z': b"2\n"}
    back = reverse_patch(patch)
    assert b"old mode 100755\nnew mode 100644\n" in back
    assert apply_patch({'q"z': b"2\n"}, back) == {"x y": b"1\n"}
    assert apply_patch({"x y": b"1\n"}, reverse_patch(back)) == {'q"z': b"2\n"}


@pytest.mark.parametrize(
    "patch",
    [
        b"garbage",
        b"diff --git a/x b/y\nsimilarity index 100%\ncopy from x\ncopy to y\n",
        b"diff --git a/x b/x\nindex 1..2\nGIT binary patch\nliteral 1\nIcmZPo\n\n",
    ],
)
def test_what_does_not_say_how_it_was_is_not_reversed(patch):
    with pytest.raises(PatchError):
        reverse_patch(patch)


ROOT = {
    "pkg/__init__.py": b"",
    "pkg/a.py": SOUND["pkg/a.py"],
    "tests/test_a.py": b"from pkg.a import f\ndef test_f():\n    assert f(1) == 2\n",
}
SMITH_TASK = SMITH | {
    "FAIL_TO_PASS": ["tests/test_a.py::test_f"],
    "problem_statement": "f() subtracts",
}


def run(*argv):
    return main([str(word) for word in argv])


def test_an_instance_and_its_tree_make_a_task_that_is_judged(sandbox, tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text(json.dumps(SMITH_TASK) + "\n")
    for path, content in ROOT.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_bytes(content)
    (tmp_path / "tree" / "link").symlink_to("/etc/passwd")
    name, task_file = SMITH["instance_id"], tmp_path / "task.jsonl"
    argv = ["tasks", "import", tmp_path / "x.jsonl", "--format", "swe-smith"]
    argv += ["--id", name, "--tree", tmp_path / "tree", "--out", task_file]
    assert run(*argv) == 0
    (task,) = read_tasks(task_file)
    assert task.files == {**ROOT, "pkg/a.py": BROKEN["pkg/a.py"]}
    assert task.allowed_paths == ("pkg/a.py",)
    capsys.readouterr()
    for patch, status in ((FIX, "pass"), (b"", "fail")):
        (tmp_path / "fix.diff").write_bytes(patch)
        argv = ["verify", "--task", name, "--tasks", task_file, "--json"]
        assert run(*argv, "--patch", tmp_path / "fix.diff") == 0
        assert json.loads(capsys.readouterr().out)["status"] == status


@pytest.mark.parametrize(
    ("record", "tree", "told"),
    [
        (BENCH | {"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, ROOT, "names no tests"),
        (BENCH | {"FAIL_TO_PASS": ["OneTest (a.b)"]}, ROOT, "names no tests"),
        (BENCH | {"test_patch": ""}, {"x": b""}, "this tree: the patch does not apply"),
        (BENCH | {"test_patch": ""}, BROKEN, "this tree has no t.py"),
    ],
)
def test_an_instance_that_makes_no_task_says_why(record, tree, told):
    with pytest.raises(ValueError, match=told):
        make_task(read_instance(record, "swe-bench"), tree)


def test_import_checks_writes_and_overwrites_nothing(tmp_path, capsys):
    path, out = tmp_path / "x.jsonl", tmp_path / "y.jsonl"
    path.write_text(json.dumps(BENCH) + "\n")
    assert run("tasks", "import", path, "--out", out) == 0
    assert "1 instances" in capsys.readouterr().out
    assert read_instances(out, "swe-bench") == read_instances(path, "swe-bench")
    for more, told in ((("--out", out), "exists"), (("--id", "x"), "belong together")):
        assert run("tasks", "import", path, *more) == 2
        said = capsys.readouterr().err
        assert told in said and said.count("\n") == 1
