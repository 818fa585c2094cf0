"""Programs as plain subprocesses in a temporary folder. THIS ISOLATES NOTHING.

The program runs as you, sees your files and your network, and a process that leaves its
session survives. It exists for machines where bubblewrap cannot run, must be asked for
by name, and is fit for code that you would run yourself. `max_processes` is not
enforced (the count would be your own), nor is `disk_mb` for the tree as a whole (only
for each file).
"""

import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gagar_mini.types import Files, SandboxUnavailable
from gagar_mini.world.sandbox.base import (
    ENVIRONMENT,
    Limits,
    Output,
    RunResult,
    check_request,
    find_interpreter,
    is_out_of_time,
)

LIMIT_AND_EXECUTE = """
ulimit -c 0 2>/dev/null
ulimit -H -t "$(($1 + 1))" 2>/dev/null; ulimit -S -t "$1" 2>/dev/null
ulimit -v "$2" 2>/dev/null; ulimit -f "$3" 2>/dev/null
shift 3; exec "$@"
"""


class UnsafeLocalSandbox:
    """The contract of `Sandbox`, kept by a well-meaning program and by no other."""

    name = "unsafe-local"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_closed = False

    def run(
        self,
        files: Files,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits = Limits(),
    ) -> RunResult:
        """See `Sandbox.run`; the module says what is not kept."""
        check_request(files, argv, limits)
        with tempfile.TemporaryDirectory(prefix="gagar-") as folder:
            tree = Path(folder) / "w"
            tree.mkdir()
            write_files(tree, files)
            given = Path(folder) / "stdin"
            given.write_bytes(stdin)
            return self._run_in(tree, given, argv, limits)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for process in self._running:
                kill_session(process)

    def _run_in(
        self, tree: Path, given: Path, argv: Sequence[str], limits: Limits
    ) -> RunResult:
        started = time.monotonic()
        with given.open("rb") as stdin:
            process = self._start(command_line(argv, limits), tree, stdin.fileno())
        outputs = [
            Output(pipe.fileno(), limits.max_output_bytes)
            for pipe in (process.stdout, process.stderr)
        ]
        try:
            is_timeout = follow(process, outputs, started + limits.wall_s)
        finally:
            kill_session(process)
            process.wait()
            with self._lock:
                self._running.discard(process)
        for output in outputs:
            output.drain()
        process.stdout.close()
        process.stderr.close()
        return RunResult(
            process.returncode,
            *(bytes(output.content) for output in outputs),
            is_timeout=is_timeout or is_out_of_time(process.returncode),
            is_truncated=any(output.is_truncated for output in outputs),
            duration_s=time.monotonic() - started,
        )

    def _start(
        self, command: Sequence[str], tree: Path, stdin: int
    ) -> subprocess.Popen[bytes]:
        scratch = {"HOME": str(tree.parent), "TMPDIR": str(tree.parent)}
        with self._lock:
            if self._is_closed:
                raise SandboxUnavailable("this sandbox is closed")
            process = subprocess.Popen(
                command,
                cwd=tree,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, **scratch, "PYTHONPATH": str(tree)},
                start_new_session=True,
            )
            self._running.add(process)
        for pipe in (process.stdout, process.stderr):
            os.set_blocking(pipe.fileno(), False)
        return process


def command_line(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command under a shell that sets the limits. `python` is the base
    interpreter."""
    command = list(argv)
    if command[0] == "python":
        command[:1] = [str(find_interpreter()), "-P", "-s", "-B"]
    memory_kb, file_blocks = limits.memory_mb * 1024, limits.disk_mb * 2048
    caps = [str(limits.cpu_s), str(memory_kb), str(file_blocks)]
    return ["/bin/sh", "-c", LIMIT_AND_EXECUTE, "sh", *caps, *command]


def follow(
    process: subprocess.Popen[bytes], outputs: Sequence[Output], deadline: float
) -> bool:
    """Read the outputs until the program ends (False) or the deadline comes (True).

    It polls for the end: a background child may hold the pipes open for ever.
    """
    with selectors.DefaultSelector() as selector:
        for output in outputs:
            selector.register(output.descriptor, selectors.EVENT_READ, output)
        while process.poll() is None:
            if time.monotonic() >= deadline:
                return True
            for key, _ in selector.select(0.01):
                if key.data.read() == b"":
                    selector.unregister(key.fd)
                    time.sleep(0.001)
    return False


def kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def write_files(tree: Path, files: Files) -> None:
    for path, content in files.items():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
