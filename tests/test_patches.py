"""Patches are bytes: made and applied, every kind of file comes out as it went in."""

import pytest

from gagar_mini.world.patches import PatchError, apply_patch, make_patch, tree_hash
from gagar_mini.world.trees import path_error

BASE = {
    "pkg/text.py": b"def f(x):\n    return x\n",
    "no_newline.txt": b"one\ntwo",
    "crlf.txt": b"one\r\ntwo\r\n",
    "latin.txt": "caf\xe9\nbar\n".encode("latin-1"),
    "blob.bin": bytes(range(256)) * 3,
    "empty.txt": b"",
    "spaces.txt": b"trailing  \n\n\t\n",
}
CHANGES = {
    "edited": {"pkg/text.py": b"def f(x):\n    return x + 1\n"},
    "new": {"notes/a b.md": b"hello\n"},
    "new and empty": {"fresh.txt": b""},
    "new without newline": {"fresh.txt": b"x"},
    "newline gained": {"no_newline.txt": b"one\ntwo\n"},
    "newline lost": {"crlf.txt": b"one\r\ntwo"},
    "last line edited": {"no_newline.txt": b"one\nthree"},
    "crlf edited": {"crlf.txt": b"one\r\n2\r\n"},
    "crlf to lf": {"crlf.txt": b"one\ntwo\n"},
    "lone carriage returns": {"crlf.txt": b"one\rtwo\r"},
    "latin-1": {"latin.txt": "caf\xe9\nb\xe4r\n".encode("latin-1")},
    "binary": {"blob.bin": bytes(reversed(range(256)))},
    "new binary": {"other.bin": b"\0\1\2\xff"},
    "emptied": {"pkg/text.py": b""},
    "deleted": {"pkg/text.py": None},
    "renamed": {"pkg/text.py": None, "pkg/words.py": BASE["pkg/text.py"]},
    "file to folder": {"empty.txt": None, "empty.txt/inside": b"x\n"},
    "whitespace": {"spaces.txt": b"trailing \n\n\t \n"},
    "form feed and others": {"pkg/text.py": b"a\x0cb\x1c\n\xc2\x85\n\xe2\x80\xa8c\n"},
    "unicode name": {"\u00fcber.txt": b"x\n", 'q"uote.txt': b"y\n"},
    "lines like headers": {"pkg/text.py": b"-- a/../x\n++ b/x\n"},
    "header lines removed": {"spaces.txt": None, "h": b"--- a/../x\n+++ /etc/x\n@@\n"},
    "attributes": {".gitattributes": b"* text eol=crlf\n*.txt -diff\n"},
    "nothing": {},
}


def changed(base, change):
    tree = {**base, **change}
    return {path: content for path, content in tree.items() if content is not None}


@pytest.mark.parametrize("kind", CHANGES)
def test_round_trip(kind):
    tree = changed(BASE, CHANGES[kind])
    assert apply_patch(BASE, make_patch(BASE, tree)) == tree
    assert apply_patch(tree, make_patch(tree, BASE)) == BASE


def test_attributes_in_the_tree_change_nothing():
    base = {**BASE, ".gitattributes": b"* text=auto eol=lf\n*.bin text\n"}
    tree = {**base, "crlf.txt": b"1\r\ntwo\r\n", "blob.bin": b"\r\n\0\r\n"}
    assert apply_patch(base, make_patch(base, tree)) == tree


def test_equal_trees_give_no_bytes_and_one_hash():
    assert make_patch(BASE, dict(reversed(BASE.items()))) == b""
    assert tree_hash(BASE) == tree_hash(dict(reversed(BASE.items())))
    assert tree_hash({"a": b"bc"}) != tree_hash({"ab": b"c"})


def test_the_patch_is_a_git_diff():
    patch = make_patch({"a.py": b"x = 1\n"}, {"a.py": b"x = 2\n"})
    lines = patch.split(b"\n")
    assert lines[0] == b"diff --git a/a.py b/a.py"
    assert lines[2:] == [b"--- a/a.py", b"+++ b/a.py", b"@@ -1 +1 @@", b"-x = 1",
                         b"+x = 2", b""]  # fmt: skip


def test_a_rename_made_by_git_applies():
    patch = b"diff --git a/old b/new\nsimilarity index 100%\n"
    patch += b"rename from old\nrename to new\n"
    assert apply_patch({"old": b"1\n"}, patch) == {"new": b"1\n"}


def diff(old, new, mode=b"100644", body=b"@@ -0,0 +1 @@\n+x\n"):
    start = b"diff --git %s %s\nnew file mode %s\n--- /dev/null\n+++ %s\n"
    return start % (old, new, mode, new) + body


REFUSED = {
    "absolute": diff(b"a//tmp/x", b"b//tmp/x"),
    "parent": diff(b"a/../x", b"b/../x"),
    "inner parent": diff(b"a/p/../../x", b"b/p/../../x"),
    "git folder": diff(b"a/.git/hooks/x", b"b/.git/hooks/x"),
    "git folder, other case": diff(b"a/.GIT/config", b"b/.GIT/config"),
    "symbolic link": diff(b"a/link", b"b/link", b"120000"),
    "submodule": diff(b"a/sub", b"b/sub", b"160000"),
    "becomes a link": b"diff --git a/f b/f\nold mode 100644\nnew mode 120000\n",
    "garbage": b"this is no diff\n",
    "cut short": diff(b"a/x", b"b/x", body=b"@@ -0,0 +1,2 @@\n+x\n"),
    "unpacks to much": diff(b"a/x", b"b/x").split(b"---")[0]
    + b"GIT binary patch\nliteral 999999999\nzcmV\n\n",
    "too long": b"x" * (1 << 21),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    with pytest.raises(PatchError):
        apply_patch({"f": b"1\n"}, REFUSED[kind])


def test_a_patch_that_does_not_apply_names_the_file():
    patch = make_patch({"a/b.py": b"x = 1\n"}, {"a/b.py": b"x = 2\n"})
    with pytest.raises(PatchError, match=r"a/b\.py"):
        apply_patch({"a/b.py": b"y = 1\n"}, patch)


def test_no_fuzz():
    base = {"f": b"".join(b"%d\n" % n for n in range(20))}
    patch = make_patch(base, {"f": base["f"].replace(b"\n9\n", b"\nnine\n")})
    moved = {"f": base["f"].replace(b"\n11\n", b"\neleven\n")}
    with pytest.raises(PatchError):
        apply_patch(moved, patch)


@pytest.mark.parametrize(
    "path", ["/x", "a/../b", "a//b", ".", "", "a/.Git/x", "f/inside", "d", "x" * 256,
             "\u00e9" * 128, "a\0b"]
)  # fmt: skip
def test_a_path_that_no_file_system_could_hold(path):
    files = {"f": b"1", "d/e": b"2"}
    assert path_error(path, files)
    with pytest.raises(PatchError):
        make_patch(files, {**files, path: b"x"})


def test_plain_paths_are_fine():
    files = {"f": b"1", "d/e": b"2"}
    assert [path_error(path, files) for path in ("f", "d/e", "d/x y", ".github/x")] == [
        "", "", "", ""
    ]  # fmt: skip
