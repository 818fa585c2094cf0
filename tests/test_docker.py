"""Containers: what a program cannot do in one, and that none is left behind.

What other backends promise, too, is in test_sandbox.py. Every test here needs an
engine: `.ci/with-docker python -m pytest -m docker` starts one.
"""

import ctypes
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox import Limits, open_sandbox
from gagar_mini.world.sandbox.docker import DockerSandbox
from gagar_mini.world.sandbox.docker_engine import LABEL, OWNER, is_gone, this_process

pytestmark = pytest.mark.docker

REPOSITORY = Path(__file__).parents[1]
PATIENT = Limits(wall_s=60.0, cpu_s=30)
PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def episode(docker_sandbox):
    with docker_sandbox.episode() as opened:
        yield opened


def python(sandbox, source, files=None, *, limits=PATIENT):
    return sandbox.run(files or {}, ["python", "-c", source], limits=limits)


def containers_of(sandbox):
    return sandbox._engine.containers(f"{LABEL}={sandbox._id}")


# containment


def test_each_place_that_can_be_written_to_is_small_and_nothing_else_can(episode):
    source = """
import errno, os
for folder in ("/w", "/tmp"):
    total = 0
    for number in range(40):
        try:
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                total += file.write(bytes(1 << 20))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            break
    print(total >> 20)
found = []
for top, folders, names in os.walk("/"):
    if top.startswith(("/proc", "/sys", "/w", "/tmp", "/dev/shm", "/dev/mqueue")):
        continue
    try:
        open(os.path.join(top, "probe"), "w").close()
        found.append(top)
    except OSError:
        pass
print(found)
"""
    result = python(episode, source, limits=replace(PATIENT, disk_mb=4))
    assert result.stdout in (b"3\n3\n[]\n", b"4\n4\n[]\n")


def test_the_host_and_its_packages_cannot_be_seen(episode, tmp_path):
    (tmp_path / "secret").write_text("x")
    paths = [REPOSITORY, tmp_path, Path.home() / ".ssh", Path("/var/run/docker.sock")]
    source = f"""
import os
from importlib.util import find_spec
print([p for p in {list(map(str, paths))!r} if os.path.exists(p)])
print(find_spec("numpy"), find_spec("pytest"), find_spec("gagar_mini"))
"""
    assert python(episode, source).stdout == b"[]\nNone None None\n"


def test_memory_of_all_processes_together_is_limited(episode):
    source = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(100 << 20)
        time.sleep(60)
held = bytearray(100 << 20)
time.sleep(2)
children = 0
try:
    while os.waitpid(-1, os.WNOHANG)[0]:
        children += 1
except ChildProcessError:
    pass
print("killed", children)
"""
    limits = replace(PATIENT, memory_mb=256, disk_mb=4)
    result = python(episode, source, limits=limits)
    assert result.returncode == -9 or int(result.stdout.split()[1]) >= 1


def test_no_program_can_end_its_container_and_look_like_a_broken_harness(episode):
    for source in (
        "import os; os.kill(-1, 9)",
        "import os, signal\nfor n in range(1, 65): \n"
        "    try: os.kill(1, n)\n    except (OSError, ValueError): pass",
        "import ctypes; ctypes.CDLL(None).prlimit(1, 0, (ctypes.c_long * 2)(1, 1), 0)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        "import os; os.symlink('/dev/null', '/tmp/.stdin'); os.chmod('/w', 0)",
        "import os; os.makedirs('/w/a'); os.chmod('/w/a', 0); os.kill(os.getppid(), 9)",
    ):
        python(episode, source, limits=Limits(wall_s=1.0))
        assert python(episode, "print(1)").stdout == b"1\n"


def test_a_run_leaves_nothing_to_the_next_one_of_its_episode(episode):
    source = """
import os, pathlib, subprocess
for folder in ("/w", "/tmp", "/dev/shm"):
    pathlib.Path(folder, "left").write_text("x")
    pathlib.Path(folder, ".hidden").mkdir(mode=0)
subprocess.Popen(["sleep", "60"], start_new_session=True)
"""
    assert python(episode, source, {"own.py": b""}).returncode == 0
    container = episode._container
    look = """
import os
print([os.listdir(folder) for folder in ("/w", "/tmp", "/dev/shm")])
print("sleep\\x0060" in [open(f"/proc/{pid}/cmdline").read().strip("\\0")
      for pid in os.listdir("/proc") if pid.isdigit()])
"""
    assert python(episode, look).stdout == b"[[], [], []]\nFalse\n"
    assert episode._container == container


def test_names_of_any_bytes_survive(episode):
    name = "caf\udce9 \n'$x" + "y" * 120 + "/" + "z" * 120
    result = episode.run({name: b"found"}, ["sh", "-c", "cat */*; printf %s */*"])
    assert result.stdout == b"found" + name.encode("utf-8", "surrogateescape")


def test_what_a_shell_says_of_an_ending(episode):
    """Measured inside: on a busy machine the host sees the beginning late."""
    for code in (0, 3, 124, 127, 128, 193, 255):
        result = python(episode, f"raise SystemExit({code})")
        assert (result.returncode, result.is_timeout) == (code, False)
    ended = python(episode, "import os; os.kill(os.getpid(), 9)")
    assert (ended.returncode, ended.is_timeout) == (-9, False)
    late = episode.run({}, ["sleep", "60"], limits=Limits(wall_s=0.3))
    assert (late.returncode, late.is_timeout) == (-9, True)


# life and death of containers


def test_an_episode_has_one_container_and_a_verification_another(docker_sandbox):
    hostname = ["cat", "/proc/sys/kernel/hostname"]
    with docker_sandbox.episode() as room:
        first, second = (room.run({}, hostname).stdout for _ in range(2))
        graded = docker_sandbox.run({}, hostname).stdout
    assert first == second != graded
    assert containers_of(docker_sandbox) == []


def test_a_container_that_was_taken_away_is_replaced(docker_sandbox):
    with docker_sandbox.episode() as room:
        assert python(room, "print(1)").stdout == b"1\n"
        docker_sandbox._engine.remove(room._container)
        assert python(room, "print(2)").stdout == b"2\n"


def test_taken_away_twice_during_a_run_is_the_harness_not_the_program(docker_sandbox):
    done = threading.Event()

    def take_away():
        while not done.is_set():
            for container, _, _ in containers_of(opened):
                opened._engine.remove(container)
            time.sleep(0.2)

    opened = open_sandbox("docker")
    thief = threading.Thread(target=take_away)
    thief.start()
    with pytest.raises(SandboxUnavailable):
        python(opened, "import time; time.sleep(60)")
    done.set()
    thief.join()
    opened.close()


def test_closing_ends_what_still_runs_and_leaves_no_container(docker_sandbox):
    opened = open_sandbox("docker")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(python, opened, "import time; time.sleep(60)")
        wait_for(lambda: containers_of(opened))
        time.sleep(0.5)
        opened.close()
        with pytest.raises(SandboxUnavailable):
            run.result(30)
    assert containers_of(opened) == []


def test_an_image_that_is_missing_is_named(docker_sandbox):
    with pytest.raises(SandboxUnavailable, match="no image 'no/such:image'"):
        DockerSandbox("no/such:image")


def test_an_image_of_the_user(docker_sandbox):
    opened = open_sandbox("docker", docker_sandbox._image)
    assert python(opened, "print(1)").stdout == b"1\n"
    opened.close()


def test_owners(docker_sandbox):
    me = this_process()
    assert not is_gone(me)
    place, _, _ = me.rsplit("/", 2)
    assert is_gone(f"{place}/{os.getpid()}/1")  # an earlier process of this number
    assert not is_gone("elsewhere/1/2/3")


PROGRAM = """
import random, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from gagar_mini.world.sandbox import Limits, open_sandbox
signal.signal(signal.SIGINT, signal.default_int_handler)
backend, seed = sys.argv[1], int(sys.argv[2])
rng = random.Random(seed)
PROGRAMS = ["print(1)", "while True: pass #MARK", "import time; time.sleep(60) #MARK",
    "import subprocess; subprocess.Popen(['sleep', '60.MARK'], start_new_session=True)",
    "open('/tmp/x', 'w').write('x' * 10**6)", "import os; os.kill(-1, 9)"]

def episode(number):
    from gagar_mini.world.sandbox.base import episode
    with episode(opened) as room:
        for _ in range(rng.choice([1, 2])):
            limits = Limits(wall_s=rng.choice([0.2, 0.5]), cpu_s=1)
            room.run({"a.py": b"x"}, ["python", "-c", rng.choice(PROGRAMS)],
                limits=limits)

opened = open_sandbox(backend)
print("open", flush=True)
try:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(episode, range(10)))
finally:
    opened.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
def test_nothing_is_left_of_200_episodes_that_end_in_every_way(
    backend, tmp_path, docker_sandbox
):
    """20 processes of 10 episodes: some end by themselves, some by Ctrl-C, some are
    killed; then one more sandbox opens, as in the next run."""
    rng, mark = random.Random(0), str(random.randrange(10**9))
    mounts, before = num_mounts(), descendants()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans come here
    programs = set()
    for number in range(20):
        ending = ["none", "interrupt", "kill"][number % 3]
        program = start(backend, number, mark, tmp_path)
        programs.add(str(program.pid))
        assert program.stdout.readline() == b"open\n"
        if ending != "none":
            time.sleep(rng.uniform(0.0, 3.0))
            program.send_signal(2 if ending == "interrupt" else 9)
        program.wait(600)
        program.stdout.close()
    open_sandbox(backend).close()
    owners = [owner for _, owner, _ in docker_sandbox._engine.containers(OWNER)]
    assert programs.isdisjoint(owner.split("/")[2] for owner in owners)
    wait_for(lambda: descendants() <= before and not with_mark(mark))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    assert list(tmp_path.iterdir()) == []
    assert num_mounts() <= mounts


def start(backend, seed, mark, folder):
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "TMPDIR": str(folder)}
    for name in ("PATH", "DOCKER_HOST", "HOME"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("MARK", mark), backend, str(seed)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def wait_for(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def descendants():
    """Live processes below this one."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (
                    (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                )
                if state != "Z":
                    parents[int(entry.name)] = int(parent)
    found, wave = set(), {os.getpid()}
    while wave:
        wave = {pid for pid, parent in parents.items() if parent in wave}
        found |= wave
    return found


def with_mark(mark):
    """Processes of this machine, containers included, that a program started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if (
                entry.name.isdigit()
                and mark.encode() in (entry / "cmdline").read_bytes()
            ):
                found.append(entry.name)
    return found


def num_mounts():
    return len(Path("/proc/self/mounts").read_text().splitlines())
