"""Figures of scale: what a wrong denominator does to the gradient, where the seconds of
a step go, and what a rank holds.

Each function draws numbers on the axes that it gets and returns them. Colours keep the
meanings of `plots`; hatches and markers say the same again.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from gagar_mini.view.plots import BASELINE, FAIL, METHOD, PASS

ERROR_STYLES = ((METHOD, "-", "o"), (FAIL, "--", "s"), ("tab:brown", ":", "^"))
PART_STYLES = (
    ("tab:blue", ""),
    ("tab:orange", "//"),
    (PASS, "\\\\"),
    ("0.75", ".."),
    ("tab:purple", "xx"),
    ("tab:cyan", "++"),
    ("tab:olive", "--"),
    ("tab:pink", "oo"),
)


def plot_gradient_errors(
    errors: Mapping[str, Sequence[float]], num_ranks: Sequence[int], ax: Axes
) -> Axes:
    """Relative distance from the gradient of one process, one line for each rule."""
    for (name, values), (colour, line, marker) in zip(
        errors.items(), ERROR_STYLES, strict=False
    ):
        ax.plot(num_ranks, values, line, color=colour, marker=marker, label=name)
    ax.set(yscale="log", xticks=num_ranks, xlabel="ranks")
    ax.set_ylabel("|gradient - that of one process|, relative")
    ax.legend(frameon=False, fontsize=8)
    return ax


def plot_stacks(
    stacks: Mapping[str, Mapping[str, float]], ax: Axes, *, ylabel: str
) -> Axes:
    """One bar for each of `stacks`, cut into its parts, which all name alike."""
    names = list(next(iter(stacks.values())))
    bottom = np.zeros(len(stacks))
    for number, name in enumerate(names):
        heights = np.array([parts[name] for parts in stacks.values()])
        colour, hatch = PART_STYLES[number % len(PART_STYLES)]
        look = {"color": colour, "hatch": hatch, "edgecolor": "w", "width": 0.6}
        ax.bar(list(stacks), heights, bottom=bottom, label=name, **look)
        bottom += heights
    ax.set_ylabel(ylabel)
    return beside(ax)


def mark_measured(measured: Mapping[str, float], ax: Axes) -> Axes:
    """A line across each bar at what was measured."""
    for position, value in enumerate(measured.values()):
        ends = (position - 0.38, position + 0.38)
        label = "measured" if position == 0 else None
        ax.plot(ends, (value, value), color=BASELINE, lw=2.5, label=label)
    return beside(ax)


def beside(ax: Axes) -> Axes:
    """With the legend where no bar is, in the order in which parts are stacked."""
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    ax.legend(frameon=False, fontsize=8, reverse=True, **place)
    return ax
