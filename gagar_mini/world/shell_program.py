"""The program that runs an agent's shell command, inside the sandbox.

Standard library only, and trusted with nothing: the command may end it or write its
report, and so have any tree it likes, which it could have anyway. It reads an order on
stdin, runs the command with the output cut at a limit, and writes one JSON object: the
output, the exit status, and the files that differ. What is no regular file with one
name, and what lies in a cache or in .git, is not part of the tree.
"""

import base64
import contextlib
import hashlib
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import time

NOT_OF_THE_TREE = (".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache")
OPEN = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def main():
    order = json.load(sys.stdin)
    before = {path: digest(content) for path, content in read_tree({})}
    returncode, output, is_timeout = run(order)
    skipped, changed, seen = {}, {}, set()
    left = order["max_changed_bytes"]
    for path, content in read_tree(skipped):
        seen.add(path)
        if before.get(path) != digest(content):
            left -= len(content)
            if left < 0:
                break
            changed[path] = base64.b64encode(content).decode()
    report = {
        "returncode": returncode,
        "output": base64.b64encode(output).decode(),
        "is_timeout": is_timeout,
        "changed": changed,
        "deleted": sorted(set(before) - seen),
        "skipped": skipped,
        "is_too_much": left < 0,
    }
    sys.stdout.write(json.dumps(report))


def run(order):
    """(exit status, stdout and stderr together, whether time ran out)."""
    shell = shutil.which("bash") or "sh"
    process = subprocess.Popen(
        [shell, "-c", order["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    pipe = process.stdout.fileno()
    os.set_blocking(pipe, False)
    deadline, output = time.monotonic() + order["wall_s"], b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        # it polls for the end: a background child may hold the pipe open for ever
        while process.poll() is None and time.monotonic() < deadline:
            if selector.select(0.02):
                chunk = read(pipe)
                output = (output + chunk)[: order["max_output_bytes"]]
                if not chunk:
                    time.sleep(0.005)
    is_timeout = process.poll() is None
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    while len(output) < order["max_output_bytes"]:
        chunk = read(pipe)
        if not chunk:
            break
        output = (output + chunk)[: order["max_output_bytes"]]
    return process.wait(), output, is_timeout


def read(pipe):
    try:
        return os.read(pipe, 65536)
    except BlockingIOError:
        return b""


def read_tree(skipped):
    """(path, content) of the tree's files; what it is not of goes to `skipped`."""
    for top, folders, names in os.walk("."):
        folders[:] = sorted(set(folders) - set(NOT_OF_THE_TREE))
        for name in folders:
            if os.path.islink(os.path.join(top, name)):
                skipped[os.path.relpath(os.path.join(top, name))] = "a symbolic link"
        for name in sorted(names):
            path = os.path.relpath(os.path.join(top, name))
            content = read_file(path)
            if isinstance(content, bytes):
                yield path, content
            else:
                skipped[path] = content


def read_file(path):
    """The content of a regular file, or what it is instead."""
    if os.path.islink(path):
        return "a symbolic link"
    try:
        descriptor = os.open(path, OPEN)
    except OSError as error:
        return "not readable: " + str(error.strerror)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return "no regular file"
        if status.st_nlink > 1:
            return "a file with several names"
        return file.read()


def digest(content):
    return hashlib.sha256(content).digest()


if __name__ == "__main__":
    main()
