"""How good a grader is, as a figure: agreement with known orders, grader by grader.

Reads the report of `gagar-mini eval grader`, or its JSON file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gagar_mini.view.plots import BASELINE, METHOD

MARKERS = "os^DvPX*"
FEWEST_PAIRS = 10
"""A mark for pairs of which the longer is better needs at least so many of them."""


def plot_accuracy(found: Mapping, ax: Axes) -> Axes:
    """Pairwise accuracy on one set with 95 % intervals, one line a grader; where length
    misleads, a second, open mark. `found` is one of the report's "sets"."""
    names = list(found["graders"])
    for row, one in enumerate(found["graders"].values()):
        colour = METHOD if row == 0 else BASELINE
        marker = MARKERS[row % len(MARKERS)]
        mark(ax, one["figures"]["accuracy"], row, color=colour, marker=marker)
        longer = one["by_length"]["longer is better"]
        if longer["num_values"] >= FEWEST_PAIRS:
            hollow = {"mfc": "white", "alpha": 0.6}
            mark(ax, longer, row + 0.3, color=colour, marker=marker, **hollow)
    ax.axvline(0.5, color="0.5", lw=0.8, ls=":")
    where = {"xytext": (2, 2), "textcoords": "offset points", "color": "0.4"}
    ax.annotate("chance", (0.5, len(names) - 0.5), fontsize=8, **where)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("share of known pairs in the right order")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def mark(ax: Axes, estimate: Mapping, y: int | float, **style: object) -> None:
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
    """A panel a set, and below it one by kind of degradation where the set has any."""
    sets = report["sets"]
    graded = {name: list(found["graders"]) for name, found in sets.items()}
    has_kinds = {
        name: bool(found["graders"][graded[name][0]]["by_degradation"])
        for name, found in sets.items()
    }
    num_rows = 1 + any(has_kinds.values())
    figure = Figure(figsize=(5 * len(sets) + 1, 3.8 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, len(sets), squeeze=False)
    for column, (name, found) in enumerate(sets.items()):
        facts = found["facts"]
        ax = plot_accuracy(found, panels[0, column])
        ax.set_title(f"{name} ({facts['num_pairs']} pairs, {facts['num_tasks']} tasks)")
        if has_kinds[name]:
            below = plot_degradations(found, panels[1, column], graded[name])
            below.set_title("pairs that differ by one kind", fontsize=10)
            below.legend(frameon=False, fontsize=7)
        elif num_rows > 1:
            panels[1, column].set_axis_off()
    figure.supxlabel(caption(report["settings"]), fontsize=8, color="0.35")
    figure.savefig(path, dpi=150)


def caption(settings: Mapping) -> str:
    """How the figure came about, for below it."""
    return (
        "filled: all pairs; open: pairs of which the longer patch is better\n"
        f"{settings['permutations']} orders a group, seed {settings['seed']}; "
        "bars: 95 %, bootstrap by task"
    )
