"""How good a grader is, as a figure: agreement with known orders, grader by grader.

Reads the report of `gagar-mini eval grader`, or its JSON file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gagar_mini.view.plots import BASELINE, METHOD

MARKERS = "os^DvPX*"


def plot_accuracy(found: Mapping, ax: Axes) -> Axes:
    """Pairwise accuracy on one set with 95 % intervals, one line a grader; where length
    misleads, a second, open mark. `found` is one of the report's "sets"."""
    names = list(found["graders"])
    for row, one in enumerate(found["graders"].values()):
        colour = METHOD if row == 0 else BASELINE
        marker = MARKERS[row % len(MARKERS)]
        mark(ax, one["figures"]["accuracy"], row, color=colour, marker=marker)
        longer = one["by_length"]["longer is better"]
        mark(ax, longer, row + 0.3, color=colour, marker=marker, mfc="white", alpha=0.6)
    ax.axvline(0.5, color="0.5", lw=0.8, ls=":")
    ax.annotate("chance", (0.5, 1), xycoords=("data", "axes fraction"), fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("share of known pairs in the right order")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def mark(ax: Axes, estimate: Mapping, y: float, **style: object) -> None:
    """A dot and its interval; nothing where the figure does not exist."""
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    if not estimate["num_values"]:
        return
    spread = None if low is None or low != low else [[value - low], [high - value]]
    ax.errorbar([value], [y], xerr=spread, ls="none", capsize=3, ms=5, **style)


def plot_degradations(found: Mapping, ax: Axes, graders: Sequence[str]) -> Axes:
    """Accuracy on pairs that differ by one kind of degradation, by kind."""
    kinds = list(found["graders"][graders[0]]["by_degradation"])
    for row, name in enumerate(graders):
        by_kind = found["graders"][name]["by_degradation"]
        values = [by_kind[kind]["value"] for kind in kinds]
        colour = METHOD if row == 0 else BASELINE
        marker = MARKERS[row % len(MARKERS)]
        ax.plot(values, range(len(kinds)), marker, color=colour, ms=5, label=name)
    ax.axvline(0.5, color="0.5", lw=0.8, ls=":")
    ax.set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("share of known pairs in the right order")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def save_grader_figure(report: Mapping, path: Path) -> None:
    """One panel a set, side by side."""
    sets = report["sets"]
    figure = Figure(figsize=(4.5 * len(sets) + 1, 3.8), layout="constrained")
    panels = figure.subplots(1, len(sets), squeeze=False, sharey=True)[0]
    for ax, (name, found) in zip(panels, sets.items(), strict=True):
        facts = found["facts"]
        plot_accuracy(found, ax)
        ax.set_title(f"{name} ({facts['num_pairs']} pairs, {facts['num_tasks']} tasks)")
    settings = report["settings"]
    figure.supxlabel(
        f"filled: all pairs; open: pairs of which the longer patch is better; "
        f"{settings['permutations']} orders a group, seed {settings['seed']}; "
        "bars: 95 %, bootstrap by task",
        fontsize=8,
        color="0.35",
    )
    figure.savefig(path, dpi=150)
