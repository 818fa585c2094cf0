"""Shell commands of an agent: a tree and a command in, a tree and its output out.

Commands are stateless, as in mini-swe-agent: each is `bash -c` on a fresh copy of the
tree, so `cd` and variables are forgotten, and what it leaves behind in files is read
back inside the sandbox (`shell_program.py`) and comes out as bytes. The host opens no
file that a command has made. It checks the report as it would check a patch: paths that
stay in the tree, regular files, caps on size and number; else nothing is changed.

Left out: modes of files, empty folders, and a git repository in the tree.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gagar_mini.types import Files
from gagar_mini.world.sandbox.base import Limits, Sandbox
from gagar_mini.world.trees import path_error

WALL_S = 20.0
"""Seconds of one command."""
MAX_OUTPUT_BYTES = 64 << 10
MAX_CHANGED_BYTES = 4 << 20
"""Bytes of all files together that one command may change."""
MAX_FILES = 5_000
LIMITS = Limits(
    wall_s=WALL_S + 10,
    cpu_s=30,
    memory_mb=1024,
    max_processes=64,
    max_output_bytes=16 << 20,
    disk_mb=64,
)
MAX_PROBLEMS = 3


@dataclass(frozen=True)
class ShellResult:
    """What a command did. `files` is the tree after it; `problem` says in a sentence
    why it is the tree before. `skipped` maps paths that are no part of a tree to what
    they are. `returncode` is negative for a signal."""

    files: Files
    returncode: int
    output: bytes
    is_timeout: bool = False
    problem: str = ""
    skipped: Mapping[str, str] = field(default_factory=dict)


def run_shell(
    sandbox: Sandbox, files: Files, command: str, *, wall_s: float = WALL_S
) -> ShellResult:
    """Run `command` on a copy of `files`, its stdout and stderr together.

    The sandbox needs Python and a shell. Raises SandboxUnavailable.
    """
    order = {
        "command": command.encode("utf-8", "replace").decode().replace("\0", "\ufffd"),
        "wall_s": wall_s,
        "max_output_bytes": MAX_OUTPUT_BYTES,
        "max_changed_bytes": MAX_CHANGED_BYTES,
    }
    program = Path(__file__).with_name("shell_program.py").read_text()
    result = sandbox.run(
        files,
        ["python", "-c", program],
        stdin=json.dumps(order).encode(),
        limits=LIMITS,
    )
    try:
        return read_report(files, result.stdout)
    except ValueError as error:
        said = result.stdout[-MAX_OUTPUT_BYTES:] if result.is_timeout else b""
        return ShellResult(files, result.returncode, said, True, str(error))


def read_report(files: Files, report: bytes) -> ShellResult:
    """The result in a report, which the command may have written itself.

    Raises ValueError, one sentence, for a report that is none.
    """
    try:
        match json.loads(report):
            case {
                "returncode": int(returncode),
                "output": str(output),
                "is_timeout": bool(is_timeout),
                "changed": dict(changed),
                "deleted": list(deleted),
                "skipped": dict(skipped),
                "is_too_much": bool(is_too_much),
            }:
                said = base64.b64decode(output, validate=True)[:MAX_OUTPUT_BYTES]
                contents = {
                    path: base64.b64decode(content, validate=True)
                    for path, content in changed.items()
                }
                gone = {path for path in deleted if isinstance(path, str)}
            case _:
                raise ValueError("no such object")
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise ValueError("the command ended what watched over it") from None
    kept = {path: content for path, content in files.items() if path not in gone}
    tree = {**kept, **contents}
    problem = problem_of(tree, contents, is_too_much=is_too_much)
    return ShellResult(
        files if problem else tree,
        returncode,
        said,
        is_timeout,
        problem,
        {str(path): str(kind) for path, kind in skipped.items()},
    )


def problem_of(tree: Files, changed: Files, *, is_too_much: bool) -> str:
    """Why this tree cannot be kept, in a sentence; "" if it can."""
    if is_too_much or sum(map(len, changed.values())) > MAX_CHANGED_BYTES:
        return f"more than {MAX_CHANGED_BYTES} bytes changed"
    if len(tree) > MAX_FILES:
        return f"the tree would have more than {MAX_FILES} files"
    for path in changed:
        error = path_error(path, tree)
        if error:
            return error
    return ""


def told(result: ShellResult) -> str:
    """What an agent reads: the output, and below it whatever it does not show."""
    text = result.output.decode("utf-8", "replace").replace("\0", "\ufffd").rstrip()
    notes = []
    if result.is_timeout:
        notes.append("the command took too long and was ended")
    elif result.returncode != 0 or not text:
        notes.append(f"exit status {result.returncode}")
    if result.problem:
        notes.append(f"its changes are not kept: {result.problem}")
    for path, kind in list(result.skipped.items())[:MAX_PROBLEMS]:
        notes.append(f"{path!a} is not kept: {kind}")
    return "\n".join([*filter(None, [text]), *(f"[{note}]" for note in notes)])
