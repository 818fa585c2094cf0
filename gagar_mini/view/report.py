"""The published runs of a folder under data/results -> its tables and figure.

    python -m gagar_mini.view.report data/results/first_light

writes table.md, claims.md, figure.png and, where a grader's costs were measured,
grading.png next to the runs that they are computed from.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from gagar_mini.metrics import mean_interval_over_seeds
from gagar_mini.view.claims import (
    TIGHT,
    TRAINED,
    budget_of,
    claims_markdown,
    evaluation_at,
    judge_claims,
)
from gagar_mini.view.compare import (
    HELD_OUT_FIGURES,
    Estimate,
    Evaluation,
    Run,
    by_method,
    estimate_text,
    estimates,
    read_runs,
)
from gagar_mini.view.grading_plots import save_grading
from gagar_mini.view.plots import save_comparison

SHARES = ("time/grade_cpu_share", "time/grade_wall_share")


def write_report(results: Path) -> None:
    """Write the tables and the figure. Raises ValueError where there is no run."""
    runs = published_runs(results)
    (results / "table.md").write_text(results_markdown(runs))
    (results / "claims.md").write_text(claims_markdown(judge_claims(runs)))
    save_comparison(runs, results / "figure.png")
    measured = [run for run in runs if math.isfinite(mean_of(run, SHARES[0]))]
    save_grading(measured, results / "grading.png")


def published_runs(results: Path) -> list[Run]:
    """The runs of a results folder, binary first."""
    folders = sorted(path.parent for path in results.glob("*/config.yaml"))
    if not folders:
        raise ValueError(f"{results} holds no run")
    runs = read_runs(folders)
    return sorted(runs, key=lambda run: (run.config.credit.rule, run.method, run.path))


def results_markdown(runs: Sequence[Run]) -> str:
    """A Markdown table of held-out figures, one row a method: means over seeds with
    95 % intervals. A tighter budget has a column where one was evaluated."""
    has_tight = all(len({*map(budget_of, run.evaluations)}) > 1 for run in runs)
    heads = ["method", "seeds", "pass rate", *["at a tighter budget"] * has_tight]
    heads += [head for key, head in HELD_OUT_FIGURES.items() if key != "pass_rate"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, members in by_method(runs).items():
        at = [evaluation_at(run, TRAINED) for run in members]
        tight = [evaluation_at(run, TIGHT) for run in members]
        figures = estimates(at, HELD_OUT_FIGURES)
        cells = [estimate_text(figure) for figure in figures.values()]
        if has_tight:
            found = estimates(tight, ["pass_rate"])["pass_rate"]
            cells.insert(1, estimate_text(found))
        lines.append(f"| {method} | {len(members)} | {' | '.join(cells)} |")
    lines += ["", conditions(runs, at[0], tight[0]), *cost_lines(runs)]
    return "\n".join(lines) + "\n"


def conditions(runs: Sequence[Run], at: Evaluation, tight: Evaluation) -> str:
    """Under what the figures of a table were measured, in a sentence."""
    turns, tokens = budget_of(at)
    told = (
        f"Held-out tasks ({at['num_tasks']}), {len(runs[-1].metrics)} steps; budget "
        f"{turns} turns and {tokens} sampled tokens"
    )
    if budget_of(tight) != budget_of(at):
        told += ", tighter: {} and {}".format(*budget_of(tight))
    if all(len(members) == 1 for members in by_method(runs).values()):
        return f"{told}; one seed a method: no interval, and nothing decided."
    return f"{told}; mean [95 % interval over seeds]."


def cost_lines(runs: Sequence[Run]) -> list[str]:
    """What grading took of a step, for the methods that measured it."""
    lines = []
    for method, members in by_method(runs).items():
        of_run = {key: [mean_of(run, key) for run in members] for key in SHARES}
        if all(map(math.isfinite, of_run[SHARES[0]])):
            cpu, wall = (
                estimate_text(Estimate(*mean_interval_over_seeds(values)))
                for values in of_run.values()
            )
            lines += [
                "",
                f"The grader of {method}: {cpu} of a step's processor seconds; a "
                f"grading was under way in {wall} of its wall time.",
            ]
    return lines


def mean_of(run: Run, key: str) -> float:
    """Over the steps that have it; NaN without any."""
    values = [step[key] for step in run.metrics if step.get(key) is not None]
    return sum(values) / len(values) if values else math.nan


if __name__ == "__main__":
    write_report(Path(sys.argv[1]))
