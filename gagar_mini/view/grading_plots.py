"""What a grader did in training, and what it cost: records -> figures."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gagar_mini.view.compare import Run, by_method
from gagar_mini.view.plots import PASS, caption, plot_learning_curves

PAPER_SHARE = (0.127, 0.142)
"""The grader's share of the RL cost in the two runs of the paper."""

FALLBACK = "grader/fallback/"
REASON_COLOURS = ("tab:red", "tab:orange", "tab:brown", "tab:pink", "tab:olive")
HATCHES = ("", "//", "..", "xx", "--")


def graded_runs(runs: Sequence[Run]) -> list[Run]:
    """The runs that had a grader."""
    return [run for run in runs if run.config.grader.name != "none"]


def count_gradings(runs: Sequence[Run]) -> Counter[str]:
    """Gradable groups of all steps by what became of them: "graded", "nothing to rank",
    or the reason for which they trained as plain GRPO."""
    counts: Counter[str] = Counter()
    for line in (line for run in runs for line in run.metrics):
        counts["graded"] += line.get("groups/graded") or 0
        counts["nothing to rank"] += line.get("grader/not_rankable") or 0
        for name, count in line.items():
            if name.startswith(FALLBACK):
                counts[name.removeprefix(FALLBACK)] += count
    return counts


def plot_gradings(runs: Sequence[Run], ax: Axes) -> Axes:
    """One bar a method: what became of its gradable groups, reason by reason."""
    methods = by_method(graded_runs(runs))
    found = {method: count_gradings(members) for method, members in methods.items()}
    usual = ["graded", "nothing to rank"]
    reasons = sorted({kind for counts in found.values() for kind in counts} - {*usual})
    names = [
        textwrap.shorten(method, 80, placeholder="...") + f" (n = {len(members)})"
        for method, members in methods.items()
    ]
    names = [textwrap.fill(name, 40) for name in names]
    left = [0] * len(names)
    for number, kind in enumerate([*usual, *reasons]):
        sizes = [counts[kind] for counts in found.values()]
        colour, hatch = _bar_style(number)
        if not any(sizes):
            continue
        label = f"{kind}: {sum(sizes):g}"
        ys = range(len(names))
        ax.barh(ys, sizes, 0.6, left=left, color=colour, hatch=hatch, label=label)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    ax.set_xlabel("gradable groups, all steps and seeds")
    ax.set_ylabel("method")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(-0.5, len(names) - 0.5)
    ax.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_grader_share(
    runs: Sequence[Run], ax: Axes, *, metric: str = "time/grade_cpu_share"
) -> Axes:
    """The grader's share of a step, by processor time (or another metric of that
    kind), with the paper's share of cost as a band."""
    plot_learning_curves(graded_runs(runs), metric, ax)
    ax.axhspan(*PAPER_SHARE, color="0.85", lw=0)
    ax.annotate("paper", (0, PAPER_SHARE[1]), va="bottom", color="0.4", fontsize=8)
    shares = np.concatenate([[0.2], *(line.get_ydata() for line in ax.lines)])
    ax.set_ylim(0, 1.2 * np.nanmax(shares))
    return ax


def save_grading(runs: Sequence[Run], path: Path) -> bool:
    """Three panels to a file: what became of the groups, and the grader's share of
    processor and of wall time. False, and no file, where no run has a grader."""
    graded = graded_runs(runs)
    if not graded:
        return False
    figure = Figure(figsize=(10, 6), layout="constrained")
    # apart, since names of methods and reasons may be long
    top, bottom = figure.subfigures(2, 1, height_ratios=[1, 1.6])
    plot_gradings(graded, top.subplots()).set_title("What became of gradable groups")
    cpu, wall = bottom.subplots(1, 2)
    plot_grader_share(graded, cpu).set_title("Processor time of grading")
    plot_grader_share(graded, wall, metric="time/grade_wall_share")
    wall.set_title("Wall time with a grading under way")
    cpu.legend(fontsize=7, frameon=False)
    bottom.supxlabel(caption(graded), fontsize=8, color="0.35")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return True


def _bar_style(number: int) -> tuple[str, str]:
    if number < 2:
        return (PASS, "0.8")[number], ""
    turn, index = divmod(number - 2, len(REASON_COLOURS))
    return REASON_COLOURS[index], HATCHES[turn % len(HATCHES)]
