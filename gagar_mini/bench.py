"""How fast this machine is: a few real training steps, timed by their own records."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gagar_mini.config import RunConfig
from gagar_mini.learn.rl import train
from gagar_mini.records import read_metrics
from gagar_mini.view.tables import text_table


@dataclass(frozen=True)
class Figure:
    """One measured figure: mean over the steps, and what it is of."""

    name: str
    value: float
    unit: str


def measure_speed(config: RunConfig, steps: int) -> list[Figure]:
    """Train `steps` steps and one to warm up, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        train(replace(config, steps=steps + 1), run_dir, progress=False)
        lines = read_metrics(run_dir)[1:]
    sampled = [
        line["rollout/action_tokens"]
        * line["groups/sampled"]
        * config.rollout.group_size
        for line in lines
    ]
    rollouts = sum(line["groups/sampled"] for line in lines) * config.rollout.group_size
    rollout_s = sum(line["time/rollout_s"] for line in lines)
    return [
        Figure("step", mean(lines, "time/step_s"), "s"),
        Figure("rollouts, tests and grades", mean(lines, "time/rollout_s"), "s/step"),
        Figure("hidden tests, summed", mean(lines, "time/verify_s"), "s/step"),
        Figure("grades, summed", mean(lines, "time/grade_s"), "s/step"),
        Figure("update", mean(lines, "time/update_s"), "s/step"),
        Figure(
            "redistribution, share of the step",
            100 * mean(lines, "time/credit_s") / mean(lines, "time/step_s"),
            "%",
        ),
        Figure("trajectories", rollouts / rollout_s, "1/s"),
        Figure("sampled tokens", sum(sampled) / rollout_s, "1/s"),
        Figure(
            "hidden tests of one patch",
            1000 * sum(line["time/verify_s"] for line in lines) / rollouts,
            "ms",
        ),
        Figure("peak memory", lines[-1]["memory/peak_mb"], "MiB"),
    ]


def mean(lines: Sequence[dict[str, int | float | None]], name: str) -> float:
    return sum(line[name] for line in lines) / len(lines)


def table(figures: Sequence[Figure]) -> str:
    return text_table(
        [
            {"what": figure.name, "value": figure.value, "unit": figure.unit}
            for figure in figures
        ]
    )
