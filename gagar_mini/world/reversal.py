"""The patch that undoes a patch, from its bytes alone: no tree is needed.

A task set whose patch *is* the bug (SWE-smith) gives its repair this way. Git's own
`apply -R` would need the tree that the repair starts from.
"""

import re
from collections.abc import Iterator

from gagar_mini.world.patches import PatchError

FILE = re.compile(rb"(?m)^(?=diff --git )")
LINE = re.compile(rb"[^\n]*\n|[^\n]+")
"""A line ends with a line feed; a carriage return is content."""
HUNK = re.compile(rb"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)", re.DOTALL)
INDEX = re.compile(rb"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*)", re.DOTALL)
SWAPPED = {
    b"old mode ": b"new mode ",
    b"new mode ": b"old mode ",
    b"new file mode ": b"deleted file mode ",
    b"deleted file mode ": b"new file mode ",
    b"rename from ": b"rename to ",
    b"rename to ": b"rename from ",
}
PAIRS = (b"old mode ", b"rename from ", b"--- ")
"""What comes first of two header lines that belong together."""


def reverse_patch(patch: bytes) -> bytes:
    """The git patch from the tree that `patch` makes back to the one it starts from.

    Reversing twice gives the same change. Raises PatchError for a patch that is no git
    diff, and for a copy or a one-way binary change, which do not say what was there.
    """
    if not patch:
        return b""
    if not patch.startswith(b"diff --git "):
        raise PatchError("the patch does not begin like a git diff")
    return b"".join(_reverse_file(part) for part in FILE.split(patch) if part)


def _reverse_file(part: bytes) -> bytes:
    """One file's change; a hunk line never begins with "diff --git "."""
    lines = LINE.findall(part)
    header = list(_header(lines))
    rest = lines[len(header) :]
    if any(line.startswith((b"copy from ", b"copy to ")) for line in header):
        raise PatchError("a patch that copies a file cannot be reversed")
    reversed_header = b"".join(_reverse_header(header))
    if rest and rest[0].startswith(b"GIT binary patch"):
        return reversed_header + _reverse_binary(rest)
    return reversed_header + b"".join(_reverse_hunks(rest))


def _header(lines: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        if line.startswith((b"@@ ", b"GIT binary patch")):
            return
        yield line


def _reverse_header(header: list[bytes]) -> Iterator[bytes]:
    """Each line turned round; of two that belong together the second comes first."""
    names = _renamed(header)
    turned = [_turn(line, names) for line in header]
    position = 0
    while position < len(turned):
        pair = turned[position : position + 2]
        if len(pair) == 2 and pair[1].startswith(PAIRS):
            pair.reverse()
        else:
            pair = pair[:1]
        yield from pair
        position += len(pair)


def _renamed(header: list[bytes]) -> tuple[bytes, bytes] | None:
    found = [line for line in header if line.startswith((b"rename from", b"rename to"))]
    if len(found) != 2:
        return None
    return found[0][len(b"rename from ") :], found[1][len(b"rename to ") :]


def _turn(line: bytes, names: tuple[bytes, bytes] | None) -> bytes:
    if line.startswith(b"diff --git ") and names:
        old, new = names
        return b"diff --git %s %s" % (_prefixed(new, b"a/")[:-1], _prefixed(old, b"b/"))
    if line.startswith((b"--- ", b"+++ ")):
        return _turn_name(line)
    index = INDEX.fullmatch(line)
    if index:
        return b"index %s..%s%s" % (index[2], index[1], index[3])
    for start, swapped in SWAPPED.items():
        if line.startswith(start):
            return swapped + line[len(start) :]
    return line


def _prefixed(name: bytes, prefix: bytes) -> bytes:
    """A name as the first line of a diff writes it; git quotes an unusual one."""
    return b'"' + prefix + name[1:] if name.startswith(b'"') else prefix + name


def _turn_name(line: bytes) -> bytes:
    sign, name = (b"+++ ", line[4:]) if line[0] == ord("-") else (b"--- ", line[4:])
    old, new = (b"a/", b"b/") if sign == b"+++ " else (b"b/", b"a/")
    for quote in (b"", b'"'):
        if name.startswith(quote + old):
            return sign + quote + new + name[len(quote + old) :]
    return sign + name


def _reverse_hunks(lines: list[bytes]) -> Iterator[bytes]:
    removed: list[bytes] = []  # of one block of changes, already turned round
    added: list[bytes] = []
    last = added
    for line in lines:
        hunk = HUNK.fullmatch(line)
        sign = line[:1]
        if sign == b"+":
            last = removed
            removed.append(b"-" + line[1:])
        elif sign == b"-":
            last = added
            added.append(b"+" + line[1:])
        elif sign == b"\\" and (removed or added):
            last.append(line)  # "No newline at end of file" says it of the line above
        else:
            yield from removed + added
            removed.clear()
            added.clear()
            yield b"@@ -%s +%s @@%s" % (hunk[3], hunk[1], hunk[5]) if hunk else line
    yield from removed + added


def _reverse_binary(lines: list[bytes]) -> bytes:
    """A git binary patch holds both directions: the second block becomes the first."""
    starts = [
        number
        for number, line in enumerate(lines)
        if line.startswith((b"literal ", b"delta "))
    ]
    if len(starts) != 2:
        raise PatchError("a binary change that says one direction cannot be reversed")
    first, second = lines[starts[0] : starts[1]], lines[starts[1] :]
    return b"".join([lines[0], *second, *first])
