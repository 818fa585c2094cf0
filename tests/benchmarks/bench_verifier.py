"""Verifications a second: the split judge against one fresh pytest process each.

    python tests/benchmarks/bench_verifier.py --repeats 40

Both give a verdict on the same repair of the same task, with the same hidden inputs.
The other way is what a plain harness does: copy the repository and the tests to a new
folder, start `python -m pytest`, read its exit code; without any sandbox, which is in
its favour. The two alternate in one run, so other work on the machine meets both alike:
the ratio of a pair counts, not the times.
"""

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import tyro

from gagar_mini.types import Status, Task
from gagar_mini.world.patches import apply_patch
from gagar_mini.world.sandbox import Sandbox, open_sandbox
from gagar_mini.world.tasks import draw_cases, load_tasks
from gagar_mini.world.verifier import verify

TEST = """\
import importlib
import pytest

CASES = {cases!r}

@pytest.mark.parametrize("path, function, arguments, expected", CASES)
def test_hidden(path, function, arguments, expected):
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert getattr(module, function)(*arguments) == expected
"""


@dataclass(frozen=True)
class Options:
    family: str = "core"
    split: str = "eval"
    repeats: int = 40
    """Pairs of verifications, each on the next task."""
    out: Path = Path("data/results/bench_verifier.json")


def main(options: Options) -> None:
    tasks = load_tasks(options.family, options.split)
    judge_s, pytest_s = [], []
    with contextlib.closing(open_sandbox("bubblewrap")) as sandbox:
        for repeat in range(options.repeats + 1):
            task = tasks[repeat % len(tasks)]
            ways = (
                partial(run_judge, task, sandbox, seed=repeat),
                partial(run_pytest, task, seed=repeat),
            )
            taken = [seconds_of(way) for way in ways]
            if repeat > 0:  # the first pair warms up
                judge_s.append(taken[0])
                pytest_s.append(taken[1])
    result = summarise(options, judge_s, pytest_s)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(
        f"split judge in its sandbox: {result['judge_per_s']:.1f} verifications/s; "
        f"fresh pytest: {result['pytest_per_s']:.1f}/s; median ratio of a pair "
        f"{result['median_ratio']:.1f} ({options.repeats} pairs)"
    )


def seconds_of(way: Callable[[], bool]) -> float:
    """Wall-clock seconds of one verification, which must find the repair right."""
    started = time.perf_counter()
    has_passed = way()
    taken = time.perf_counter() - started
    assert has_passed
    return taken


def run_judge(task: Task, sandbox: Sandbox, *, seed: int) -> bool:
    return verify(task, task.gold_patch, sandbox, seed=seed).status is Status.PASS


def run_pytest(task: Task, *, seed: int) -> bool:
    """Whether a fresh pytest process is content with the patched repository."""
    cases = [
        (test.path, test.function, arguments, expected)
        for test in task.hidden_tests
        for arguments, expected in draw_cases(test, seed)
    ]
    files = dict(apply_patch(task.files, task.gold_patch))
    files["test_hidden.py"] = TEST.format(cases=cases).encode()
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull]
        options += ["--rootdir", folder, "test_hidden.py"]
        # what else is installed beside pytest is not loaded: it would be slower
        environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=folder,
            env=environment,
            capture_output=True,
        )
    return done.returncode == 0


def summarise(
    options: Options, judge_s: list[float], pytest_s: list[float]
) -> dict[str, object]:
    ratios = [other / own for own, other in zip(judge_s, pytest_s, strict=True)]
    return {
        "options": {**asdict(options), "out": options.out.name},
        "versions": {"python": platform.python_version()},
        "num_cores": os.cpu_count(),
        "judge_s": judge_s,
        "pytest_s": pytest_s,
        "judge_per_s": 1 / statistics.median(judge_s),
        "pytest_per_s": 1 / statistics.median(pytest_s),
        "median_ratio": statistics.median(ratios),
        "quartiles_of_ratio": statistics.quantiles(ratios, n=4),
    }


if __name__ == "__main__":
    main(tyro.cli(Options))
