"""The program inside the sandbox: a warm interpreter that forks once per run.

Standard library only: it is copied into the sandbox and never imports the package. A
request is one message on the control socket, with the descriptors of the request body,
stdin, stdout and stderr. This process only forwards them: each run reads its own body
and writes its own output, so nothing of one run stays in the memory that the next is
forked from.

A run is two processes in new PID, mount and IPC namespaces. Process 1 builds the room
(one tmpfs behind the working directory, /tmp and /dev/shm), writes the files, and gives
up every capability; process 2 sets the limits and becomes the program. Process 1 reaps,
reports the exit status and ends, and with it ends everything that the program started.
"""

import sys

BARE_MODULES = frozenset(sys.modules)

import atexit  # noqa: E402
import builtins  # noqa: E402
import collections  # noqa: E402, F401
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import dataclasses  # noqa: E402, F401
import errno  # noqa: E402
import functools  # noqa: E402
import gc  # noqa: E402
import importlib.util  # noqa: E402, F401
import itertools  # noqa: E402, F401
import json  # noqa: E402
import math  # noqa: E402, F401
import os  # noqa: E402
import platform  # noqa: E402
import random  # noqa: E402, F401
import re  # noqa: E402, F401
import resource  # noqa: E402
import runpy  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import struct  # noqa: E402
import threading  # noqa: E402
import traceback  # noqa: E402, F401
import types  # noqa: E402

WORK = "/w"
NUM_DESCRIPTORS = 4
MAX_DESCRIPTORS = 256

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEW_ANY = 0x7E020000
"""Every namespace flag that clone takes."""
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP = 4, 22
SECCOMP_MODE_FILTER = 2

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {
    # mount umount2 pivot_root chroot unshare setns, ptrace process_vm_readv and
    # _writev, kcmp bpf perf_event_open userfaultfd, keyctl add_key request_key,
    # open_by_handle_at, memfd_create shmget msgget semget mq_open
    "x86_64": "165 166 155 161 272 308 101 310 311 312 321 298 323 250 248 249 304 "
    "319 29 68 64 240",
    "aarch64": "40 39 41 51 97 268 117 270 271 272 280 241 282 219 217 218 265 "
    "279 194 186 190 180",
}
DENIED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring, the new mount calls, pidfd_getfd, memfd_secret: one number on both
machines. Memory that neither the address space nor the tmpfs accounts for is denied in
both lists."""
CLONE = {"x86_64": 56, "aarch64": 220}
SOCKET = {"x86_64": 41, "aarch64": 198}
PRLIMIT = {"x86_64": 302, "aarch64": 261}
CLONE3 = 435
SOCKET_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)

libc = ctypes.CDLL(None, use_errno=True)


def serve(control):
    """Answer requests until the host goes away. Returns in a child only: its
    program."""
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, NUM_DESCRIPTORS)
        if not message:
            os._exit(0)
        if len(descriptors) < NUM_DESCRIPTORS:
            continue  # a kill that crossed the answer on its way
        pid = os.fork()
        if pid == 0:
            return supervise(control, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if os.waitpid(pid, 0)[1] != 0:
            control.send(b'{"error": "the supervisor of the run failed"}')


def supervise(control, limits, descriptors):
    """Start process 1 of a run, wait for its report, pass it on. Returns in process 2
    only.

    It is a process of its own since `unshare` of PIDs works once in a process. Anything
    on the control socket, its end included, kills the run.
    """
    status, status_write = os.pipe()
    call(libc.unshare, CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        control.detach()
        return be_init(limits, descriptors, status_write)
    for descriptor in (*descriptors, status_write):
        os.close(descriptor)
    poll = select.poll()
    poll.register(status, select.POLLIN)
    poll.register(control, select.POLLIN)
    if any(descriptor == control.fileno() for descriptor, _ in poll.poll()):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    control.send(os.read(status, 4096) or b'{"is_killed": true}')
    os._exit(0)


def be_init(limits, descriptors, status):
    """Process 1 of a run. Returns in process 2 only: the program to run."""
    try:
        build_room(limits["disk_mb"])
        argv = read_request(descriptors[0])
        give_up_privileges()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pid = os.fork()
    except (OSError, ValueError) as error:
        os.write(status, json.dumps({"error": repr(error)}).encode())
        os._exit(1)
    if pid == 0:
        return become_program(argv, limits, descriptors)
    os.closerange(0, status)
    os.closerange(status + 1, MAX_DESCRIPTORS)
    while True:
        ended, raw = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(raw)
            os.write(status, json.dumps({"returncode": code}).encode())
            os._exit(0)


def build_room(disk_mb):
    """New mounts and IPC; one sized tmpfs behind every place that can be written to."""
    call(libc.unshare, CLONE_NEWNS | CLONE_NEWIPC)
    call(libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={disk_mb}m,nr_inodes=16384,mode=700".encode()
    call(libc.mount, b"tmpfs", b"/box", b"tmpfs", MS_NOSUID | MS_NODEV, options)
    for name, target in ((b"w", b"/w"), (b"tmp", b"/tmp"), (b"shm", b"/dev/shm")):
        os.mkdir(b"/box/" + name, 0o700)
        call(libc.mount, b"/box/" + name, target, None, MS_BIND, None)
    call(libc.umount2, b"/box", MNT_DETACH)
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    call(libc.mount, b"proc", b"/proc", b"proc", flags, None)


def read_request(descriptor):
    """Write the files of the request under WORK; returns the command."""
    os.chdir(WORK)
    with os.fdopen(os.dup(descriptor), "rb") as body:
        head = json.loads(body.readline())
        for path, size in head["files"]:
            folder = os.path.dirname(path)
            if folder:
                os.makedirs(folder, exist_ok=True)
            with open(path, "xb") as file:
                file.write(body.read(size))
    return head["argv"]


def give_up_privileges():
    """No capability, no way to be traced by the program, and the filter of system
    calls.

    `no_new_privs` is already set (bubblewrap does), so none of it can be undone.
    """
    version_3 = struct.pack("<Ii", 0x20080522, 0)
    call(libc.capset, version_3, bytes(24))
    call(libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)
    program = seccomp_filter(platform.machine())
    if program:
        code = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
        call(libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0)


@functools.cache
def seccomp_filter(machine):
    """The filter as BPF code; empty on a machine whose call numbers are not listed
    here.

    Defence in depth behind the namespaces: a denied call fails with EPERM.
    """
    if machine not in AUDIT_ARCH:
        return b""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000, 0x80000000
    number, arch, first_argument = 0, 4, 16
    code = [(load, 0, 0, arch), (equal, 1, 0, AUDIT_ARCH[machine]), (give, 0, 0, kill)]
    code += [(load, 0, 0, number), (at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for call_number in (*map(int, DENIED[machine].split()), *DENIED_EVERYWHERE):
        code += [(equal, 0, 1, call_number), (give, 0, 0, refuse | errno.EPERM)]
    # libc falls back from clone3, whose flags a filter cannot see, to clone
    code += [(equal, 0, 1, CLONE3), (give, 0, 0, refuse | errno.ENOSYS)]
    code += [(equal, 0, 3, CLONE[machine]), (load, 0, 0, first_argument)]
    code += [(any_bit, 0, 1, CLONE_NEW_ANY), (give, 0, 0, refuse | errno.EPERM)]
    # limits of another process: with little processor time, process 1 would end before
    # it reports, and a failing program would look like a failing harness
    code += [(load, 0, 0, number), (equal, 0, 3, PRLIMIT[machine])]
    code += [(load, 0, 0, first_argument), (equal, 1, 0, 0)]
    code += [(give, 0, 0, refuse | errno.EPERM)]
    code += [(load, 0, 0, number), (equal, 1, 0, SOCKET[machine]), (give, 0, 0, allow)]
    code += [(load, 0, 0, first_argument)]
    for family in SOCKET_FAMILIES:
        code += [(equal, 0, 1, int(family)), (give, 0, 0, allow)]
    code += [(give, 0, 0, refuse | errno.EAFNOSUPPORT)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def become_program(argv, limits, descriptors):
    """Process 2: its own streams and limits, then the command, or a function that runs
    it."""
    os.setsid()
    for target, descriptor in enumerate(descriptors[1:]):
        os.dup2(descriptor, target)
    os.closerange(3, MAX_DESCRIPTORS)
    call(libc.prctl, PR_SET_DUMPABLE, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    set_limits(limits)
    program = warm_program(argv) if argv[0] == "python" else None
    return program or functools.partial(execute, argv)


def set_limits(limits):
    disk, memory = limits["disk_mb"] << 20, limits["memory_mb"] << 20
    # counted with it: bubblewrap's process 1, the zygote, the supervisor, process 1
    processes = limits["max_processes"] + 4
    for kind, soft, hard in (
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_CPU, limits["cpu_s"], limits["cpu_s"] + 1),
        (resource.RLIMIT_FSIZE, disk, disk),
        (resource.RLIMIT_NOFILE, MAX_DESCRIPTORS, MAX_DESCRIPTORS),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_AS, memory, memory),
    ):
        resource.setrlimit(kind, (soft, hard))


def execute(argv):
    """Replace this process by the command; 127 and 126 as a shell would."""
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def warm_program(argv):
    """A function that does what `python -I -B ARGUMENTS` would, with the working
    directory first on the path; None for arguments that only a fresh interpreter can
    honour."""
    arguments = argv[1:]
    while arguments and arguments[0] in ("-I", "-B", "-E", "-s", "-P"):
        arguments = arguments[1:]
    match arguments:
        case ["-c", source, *rest]:
            return functools.partial(run_source, source, "<string>", ["-c", *rest])
        case ["-m", name, *rest]:
            return functools.partial(run_module, name, ["-m", *rest])
        case [path, *rest] if not path.startswith("-") and os.path.isfile(path):
            return functools.partial(run_script, path, [path, *rest])
    return None


def run_script(path, argv):
    with open(path, "rb") as file:
        source = file.read()
    run_source(source, path, argv)


def run_source(source, path, argv):
    """Run `source` as __main__."""
    main = fresh_main(argv)
    if path != "<string>":
        main.__file__ = path
    code = compile(source, path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name, argv):
    fresh_main(argv)
    runpy._run_module_as_main(name)  # what `python -m` itself calls


def finish(program):
    """Run the program and end as an interpreter does, but for the slow part: threads
    are joined, exit handlers run and streams flushed; modules are not torn down."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit((code or 0) & 0xFF)


def fresh_main(argv):
    """A new __main__, and a path on which the program's own files come first.

    A file named like a module that only this zygote has loaded must not be hidden by
    it.
    """
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    sys.argv = argv
    sys.path.insert(0, WORK)
    own = {entry.removesuffix(".py") for entry in os.listdir(WORK)}
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        if name not in BARE_MODULES:
            del sys.modules[name]
    return main


def call(function, *arguments):
    """Call libc; OSError where it says -1."""
    if function(*arguments) == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{function.__name__}: {os.strerror(code)}")


if __name__ == "__main__":
    finish(serve(socket.socket(fileno=int(sys.argv[1]))))
