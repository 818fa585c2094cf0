"""Several arms, several seeds, one budget: the runs behind every comparison.

Each run is a process of its own with one thread, a few side by side, and resumes where
it was stopped: an interrupted experiment goes on when it is started again. A run is
trained, then evaluated on the held-out tasks under every budget of turns and tokens.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from tqdm import tqdm

ARMS = {
    "binary": ("binary", "none"),
    "downweight": ("downweight", "rubric"),
    "gagar": ("gagar", "rubric"),
    "agentic": ("gagar", "agentic"),
    "oracle": ("gagar", "oracle"),
    "shortest": ("gagar", "shortest"),
    "random": ("gagar", "random"),
    "reversed": ("gagar", "reversed"),
}
"""Name of an arm -> credit rule and grader. The first three are the paper's runs, with
rules as grader; "agentic" has the small trained grader. The others are controls:
graders that know more, less or nothing."""

PUBLISHED = ("config.yaml", "metrics.jsonl", "eval.jsonl")
"""What of a run folder is kept under data/results: settings, curves, evaluations."""


@dataclass(frozen=True)
class Experiment:
    """What is run. `budgets` are (turns, sampled tokens) of the held-out
    evaluations."""

    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    budgets: tuple[tuple[int, int], ...]
    samples: int = 1
    """Trajectories per held-out task and budget."""
    max_tasks: int = 0
    """Held-out tasks that are evaluated; 0 means all."""
    overrides: tuple[str, ...] = ()
    """Further flags of `gagar-mini train`, the same for every arm."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.arms) - set(ARMS))
        if unknown:
            raise ValueError(
                f"there is no arm {unknown[0]!r}: use some of {', '.join(ARMS)}"
            )
        for name in ("arms", "seeds", "budgets"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} are {values}: name at least one, each once")
        numbers = {"steps": self.steps, "samples": self.samples}
        numbers["a budget"] = min(map(min, self.budgets))
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be above 0")
        if self.max_tasks < 0:
            raise ValueError(f"max_tasks is {self.max_tasks}: it must not be below 0")


def run_experiment(experiment: Experiment, out_dir: Path, *, jobs: int) -> list[Path]:
    """Run what is not done yet, `jobs` runs side by side; the run folders.

    Raises RuntimeError, with the end of its log, for a run that failed; the others are
    then stopped, and resume the next time.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}: it must be above 0")
    out_dir.mkdir(parents=True, exist_ok=True)
    pairs = [(arm, seed) for seed in experiment.seeds for arm in experiment.arms]
    folders = [out_dir / f"{arm}-s{seed}" for arm, seed in pairs]
    stop = Event()

    def one_run(pair: tuple[str, int], folder: Path) -> None:
        for command in commands(experiment, *pair, folder):
            run_logged(command, folder.with_suffix(".log"), stop)

    with ThreadPoolExecutor(jobs) as pool:
        futures = [
            pool.submit(one_run, pair, folder)
            for pair, folder in zip(pairs, folders, strict=True)
        ]
        try:
            watch(folders, experiment.steps, lambda: all(f.done() for f in futures))
            for future in futures:
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return folders


def commands(
    experiment: Experiment, arm: str, seed: int, folder: Path
) -> list[list[str]]:
    """The calls of `gagar-mini` that make up one run; nothing where all is done."""
    rule, grader = ARMS[arm]
    train = ["train", "--resume", "--run-dir", str(folder), "--seed", str(seed)]
    train += ["--credit", rule, "--grader", grader, "--steps", str(experiment.steps)]
    is_done = is_finished(folder, experiment.steps)
    calls = [] if is_done else [train + list(experiment.overrides)]
    done = evaluated_budgets(folder, experiment.steps)
    left = [budget for budget in experiment.budgets if budget not in done]
    if left:
        turns, tokens = zip(*left, strict=True)
        evaluate = ["eval", str(folder), "--samples", str(experiment.samples)]
        evaluate += ["--max-tasks", str(experiment.max_tasks)]
        evaluate += ["--max-turns", *map(str, turns), "--max-tokens", *map(str, tokens)]
        calls.append(evaluate)
    return [[sys.executable, "-m", "gagar_mini", *call] for call in calls]


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run has done `steps` steps; a longer experiment trains it on."""
    summary = folder / "summary.json"
    if not summary.exists():
        return False
    found = json.loads(summary.read_text())
    return found["status"] == "finished" and found["steps_done"] >= steps


def evaluated_budgets(folder: Path, steps: int) -> set[tuple[int, int]]:
    """Budgets under which the policy of step `steps` has met the held-out tasks."""
    path = folder / "eval.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        (line["max_turns"], line["max_tokens"])
        for line in map(json.loads, lines)
        if line["split"] == "eval" and line["step"] == steps
    }


def run_logged(command: Sequence[str], log: Path, stop: Event) -> None:
    """Run `command` to its end, its output added to `log`; end it when `stop` is
    set."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_MININTERVAL": "10"}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        try:
            while process.poll() is None:
                if stop.wait(0.2):
                    return
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise RuntimeError(f"{' '.join(command)} failed; its log ends with:\n{tail}")


def watch(folders: Sequence[Path], steps: int, is_done: Callable[[], bool]) -> None:
    """One progress bar over the steps of all runs, until `is_done`."""
    with tqdm(total=steps * len(folders), unit="step", desc="all runs") as bar:
        while True:
            finished = is_done()
            bar.n = sum(count_lines(folder / "metrics.jsonl") for folder in folders)
            bar.refresh()
            if finished:
                return
            time.sleep(1.0)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def publish(folders: Sequence[Path], results: Path) -> None:
    """Copy the small files of some runs to a folder under data/results."""
    for folder in folders:
        (results / folder.name).mkdir(parents=True, exist_ok=True)
        for name in PUBLISHED:
            shutil.copyfile(folder / name, results / folder.name / name)
