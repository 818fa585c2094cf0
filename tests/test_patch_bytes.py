"""A patch is bytes from the agent to the verdict: through records, files and judges."""

import json
import random
from dataclasses import replace

import pytest
from synthetic import PASS, make_group, make_task

from gagar_mini.cli import main
from gagar_mini.config import RunConfig
from gagar_mini.group_file import read_group
from gagar_mini.records import (
    group_arrays,
    group_from_record,
    group_record,
    open_run,
    read_rollouts,
)
from gagar_mini.types import HiddenTest, Status
from gagar_mini.world.patches import (
    PatchError,
    apply_patch,
    make_patch,
    make_text_patch,
    tree_hash,
)
from gagar_mini.world.reversal import reverse_patch
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.tasks.formats import encode_tasks, read_tasks
from gagar_mini.world.verifier import verify

LINES = (
    b"", b" ", b"\t", b"x = 1", b"caf\xe9", "caf\xe9".encode(), b"\xff\xfe", b"a\rb",
    b"--- a/x", b"+++ b/x", b"-", b"+", b"\\ No newline at end of file", b"@@ -1 +1 @@",
    b"diff --git a/x b/x", b"GIT binary patch", b"literal 9", b"\xe2\x80\xa8", b"\x0c",
)  # fmt: skip
ENDS = (b"\n", b"\r\n", b"\r", b"\x85\n")
NAMES = (
    "a.py",
    "d/b.txt",
    "d/e/c.bin",
    "sp ace.md",
    'q"uo\\te',
    "\u00fcber.txt",
    "-x",
    "b/a",
)


def random_content(rng: random.Random) -> bytes:
    """Empty, binary, or lines of every kind with ends of every kind, perhaps none."""
    kind = rng.random()
    if kind < 0.1:
        return b""
    if kind < 0.25:
        return rng.randbytes(rng.randrange(1, 80))
    end = rng.choice(ENDS)
    text = b"".join(rng.choice(LINES) + end for _ in range(rng.randrange(1, 30)))
    return text + rng.choice((b"", b"no newline"))


def random_change(rng: random.Random) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A tree and another, in which files were edited, renamed, deleted and added."""
    base = {name: random_content(rng) for name in NAMES if rng.random() < 0.7}
    tree = dict(base)
    for name in base:
        kind = rng.random()
        if kind < 0.4:
            lines = tree[name].split(b"\n")
            lines[rng.randrange(len(lines))] = rng.choice(LINES)
            tree[name] = b"\n".join(lines)
        elif kind < 0.7:
            content = tree.pop(name)
            if kind < 0.55:
                tree[f"moved/{name}"] = content
    return base, tree | {"new": random_content(rng)}


@pytest.mark.parametrize("seed", range(16))
def test_any_change_survives_every_form_of_its_patch(seed):
    base, tree = random_change(random.Random(seed))
    patch = make_patch(base, tree)
    assert apply_patch(base, patch) == tree
    assert apply_patch(tree, reverse_patch(patch)) == base
    text = make_text_patch(base, tree)
    assert apply_patch(base, text.encode()) == tree


def patches() -> list[tuple[dict[str, bytes], bytes]]:
    changes = [random_change(random.Random(seed)) for seed in range(16)]
    return [(base, make_patch(base, tree)) for base, tree in changes]


def test_records_keep_every_byte(tmp_path):
    group = make_group([PASS] * 16)
    members = zip(group.trajectories, patches(), strict=True)
    given = tuple(replace(member, patch=patch) for member, (_, patch) in members)
    group = replace(group, trajectories=given)
    with open_run(tmp_path, RunConfig()) as run:
        run.write_rollouts(0, [group_record(group)])
    (record,) = read_rollouts(tmp_path, 0)
    copy = group_from_record(record, group_arrays(group), group.task)
    assert [t.patch for t in copy.trajectories] == [t.patch for t in given]


def test_task_files_keep_every_byte(tmp_path):
    tasks = tuple(
        replace(make_task(f"t-{number}"), files=base, gold_patch=patch)
        for number, (base, patch) in enumerate(patches())
    )
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(encode_tasks(tasks))
    copies = read_tasks(path)
    assert [(t.files, t.gold_patch) for t in copies] == [
        (t.files, t.gold_patch) for t in tasks
    ]


def test_a_task_file_may_hold_line_separators_of_unicode(tmp_path):
    path = tmp_path / "tasks.jsonl"
    text = encode_tasks([make_task("t-0")]).decode()
    path.write_text(text.replace("say it", "say\u2028it"))
    assert read_tasks(path)[0].statement == "say\u2028it"


KINDS = {
    "no newline at end": {"words.txt": b"one"},
    "crlf": {"words.txt": b"one\r\ntwo\r\n"},
    "latin-1": {"words.txt": b"caf\xe9\n"},
    "binary": {"blob": bytes(range(256))},
    "new": {"notes.md": b"done\n"},
    "empty file": {"notes.md": b""},
    "deleted": {"spare.py": None},
    "renamed": {"spare.py": None, "other.py": b"y = 1\n"},
}
BASE = {"f.py": b"def f():\n    return 1\n", "words.txt": b"uno\n", "blob": b"\0",
        "spare.py": b"y = 1\n"}  # fmt: skip
RIGHT = b"def f():\n    return 2\n"
TASK = replace(
    make_task(),
    files=BASE,
    allowed_paths=("f.py",),
    hidden_tests=(HiddenTest("f", "f.py", "f", cases=(((), 2),)),),
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_takes_every_kind_of_file(sandbox, kind):
    tree = {**BASE, "f.py": RIGHT, **KINDS[kind]}
    tree = {path: content for path, content in tree.items() if content is not None}
    for patch in (make_patch(BASE, tree), make_text_patch(BASE, tree).encode()):
        outcome = verify(TASK, patch, sandbox, seed=0)
        assert outcome.status is Status.PASS
        assert outcome.tree_hash == tree_hash(tree)


def test_a_mode_is_no_part_of_a_tree(sandbox):
    repair = make_patch(BASE, {**BASE, "f.py": RIGHT})
    mode = b"diff --git a/blob b/blob\nold mode 100644\nnew mode 100755\n"
    assert apply_patch(BASE, mode) == BASE
    both = repair.replace(b"\nindex", b"\nold mode 100644\nnew mode 100755\nindex", 1)
    both = both.replace(b" 100644\n---", b"\n---") + mode
    outcome = verify(TASK, both, sandbox, seed=0)
    assert outcome.status is Status.PASS
    assert outcome.tree_hash == tree_hash({**BASE, "f.py": RIGHT})


MOVES = b"diff --git a/blob b/x\nsimilarity index 100%%\n%s from blob\n%s to %s\n"


@pytest.mark.parametrize("verb", [b"rename", b"copy"])
@pytest.mark.parametrize(
    "target",
    [b"../x", b"/tmp/x", b".git/hooks/x", b'"..\\057x"', b'".git\\057x"', b"d/../../x"],
)
def test_nothing_is_moved_out_of_the_tree(verb, target):
    with pytest.raises(PatchError):
        apply_patch(BASE, MOVES % (verb, verb, target))


def test_a_group_file_keeps_bytes_that_are_no_text(tmp_path):
    task = load_tasks("core", "eval")[0]
    tree = {**task.files, "latin.txt": b"caf\xe9\r\nno newline"}
    patch = make_patch(task.files, tree)
    member = {"patch": patch.decode("utf-8", "surrogateescape"), "passed": True}
    members = [member | {"id": name} for name in "ab"]
    path = tmp_path / "group.json"
    path.write_text(json.dumps({"task_id": task.id, "candidates": members}))
    group = read_group(path, seed=0, sandbox="bubblewrap")
    assert [t.patch for t in group.trajectories] == [patch, patch]


def test_a_gold_patch_is_printed_as_bytes(capfdbinary):
    task = load_tasks("core", "eval")[0]
    assert main(["tasks", "show", task.id, "--gold"]) == 0
    assert capfdbinary.readouterr().out == task.gold_patch
