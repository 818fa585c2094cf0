"""Which paths a tree in memory may hold, so that a file system can hold it, too."""

from gagar_mini.types import Files

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024


def path_error(path: str, files: Files) -> str:
    """Why `path` cannot lie in a tree with these files, as a sentence; "" if it can.

    A path is relative, stays in the tree, names no git internals, and no part of it is
    a file and a folder at once.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.lower() == ".git" for part in parts):
        return f"{path!r} is no path inside the tree"
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    is_long = max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(sizes) > MAX_PATH_BYTES
    if "\0" in path or is_long:
        return f"{path[:40]!r} is no name that a file can have"
    for depth in range(1, len(parts)):
        folder = "/".join(parts[:depth])
        if folder in files:
            return f"{folder} is a file, so {path} cannot lie in it"
    if any(other.startswith(path + "/") for other in files):
        return f"{path} is a folder"
    return ""
