"""Verified patches a second, and seconds a repository task, in each sandbox here.

    .ci/with-docker python tests/benchmarks/bench_sandboxes.py --repeats 40

Every verification is of a gold patch, which must pass. Backends alternate in rounds, so
other work on the machine meets them alike. `latency_s` is one verification alone;
`per_s` counts those that end in a second with `threads` of them at a time.
"""

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from gagar_mini.types import SandboxUnavailable, Status, Task
from gagar_mini.world.sandbox import Sandbox, open_sandbox
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.verifier import verify


@dataclass(frozen=True)
class Options:
    families: tuple[str, ...] = ("core", "repo")
    """Task sets; "repo", judged by pytest, needs `gagar-mini tasks fetch`. One whose
    packages are not at hand is left out, and said so."""
    split: str = "eval"
    backends: tuple[str, ...] = ("bubblewrap", "docker")
    """Sandboxes; one that cannot run here is left out, and said so."""
    repeats: int = 20
    """Verifications of each backend alone, and as many with several at a time."""
    threads: int = 4
    out: Path = Path("data/results/bench_sandboxes.json")


def main(options: Options) -> None:
    result = {
        "options": {**asdict(options), "out": options.out.name},
        "versions": {"python": platform.python_version()},
        "num_cores": os.cpu_count(),
        "load": os.getloadavg()[0],  # other work on the machine: see it beside times
        "figures": {},
    }
    with contextlib.ExitStack() as stack:
        sandboxes = open_all(options.backends, stack)
        for family in options.families:
            try:
                tasks = load_tasks(family, options.split)
            except FileNotFoundError as error:
                print(f"{family} is left out: {error}")
                continue
            figures = measure(tasks, sandboxes, options.repeats, options.threads)
            result["figures"][family] = figures
            for name, figure in figures.items():
                print(
                    f"{family:<6}{name:<12}{figure['per_s']:6.1f} verified patches/s "
                    f"({options.threads} at a time), {figure['latency_s']:.2f} s a task"
                )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def open_all(names: Sequence[str], stack: contextlib.ExitStack) -> dict[str, Sandbox]:
    opened = {}
    for name in names:
        try:
            opened[name] = stack.enter_context(contextlib.closing(open_sandbox(name)))
        except SandboxUnavailable as error:
            print(f"{name} is left out: {error}")
    return opened


def measure(
    tasks: Sequence[Task], sandboxes: dict[str, Sandbox], repeats: int, threads: int
) -> dict[str, dict[str, float]]:
    """Backend -> median seconds of one verification, verifications a second."""
    alone: dict[str, list[float]] = {name: [] for name in sandboxes}
    for repeat in range(repeats + 1):
        for name, sandbox in sandboxes.items():
            taken = seconds_of(tasks, sandbox, [repeat])
            if repeat > 0:  # the first warms up
                alone[name].append(taken)
    together = {
        name: repeats / seconds_of(tasks, sandbox, range(repeats), threads)
        for name, sandbox in sandboxes.items()
    }
    return {
        name: {"latency_s": statistics.median(alone[name]), "per_s": together[name]}
        for name in sandboxes
    }


def seconds_of(
    tasks: Sequence[Task], sandbox: Sandbox, numbers: Sequence[int], threads: int = 1
) -> float:
    """Wall-clock seconds of these verifications, each on the next task."""

    def verify_one(number: int) -> None:
        task = tasks[number % len(tasks)]
        outcome = verify(task, task.gold_patch, sandbox, seed=number)
        assert outcome.status is Status.PASS, (task.id, outcome.reason)

    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(verify_one, numbers))
    return time.perf_counter() - started


if __name__ == "__main__":
    main(tyro.cli(Options))
