"""What a sandbox promises, whichever backend runs it.

A sandbox takes a small tree and a command, runs the command where it can see that tree,
a read-only system and nothing else, and reports what happened. A program that fails,
hangs or floods its output is data in the result. A harness that fails raises
`SandboxUnavailable`.
"""

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from gagar_mini.types import Files
from gagar_mini.world.trees import path_error

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONNOUSERSITE": "1",
    # the order of a set must not differ from one verification to the next
    "PYTHONHASHSEED": "0",
}
"""All that a program sees of an environment: nothing of the host's is inherited."""


@dataclass(frozen=True)
class Limits:
    """Limits of one run. `cpu_s` is per process, `memory_mb` is address space per
    process, `max_output_bytes` holds for stdout and stderr separately, `disk_mb` for
    the whole tree."""

    wall_s: float = 5.0
    cpu_s: int = 4
    memory_mb: int = 512
    max_processes: int = 32
    max_output_bytes: int = 65_536
    disk_mb: int = 32


@dataclass(frozen=True)
class RunResult:
    """What the program did. `returncode` is negative for a signal, as in subprocess;
    output beyond the cap is dropped and `is_truncated` says so."""

    returncode: int
    stdout: bytes
    stderr: bytes
    is_timeout: bool
    is_truncated: bool
    duration_s: float


@runtime_checkable
class Sandbox(Protocol):
    """Runs untrusted programs. Thread-safe; `close` ends every process it started."""

    name: str

    def run(
        self,
        files: Files,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits = Limits(),
    ) -> RunResult:
        """Run `argv` with a fresh copy of `files` as its working directory.

        `argv[0]` "python" is the sandbox's own interpreter (a warm one where the
        backend keeps one); anything else is looked up on the sandbox's PATH. Nothing
        that the run starts or writes outlives it. Raises SandboxUnavailable.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class HasEpisodes(Protocol):
    """A backend in which it pays to keep a room for the many runs of one agent."""

    def episode(self) -> AbstractContextManager[Sandbox]: ...


def episode(sandbox: Sandbox) -> AbstractContextManager[Sandbox]:
    """Where one agent works, ended before its patch is verified.

    The promise of a run stays: it begins with the given tree and nothing else.
    """
    if isinstance(sandbox, HasEpisodes):
        return sandbox.episode()
    return nullcontext(sandbox)


class Output:
    """What comes out of a pipe, up to a cap; the rest is read and dropped, so that a
    program which floods its output is neither blocked nor stored. The pipe does not
    block."""

    def __init__(self, descriptor: int, max_bytes: int):
        self.descriptor = descriptor
        self.content = bytearray()
        self.is_truncated = False
        self._max_bytes = max_bytes

    def read(self) -> bytes | None:
        """One read: what it gave, b"" at the end, None when nothing is there now."""
        try:
            chunk = os.read(self.descriptor, 65_536)
        except BlockingIOError:
            return None
        self.add(chunk)
        return chunk

    def add(self, chunk: bytes) -> None:
        room = self._max_bytes - len(self.content)
        self.content += chunk[:room]
        self.is_truncated |= len(chunk) > room

    def drain(self) -> None:
        """Read what is there now. Never waits: some other process may hold the pipe."""
        while self.read():
            pass


def is_out_of_time(returncode: int) -> bool:
    """Whether the limit of processor time ended the program."""
    return returncode == -signal.SIGXCPU


def check_request(files: Files, argv: Sequence[str], limits: Limits) -> None:
    """Raise ValueError for what no backend can run: the caller's mistake."""
    if not argv:
        raise ValueError("argv is empty: there is no command to run")
    for path in files:
        error = path_error(path, files)
        if error:
            raise ValueError(error)
    size_mb = sum(map(len, files.values())) / 2**20
    if size_mb > limits.disk_mb:
        raise ValueError(f"the tree has {size_mb:.0f} MB, disk_mb is {limits.disk_mb}")


def find_interpreter() -> Path:
    """The interpreter itself, not the virtual environment around it: what runs in a
    sandbox sees the standard library and no installed package."""
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()
