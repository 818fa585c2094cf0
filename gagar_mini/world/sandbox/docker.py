"""Untrusted programs in containers: for real repositories, with an image of your own.

A container has no network, no capability, a read-only system, limits of memory,
processes and processor, and two places to write to (its working directory /w and /tmp),
each a tmpfs of limited size. Programs run as user 65534. Process 1 does nothing, and
belongs to a root that has no capability either: so no program can end its container and
have the harness look broken.

A run has a container of its own, removed when it ends, so the time of a verification is
that of starting one. The runs of one agent share one (`episode`): before each, every
process of the last one is killed and every file deleted.

Nothing stays behind: a container carries the name of the process that asked for it, is
removed by label in `close`, at exit, and by the next sandbox once that process is gone,
and ends by itself after `MAX_LIFE_S`.

What it does not stop: a hole in the kernel or the engine. An exit status of 129 to 192
is read as a signal, since a shell reports both in one number.
"""

import atexit
import io
import os
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress

from gagar_mini.types import Files, SandboxUnavailable
from gagar_mini.world.sandbox.base import (
    ENVIRONMENT,
    Limits,
    Output,
    RunResult,
    check_request,
    is_out_of_time,
)
from gagar_mini.world.sandbox.bubblewrap import library_path
from gagar_mini.world.sandbox.docker_engine import (
    LABEL,
    OWNER,
    DockerEngine,
    is_gone,
    this_process,
)

NOBODY = "65534:65534"
MAX_LIFE_S = 6 * 3600
START_S = 60.0
GRACE_S = 10.0
"""Seconds that a program has to be started, and to report after its time is up."""
OVERHEAD_MB = 32
OVERHEAD_PROCESSES = 6
"""Of process 1, its init, the shell and `timeout`; counted with the program's."""
SIGNALS = range(129, 193)
"""Exit statuses of a shell for a program that a signal ended: 128 + its number."""
TIMED_OUT = 168
"""The script's exit status for a program whose time was up: a real-time signal's, which
nothing else sends."""
READY = b"\n"
"""What the script writes before it starts the program: without it, the harness
failed."""

RUN = """
wall=$1 least=$2 cpu=$3 memory=$4 disk=$5; shift 5
now() { read -r t rest < /proc/uptime; t=${t%.*}${t#*.}; }
exec 4>&2 2> /dev/null
kill -9 -1
chmod -R u+rwx /w /tmp /dev/shm
find /w /tmp /dev/shm -mindepth 1 -delete
errors=$(tar -xf - -C / 2>&1) && cd /w && exec 3< /tmp/.stdin && rm /tmp/.stdin \\
    || { echo "$errors" >&4; exit 1; }
now; started=$t
echo
(
    ulimit -c 0; ulimit -H -t $((cpu + 1)); ulimit -S -t "$cpu"
    ulimit -v "$memory"; ulimit -f "$disk"
    exec timeout -s KILL "$wall" "$@" <&3 3<&- 2>&4 4>&-
)
code=$?
now
[ $code = 137 ] && [ $((t - started)) -ge $least ] && code=TIMED_OUT
kill -9 -1
exit $code
""".replace("TIMED_OUT", str(TIMED_OUT))
"""One run, as the program's own user: `kill -9 -1` ends all that an earlier run, or
this one, left behind, and only that. `timeout` is the clock; the host's is a second.
After the program, nothing forks: it may have taken all processes that are allowed."""


class DockerSandbox:
    """Containers of one image: "" is the one built from local files.

    Raises SandboxUnavailable, in a sentence, where no engine or no such image is.
    """

    name = "docker"

    def __init__(self, image: str = "", max_workers: int | None = None):
        self._engine = DockerEngine()
        self._id = uuid.uuid4().hex
        self._is_closed = False
        self._slots = threading.BoundedSemaphore(
            max_workers or 2 * (os.cpu_count() or 1)
        )
        remove_orphans(self._engine)
        self._image = self._engine.ensure_image(image)
        self._environment = environment(has_own_path=bool(image))
        atexit.register(self.close)

    def run(
        self,
        files: Files,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits = Limits(),
    ) -> RunResult:
        """See `Sandbox.run`: a new container, removed at the end."""
        with self.episode() as room:
            return room.run(files, argv, stdin=stdin, limits=limits)

    @contextmanager
    def episode(self) -> Iterator["Room"]:
        """A sandbox whose runs share a container, as long as their limits agree."""
        room = Room(self)
        try:
            yield room
        finally:
            room.close()

    def close(self) -> None:
        """Remove every container of this sandbox, whatever runs in it."""
        atexit.unregister(self.close)
        self._is_closed = True
        with suppress(SandboxUnavailable):
            for container, _, _ in self._engine.containers(f"{LABEL}={self._id}"):
                self._engine.remove(container)
        self._engine.close()

    def start_container(self, walls: Mapping[str, object]) -> str:
        """The name of a new container, running, in which nothing is going on."""
        if self._is_closed:
            raise SandboxUnavailable("this sandbox is closed")
        name = f"gagar-mini-{uuid.uuid4().hex}"
        try:
            self._engine.create(
                name,
                self._image,
                walls,
                entrypoint=["sleep"],
                command=[str(MAX_LIFE_S)],
                user="0:0",
                working_dir="/w",
                labels={LABEL: self._id, OWNER: this_process()},
            )
            self._engine.start(name)
            if self._is_closed:  # its `close` may not have seen this one
                raise SandboxUnavailable("this sandbox is closed")
        except BaseException:
            # an interrupt may have come after the engine began: it is known by name
            with suppress(SandboxUnavailable):
                self._engine.remove(name)
            raise
        return name


class Room:
    """A container for one run after another; started when it is first needed."""

    name = "docker"

    def __init__(self, sandbox: DockerSandbox):
        self._sandbox = sandbox
        self._container = ""
        self._walls: Mapping[str, object] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def run(
        self,
        files: Files,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits = Limits(),
    ) -> RunResult:
        """See `Sandbox.run`. A container that is gone is replaced once, then the error
        is raised."""
        check_request(files, argv, limits)
        with self._lock, self._sandbox._slots:
            try:
                return self._run_once(files, argv, stdin, limits)
            except SandboxUnavailable:
                self._drop()
                return self._run_once(files, argv, stdin, limits)
            except BaseException:
                self._drop()
                raise

    def close(self) -> None:
        """Remove the container, and with it what runs there."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        container, self._container = self._container, ""
        if container:
            with suppress(SandboxUnavailable):
                self._sandbox._engine.remove(container)

    def _run_once(
        self, files: Files, argv: Sequence[str], stdin: bytes, limits: Limits
    ) -> RunResult:
        started = time.monotonic()
        walls = host_config(limits)
        if walls != self._walls:
            self._drop()
        if not self._container and not self._is_closed:
            self._container = self._sandbox.start_container(walls)
            self._walls = walls
        if self._is_closed:
            self._drop()
            raise SandboxUnavailable("this episode is over")
        cap = limits.max_output_bytes
        outputs = Output(-1, cap + len(READY)), Output(-1, cap)
        code = self._follow(pack(files, stdin), argv, limits, outputs)
        is_timeout = code == TIMED_OUT
        returncode = -9 if is_timeout else -(code - 128) if code in SIGNALS else code
        if returncode < 0:
            self._drop()  # what was killed may have left something behind
        out, err = (bytes(output.content) for output in outputs)
        return RunResult(
            returncode,
            out[len(READY) :],
            err,
            is_timeout=is_timeout or is_out_of_time(returncode),
            is_truncated=any(output.is_truncated for output in outputs),
            duration_s=time.monotonic() - started,
        )

    def _follow(
        self,
        given: bytes,
        argv: Sequence[str],
        limits: Limits,
        outputs: tuple[Output, Output],
    ) -> int:
        """The exit status as the shell has it."""
        engine = self._sandbox._engine
        command = command_line(argv, limits)
        execution = engine.execute(
            self._container, command, self._sandbox._environment, NOBODY
        )
        with closing(execution):
            has_ended = execution.talk(
                given, outputs, start_s=START_S, run_s=limits.wall_s + GRACE_S
            )
        if not outputs[0].content.startswith(READY):
            said = bytes(outputs[1].content or outputs[0].content)[-500:]
            raise SandboxUnavailable(
                f"the container starts no program: {said.decode(errors='replace')}"
            )
        return engine.exit_code(execution, self._container) if has_ended else TIMED_OUT


def command_line(argv: Sequence[str], limits: Limits) -> list[str]:
    """The command inside the script that prepares, limits and ends it.

    `environment` makes an interpreter do what these options of Python say, and find the
    files of the working directory all the same.
    """
    command = list(argv)
    if command[0] == "python":
        while command[1:2] and command[1] in ("-I", "-B", "-E", "-s", "-P"):
            del command[1]
    least = int(limits.wall_s * 100) - 2  # the clock's hundredths are cut
    caps = [f"{limits.wall_s:g}", least, limits.cpu_s]
    caps += [limits.memory_mb << 10, limits.disk_mb << 11]
    return ["sh", "-c", RUN, "sh", *map(str, caps), *command]


def pack(files: Files, stdin: bytes) -> bytes:
    """The tar that the script unpacks: the tree, and what the program reads."""
    box = io.BytesIO()
    # of all formats this one writes a name of any bytes as it is
    with tarfile.open(fileobj=box, mode="w", format=tarfile.GNU_FORMAT) as archive:
        named = {f"w/{path}": content for path, content in files.items()}
        for path, content in {**named, "tmp/.stdin": stdin}.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
    return box.getvalue()


def environment(*, has_own_path: bool) -> dict[str, str]:
    """What a program sees; an image of the user's keeps its own PATH."""
    values = {**ENVIRONMENT, "PYTHONPATH": "/w", "PYTHONSAFEPATH": "1"}
    if has_own_path:
        del values["PATH"]
        return values
    return values | library_path()


def host_config(limits: Limits) -> dict[str, object]:
    """The container's walls, for runs with these limits."""
    memory = f"{limits.memory_mb + 2 * limits.disk_mb + OVERHEAD_MB}m"
    room = f"size={limits.disk_mb}m,nr_inodes=16384,mode=700,uid=65534,gid=65534"
    return {
        "network_mode": "none",
        "mem_limit": memory,
        "memswap_limit": memory,
        "pids_limit": limits.max_processes + OVERHEAD_PROCESSES,
        "nano_cpus": 10**9,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "tmpfs": dict.fromkeys(("/w", "/tmp"), f"rw,exec,nosuid,nodev,{room}"),
        "shm_size": 1 << 20,
        "init": True,  # else zombies fill the process limit
        "auto_remove": True,
        "log_config": {"Type": "none"},
    }


def remove_orphans(engine: DockerEngine) -> None:
    """Remove the containers of processes that ended without doing so, and any that is
    older than a container may become."""
    for container, owner, created in engine.containers(OWNER):
        if is_gone(owner) or time.time() - created > MAX_LIFE_S:
            engine.remove(container)
