"""Patches as bytes, made and applied by plain git in private folders.

`make_patch` and `apply_patch` are inverse: a file without newline at its end, CRLF,
latin-1, binary, new, deleted and empty files all survive. Nothing is decoded, stripped
or rejoined. Modes are no part of a tree: a change of one applies and does nothing. A
rename is written as a deletion and an addition; patches with renames are
understood. Git sees no configuration, no hook and no repository, and nothing is applied
with fuzz.
"""

import hashlib
import os
import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from gagar_mini.types import Files
from gagar_mini.world.trees import path_error

MAX_PATCH_BYTES = 1 << 20
MAX_TREE_BYTES = 8 << 20
GIT_TIMEOUT_S = 60.0
GIT_MEMORY_KB = "1048576"

LINK_OR_MODULE = re.compile(
    rb"^(?:(?:old|new|new file|deleted file) mode|index [0-9a-f]+\.\.[0-9a-f]+)"
    rb" (120000|160000)\r?$",
    re.MULTILINE,
)
"""No line of a hunk matches: it begins with a space, +, - or a backslash, and a line of
binary data holds no space."""
BINARY_SIZE = re.compile(rb"^(?:literal|delta) (\d+)\r?$", re.MULTILINE)


class PatchError(ValueError):
    """A patch that cannot be applied, or may not be: the fault of whoever wrote it."""


def make_patch(base: Files, files: Files) -> bytes:
    """The git diff from `base` to `files`, binary-safe; b"" for equal trees.

    Raises PatchError for a tree that no file system could hold (`trees.path_error`).
    """
    if dict(base) == dict(files):
        return b""
    return _make_patch(_freeze(base), _freeze(files))


def make_text_patch(base: Files, files: Files) -> str:
    """`make_patch` as text that any JSON reader takes and any git applies.

    Where a changed line is no UTF-8, every change is written as git writes binary
    files: in ASCII.
    """
    try:
        return make_patch(base, files).decode()
    except UnicodeDecodeError:
        return _make_patch(_freeze(base), _freeze(files), as_binary=True).decode()


def apply_patch(base: Files, patch: bytes) -> dict[str, bytes]:
    """The tree that `patch` makes of `base`.

    Raises PatchError, one sentence that names the file, for a patch that does not apply
    exactly, and for one with an absolute path, `..`, `.git`, a symbolic link or a
    submodule.
    """
    if not patch:
        return dict(base)
    _check(patch)
    return dict(_apply_patch(_freeze(base), patch))


def tree_hash(files: Files) -> str:
    """sha256 of a tree: equal for equal paths and contents, whatever their order."""
    digest = hashlib.sha256()
    for path, content in sorted(files.items()):
        name = path.encode("utf-8", "surrogateescape")
        digest.update(b"%d %d\n" % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def _check(patch: bytes) -> None:
    """Refuse what git would carry out, or would need too much memory for."""
    if len(patch) > MAX_PATCH_BYTES:
        raise PatchError(
            f"the patch has {len(patch)} bytes, more than {MAX_PATCH_BYTES}"
        )
    found = LINK_OR_MODULE.search(patch)
    if found:
        kind = "a symbolic link" if found[1] == b"120000" else "a submodule"
        raise PatchError(f"the patch contains {kind}, which is not allowed")
    if sum(int(size) for size in BINARY_SIZE.findall(patch)) > MAX_TREE_BYTES:
        raise PatchError(f"the patch unpacks to more than {MAX_TREE_BYTES} bytes")


@lru_cache(maxsize=256)
def _make_patch(
    base: tuple[tuple[str, bytes], ...],
    files: tuple[tuple[str, bytes], ...],
    *,
    as_binary: bool = False,
) -> bytes:
    with tempfile.TemporaryDirectory(prefix="gagar-") as folder:
        _write(Path(folder) / "a", base)
        _write(Path(folder) / "b", files)
        # the folders are named like git's own prefixes, which are therefore left out
        options = ["--no-prefix", "--binary", "--full-index", "--no-renames"]
        options += ["--no-color", "--no-ext-diff", "--no-textconv", "--no-index"]
        if as_binary:
            attributes = Path(folder) / "attributes"
            attributes.write_text("* -diff\n")
            settings = ["-c", f"core.attributesFile={attributes}"]
        else:
            settings = []
        done = _git([*settings, "diff", *options, "a", "b"], folder)
    assert done.returncode == 1, done.stderr
    return done.stdout


@lru_cache(maxsize=512)
def _apply_patch(
    base: tuple[tuple[str, bytes], ...], patch: bytes
) -> tuple[tuple[str, bytes], ...]:
    with tempfile.TemporaryDirectory(prefix="gagar-") as folder:
        tree = Path(folder) / "tree"
        _write(tree, base)
        done = _git(["apply", "--whitespace=nowarn", "-"], str(tree), patch)
        if done.returncode != 0:
            raise PatchError(_reason(done.stderr))
        return _read(tree)


def _git(
    arguments: list[str], folder: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    """Git that finds no configuration, no attributes of the system and no
    repository."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": folder,
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(Path(folder).resolve().parent),
    }
    command = ["git", "-c", "core.autocrlf=false", "-c", "core.safecrlf=false"]
    if b"GIT binary patch" in stdin:
        # a delta says nowhere in clear to what size it unpacks
        command[:0] = ["/bin/sh", "-c", 'ulimit -v "$0"; exec "$@"', GIT_MEMORY_KB]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        input=stdin,
        env=environment,
        capture_output=True,
        timeout=GIT_TIMEOUT_S,
    )


def _reason(stderr: bytes) -> str:
    """Git's first complaint as a sentence; it names the file."""
    lines = stderr.decode("utf-8", "replace").splitlines()
    complaint = next((line for line in lines if line.startswith("error:")), "")
    said = complaint.removeprefix("error:").strip()
    if not said or said.startswith("No valid patches"):
        said = "it is not a git diff"
    return f"the patch does not apply: {said}"


def _write(root: Path, items: tuple[tuple[str, bytes], ...]) -> None:
    root.mkdir()
    for path, content in items:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _read(root: Path) -> tuple[tuple[str, bytes], ...]:
    """Every regular file below `root`; what else lies there is an error."""
    items, size = [], 0
    for path in sorted(root.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(root).as_posix()
        if path.is_symlink() or not path.is_file():
            raise PatchError(f"{name} is not a regular file")
        size += path.stat().st_size
        if size > MAX_TREE_BYTES:
            raise PatchError(f"the tree grows beyond {MAX_TREE_BYTES} bytes")
        items.append((name, path.read_bytes()))
    return tuple(items)


def _freeze(files: Files) -> tuple[tuple[str, bytes], ...]:
    for path in files:
        error = path_error(path, files)
        if error:
            raise PatchError(error)
    return tuple(sorted(files.items()))
