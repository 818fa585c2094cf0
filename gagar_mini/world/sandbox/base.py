"""What a sandbox promises, whichever backend runs it.

A sandbox takes a small tree and a command, runs the command where it can see that tree, a
read-only system and nothing else, and reports what happened. A program that fails, hangs or
floods its output is data in the result. A harness that fails raises `SandboxUnavailable`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gagar_mini.types import Files


@dataclass(frozen=True)
class Limits:
    """Limits of one run. `cpu_s` is per process, `memory_mb` is address space per process,
    `max_output_bytes` holds for stdout and stderr separately, `disk_mb` for the whole tree."""

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

        `argv[0]` "python" is the sandbox's own interpreter (a warm one where the backend
        keeps one); anything else is looked up on the sandbox's PATH. Nothing that the run
        starts or writes outlives it. Raises SandboxUnavailable.
        """
        ...

    def close(self) -> None: ...
