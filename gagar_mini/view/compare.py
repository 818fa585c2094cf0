"""Runs -> methods -> one row each, with intervals over the seeds.

Runs whose settings agree in all but the seed are one method. An interval over seeds is
Student's t; with a single seed there is none, and the table shows a dash.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gagar_mini.config import PRESETS, RunConfig, differences
from gagar_mini.metrics import mean_interval_over_seeds
from gagar_mini.records import parse_lines, read_config, read_metrics
from gagar_mini.view.tables import Cell, text_table

TRAINING_FIGURES = {
    "reward/pass_rate": "pass",
    "patch/clean_share": "clean",
    "patch/noise_lines": "noise lines",
    "rollout/turns": "turns",
    "rollout/action_tokens": "tokens",
    "policy/entropy": "entropy",
    "credit/cap_hit_rate": "cap hits",
    "grader/fallback_rate": "fallbacks",
    "time/grade_cpu_share": "grader cpu",
}
"""Keys of metrics.jsonl, with their heads: means over the last tenth of the steps."""

HELD_OUT_FIGURES = {
    "pass_rate": "pass",
    "clean_share": "clean",
    "noise_lines": "noise lines",
    "turns": "turns",
    "action_tokens": "tokens",
    "entropy": "entropy",
}
"""Keys of eval.jsonl, with their heads: the newest line of each budget."""

Line = dict[str, int | float | None]
"""Numbers of one step, by name."""

Evaluation = dict[str, bool | int | float | str | list | None]
"""One line of eval.jsonl: what was evaluated, and the figures."""


@dataclass(frozen=True)
class Run:
    """What one run folder says: settings, metrics by step, evaluations in order."""

    path: Path
    config: RunConfig
    method: str
    metrics: list[Line]
    evaluations: list[Evaluation]


@dataclass(frozen=True)
class Estimate:
    """Mean over seeds and its 95 % interval; the bounds are NaN with a single seed."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class HeldOut:
    """Figures on held-out tasks under one budget of turns and sampled tokens."""

    max_turns: int
    max_tokens: int
    figures: dict[str, Estimate]


@dataclass(frozen=True)
class MethodRow:
    """One method: its seeds, figures of late training, and figures on held-out tasks
    by budget, the most generous one first."""

    method: str
    seeds: tuple[int, ...]
    steps: int
    training: dict[str, Estimate]
    held_out: tuple[HeldOut, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of some folders. Raises ValueError for a folder without a step."""
    runs = []
    for path in paths:
        config = read_config(path)
        metrics = read_metrics(path)
        if not metrics:
            raise ValueError(f"the run {path} has no step yet: nothing to compare")
        evaluations = [
            line
            for line in read_lines(path / "eval.jsonl")
            if is_comparable(line, config)
        ]
        runs.append(Run(path, config, method_of(config), metrics, evaluations))
    return runs


def is_comparable(line: Evaluation, config: RunConfig) -> bool:
    """Whether an evaluation is of the held-out split, at the temperature of training:
    a look at other tasks must not stand for it in a comparison."""
    temperature = line.get("temperature", config.rollout.temperature)
    return line.get("split", "eval") == "eval" and (
        temperature == config.rollout.temperature
    )


def read_lines(path: Path) -> list[Evaluation]:
    """The lines of a run's eval.jsonl. Raises ValueError for one that is none."""
    lines = parse_lines(path.read_bytes(), str(path)) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        budget = [line.get("max_turns"), line.get("max_tokens")]
        figures = [line.get(key) for key in HELD_OUT_FIGURES]
        is_numeric = all(isinstance(value, int | float | None) for value in figures)
        if not is_numeric or any(type(value) is not int for value in budget):
            raise ValueError(f"{path}:{number} is no line of `gagar-mini eval`")
    return lines


def method_of(config: RunConfig) -> str:
    """Rule and grader, and every other setting that is not the preset's, seed aside."""
    name = config.credit.rule
    if config.grader.name != "none":
        name += f" + {config.grader.name}"
    told = {"seed", "credit.rule", "grader.name", "threads", "policy"}
    default = PRESETS.get(config.preset, RunConfig)()
    other = [
        f"{key}={new}"
        for key, (_, new) in differences(default, config).items()
        if key not in told
    ]
    return ", ".join([name, *other])


def by_method(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of each method in the order of first appearance."""
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.method, []).append(run)
    return grouped


def compare_runs(runs: Sequence[Run]) -> list[MethodRow]:
    """One row a method. Two runs of a method with the same seed are a ValueError."""
    rows = []
    for method, members in by_method(runs).items():
        seeds = tuple(run.config.seed for run in members)
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"{method}: two runs have the same seed, of {seeds}")
        training = [late_figures(run) for run in members]
        rows.append(
            MethodRow(
                method,
                seeds,
                steps=min(len(run.metrics) for run in members),
                training=estimates(training, TRAINING_FIGURES),
                held_out=held_out_figures(members),
            )
        )
    return rows


def held_out_figures(runs: Sequence[Run]) -> tuple[HeldOut, ...]:
    """Figures under every budget that all of `runs` were evaluated with."""
    by_run = [
        {(line["max_turns"], line["max_tokens"]): line for line in run.evaluations}
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, by_run)), reverse=True)
    return tuple(
        HeldOut(
            *budget, estimates([lines[budget] for lines in by_run], HELD_OUT_FIGURES)
        )
        for budget in shared
    )


def late_figures(run: Run) -> Line:
    """Means over the last tenth of the steps, at least one; None counts for nothing."""
    late = run.metrics[-max(1, len(run.metrics) // 10) :]
    return {key: mean_of([line.get(key) for line in late]) for key in TRAINING_FIGURES}


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def estimates(
    lines: Sequence[Line | Evaluation], keys: Iterable[str]
) -> dict[str, Estimate]:
    """Mean and interval over the runs of each figure that they have."""
    found = {}
    for key in keys:
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            mean, low, high = mean_interval_over_seeds(values)
            bounds = (low, high) if math.isfinite(low) else (math.nan, math.nan)
            found[key] = Estimate(mean, *bounds)
    return found


def table(rows: Sequence[MethodRow]) -> str:
    """Late training, then held-out tasks where `gagar-mini eval RUN` has been run."""
    parts = [
        text_table([table_line(row) for row in rows]),
        "mean [95 % interval over seeds], last tenth of the steps, training tasks",
    ]
    evaluated = [
        {
            "method": row.method,
            "seeds": len(row.seeds),
            "turns<=": held_out.max_turns,
            "tokens<=": held_out.max_tokens,
            **estimate_cells(held_out.figures, HELD_OUT_FIGURES),
        }
        for row in rows
        for held_out in row.held_out
    ]
    if evaluated:
        evaluated.sort(key=lambda line: (-line["turns<="], -line["tokens<="]))
        parts += [
            "",
            text_table(evaluated),
            "mean [95 % interval over seeds], newest evaluation of each budget",
        ]
    return "\n".join(parts)


def table_line(row: MethodRow) -> dict[str, Cell]:
    head = {"method": row.method, "seeds": len(row.seeds), "steps": row.steps}
    return head | estimate_cells(row.training, TRAINING_FIGURES)


def estimate_cells(
    figures: dict[str, Estimate], heads: dict[str, str]
) -> dict[str, Cell]:
    return {
        head: estimate_text(figures[key]) if key in figures else "-"
        for key, head in heads.items()
    }


def estimate_text(estimate: Estimate) -> str:
    digits = 1 if abs(estimate.mean) >= 10 else 2
    text = f"{estimate.mean:.{digits}f}"
    if not math.isfinite(estimate.low):
        return text
    return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
