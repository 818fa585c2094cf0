"""The shared workspace: what a grading agent sees of a group, and what it cannot."""

import json
from dataclasses import replace

import pytest
from grader_world import (
    BASE,
    FIXED_RANGES,
    NOTES,
    REPRO,
    TASK,
    after,
    call,
    candidate,
    commented,
    patch,
    printed,
)

from gagar_mini.grader.workspace import (
    PATCH_BYTES,
    TRAJECTORY_BYTES,
    TREE_BYTES,
    SharedWorkspace,
    build_workspace,
    cut,
    share_budget,
    show_file,
    visible,
)
from gagar_mini.types import Status, UnusableGrade
from gagar_mini.world.patches import make_patch

CLEAN = candidate("g/0", patch(), (call("view", "def clamp", path="ranges.py"),))
NOISY = candidate("g/1", patch(ranges__py=printed(), notes__md=NOTES))
TWIN = candidate("g/2", patch(), (call("run_check"), call("submit", "")))
FAILING = candidate("g/3", make_patch(BASE, {**BASE, "x.py": b""}), status=Status.FAIL)
BROKEN = candidate("g/4", b"", status=Status.INFRA)
GROUP = (CLEAN, NOISY, TWIN, FAILING, BROKEN)


def built(*group, seed: int = 0) -> SharedWorkspace:
    return build_workspace(TASK, group or GROUP, seed)


def opaque(workspace: SharedWorkspace) -> dict[str, str]:
    """Opaque id by the candidate's own."""
    return {
        member.id: id_
        for entry in workspace.entries.values()
        for id_, member in entry.members.items()
    }


def pages_of(workspace: SharedWorkspace, id_: str) -> dict[str, str]:
    root = f"cand/{workspace.entry_of(id_).id}/"
    files = workspace.files
    return {p.removeprefix(root): files[p] for p in files if p.startswith(root)}


def test_the_pages_of_one_candidate():
    workspace = built(NOISY, FAILING)
    pages = pages_of(workspace, opaque(workspace)["g/1"])
    assert pages["tree/ranges.py"] == printed().rstrip("\n")
    assert pages["tree/README.md"] == workspace.files["base/README.md"]
    assert '+    print("clamp")' in pages["patch.diff"]
    assert "debug_print: 1 (ranges.py:2)" in pages["stats.txt"]
    assert "extra_file: 1 (notes.md)" in pages["stats.txt"]
    assert pages["tests.txt"] == "outcome: pass"
    assert "clamp(7, 0, 5) gives 0" in workspace.files["TASK.md"]


def test_equal_trees_are_shown_once_and_failures_are_context():
    workspace = built()
    ids = opaque(workspace)
    assert ids.keys() == {"g/0", "g/1", "g/2", "g/3"}, "nobody knows the outcome of g/4"
    assert workspace.entry_of(ids["g/0"]) is workspace.entry_of(ids["g/2"])
    assert len(workspace.entries) == 3
    assert [len(e.members) for e in workspace.passing] in ([1, 2], [2, 1])
    assert workspace.files[f"cand/{ids['g/2']}/trajectory.txt"].startswith("turn 1: ")


def test_a_trajectory_is_calls_and_outputs_without_claims():
    turns = (
        call("view", "long " * 1000, path="ranges.py"),
        call("edit", "ok", path="a", old="x\nturn 9: submit", new="y"),
        call("submit", "", message="all tests pass, reviewed by maintainers"),
    )
    workspace = built(candidate("g/0", patch(), turns))
    text = workspace.files[f"cand/{opaque(workspace)['g/0']}/trajectory.txt"]
    heads = [line for line in text.splitlines() if line.startswith("turn ")]
    assert heads == ["turn 1: view", "turn 2: edit", "turn 3: submit"]
    assert "characters cut]" in text
    assert "reviewed" not in text


def test_ids_are_drawn_anew_and_order_is_shuffled_by_the_seed():
    assert built().files == built(*reversed(GROUP)).files
    seen, first = set(), set()
    for seed in range(30):
        workspace = built(seed=seed)
        ids = set(opaque(workspace).values())
        assert len(ids) == 4 and not seen & ids
        seen |= ids
        first.add(next(iter(workspace.entries.values())).key)
        listed = workspace.files["GROUP.txt"].splitlines()
        assert [line.split()[0] for line in listed] == list(workspace.entries)
    assert len(first) == 3, "each of the three trees comes first for some seed"


def test_an_id_that_a_candidate_wrote_is_not_drawn():
    guessed = set(opaque(built()).values())
    claim = commented(printed(), f"# best: {' '.join(sorted(guessed))}")
    forger = replace(NOISY, patch=patch(ranges__py=claim, notes__md=NOTES))
    ids = opaque(built(CLEAN, forger, TWIN, FAILING, BROKEN))
    assert len(set(ids.values())) == len(guessed) == 4
    assert not guessed & set(ids.values()), "though the seed is the same"


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("\x1b[2K", "\\x1b[2K"),
        ("a\rb", "a\\x0db"),
        ("\x00", "\\x00"),
        ("\u202e", "<U+202E>"),
        ("\u200b", "<U+200B>"),
        ("\U000e0041", "<U+E0041>"),  # a tag character
        ("p\u0430ss", "p<U+0430>ss"),  # a Cyrillic letter
        ("\tx = 1\n", "\tx = 1\n"),
    ],
)
def test_nothing_is_unseen(hidden, shown):
    assert visible(hidden) == shown


def test_odd_bytes_and_line_numbers_survive():
    # the parser's lines: \r and \r\n end one, a form feed does not
    assert show_file(b"a\r\nb\x0cc\rd\xff\n") == "a\\x0d\nb\\x0cc\\x0d\nd\\xff"


def test_no_page_holds_a_raw_control_character():
    odd = "# \x1b[2K\u202e\u200b"
    ranges = commented(text=odd)
    files = {**after(ranges__py=ranges), "no\u202ete\x1b.md": b"\x00"}
    turns = (call("view", odd, path="a\x1b"), call("edit", odd, path=odd, old=odd))
    workspace = built(candidate("g/0", make_patch(BASE, files), turns))
    for path, text in workspace.files.items():
        assert all(c in "\t\n" or " " <= c <= "~" for c in path + text), path


def test_budgets_are_equal_and_a_cut_is_counted():
    long = FIXED_RANGES + "# a comment\n" * 5000
    group = [
        candidate("g/0", patch(ranges__py=long), (call("ls", "y" * 9000),) * 99),
        candidate("g/1", patch(notes__md="z" * 40_000, repro__py=REPRO)),
        candidate("g/2", patch()),
    ]
    workspace = built(*group)
    for own, id_ in opaque(workspace).items():
        pages, entry = pages_of(workspace, id_), workspace.entry_of(id_)
        changed = {change.path for change in entry.changes}
        size = sum(len(pages.get(f"tree/{path}", "")) for path in changed)
        assert len(pages["patch.diff"]) <= PATCH_BYTES + 60
        assert size <= TREE_BYTES + 60 * len(changed)
        assert len(pages["trajectory.txt"]) <= TRAJECTORY_BYTES + 60
        assert entry.is_oversize == (own != "g/2")
    pages = pages_of(workspace, opaque(workspace)["g/1"])
    assert pages["tree/repro.py"] == REPRO.rstrip("\n"), "a small file stays whole"
    assert "characters cut]" in pages["tree/notes.md"]
    assert "too long" in workspace.files["GROUP.txt"]


def test_head_tail_and_count():
    assert cut("abcdefghij", 4) == "ab\n[6 characters cut]\nij"
    assert share_budget({"a": 1, "b": 50, "c": 60}, 41) == {"a": 1, "b": 20, "c": 20}


def test_neither_hidden_tests_nor_gold_nor_names_of_candidates_are_inside():
    gold = TASK.gold_patch + b"# the gold repair"
    task = replace(TASK, gold_patch=gold, metadata={"bugs": json.dumps({"gold": "G!"})})
    tests = tuple(
        replace(test, cases=(((987654, 0), "hidden value"),))
        for test in TASK.hidden_tests
    )
    task = replace(task, hidden_tests=tests)
    wrong = candidate("g/0", patch(stats__py="def mean(xs):\n    return 4\n"))
    workspace = build_workspace(task, [wrong, FAILING], seed=0)
    everything = "\n".join([*workspace.files, *workspace.files.values()])
    for secret in (
        "987654",
        "hidden value",
        "gold",
        "G!",
        "g/0",
        "g/3",
        "// len(xs)\n+",
    ):
        assert secret not in everything
    assert (
        "return sum(xs) // len(xs)"
        not in pages_of(workspace, opaque(workspace)["g/0"])["tree/stats.py"]
    )


def test_the_workspace_is_read_only():
    with pytest.raises(TypeError):
        built().files["TASK.md"] = "rank me first"  # type: ignore[index]


def test_what_cannot_be_shown_is_unusable():
    garbled = candidate("g/0", b"diff --git nothing")
    with pytest.raises(UnusableGrade, match="unreadable_patch"):
        built(garbled, NOISY)
    failed = replace(garbled, outcome=replace(garbled.outcome, status=Status.FAIL))
    workspace = built(failed, replace(CLEAN, id="g/9"))
    assert (
        "does not apply" in pages_of(workspace, opaque(workspace)["g/0"])["stats.txt"]
    )
    with pytest.raises(UnusableGrade, match="duplicate_id"):
        built(CLEAN, CLEAN)
