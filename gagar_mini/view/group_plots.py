"""Figures of one graded group: what each member scored, and whether its place in the
list decided its rank.

Each function draws on the axes that it gets and returns them; it computes nothing.
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from gagar_mini.types import CRITERIA, CandidateGrade, Tier
from gagar_mini.view.plots import METHOD

SCORE_MARKERS = "os^Dv"
SCORE_COLOURS = ("0.1", "tab:blue", "tab:orange", "tab:purple", "tab:green")
LINE_STYLES = ("-", "--", "-.", ":")
TIER_SHADES = {Tier.T1: "0.98", Tier.T2: "0.92", Tier.T3: "0.85"}


def plot_scores(
    names: Sequence[str], grades: Sequence[CandidateGrade], ax: Axes
) -> Axes:
    """Five scores a member, one row each from the first name down, shaded by tier. The
    marks of a row lie below each other, for scores are often equal."""
    for row, grade in enumerate(grades):
        shade = TIER_SHADES[grade.tier]
        ax.axhspan(row - 0.5, row + 0.5, color=shade, lw=0, zorder=0)
        ax.axhline(row + 0.5, color="w", lw=1.5, zorder=1)
    for number, name in enumerate(CRITERIA):
        ys = [row + 0.14 * (number - 2) for row in range(len(grades))]
        xs = [grade.scores[number] for grade in grades]
        look = {"color": SCORE_COLOURS[number], "ms": 5, "ls": ""}
        label = name.replace("_", " ")
        ax.plot(xs, ys, marker=SCORE_MARKERS[number], label=label, **look)
    labels = [f"{n}  {g.tier}" for n, g in zip(names, grades, strict=True)]
    ax.set_yticks(range(len(names)), labels)
    ax.set_xticks(range(1, 6))
    ax.set(xlim=(0.7, 5.3), ylim=(len(names) - 0.5, -0.5))
    ax.set_xlabel("score (5 is best)")
    ax.tick_params(length=0)
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    ax.spines[:].set_visible(False)
    return ax


def plot_places(ranks: Mapping[str, Sequence[tuple[int, int]]], ax: Axes) -> Axes:
    """The rank of each member against its place in the list, over many orders of one
    group: `ranks` holds (place, rank) pairs by name, both from 1.

    A level line is a grader that does not mind the order. Each line is raised a little
    against the one before it, so that ties are seen.
    """
    for number, (name, pairs) in enumerate(ranks.items()):
        places, values = zip(*sorted(pairs), strict=True)
        shift = 0.06 * (number - (len(ranks) - 1) / 2)
        style = LINE_STYLES[number % len(LINE_STYLES)]
        marker = SCORE_MARKERS[number % len(SCORE_MARKERS)]
        shade = 0.35 + 0.65 * number / max(1, len(ranks) - 1)
        raised = [value + shift for value in values]
        look = {"color": METHOD, "alpha": shade, "ls": style, "marker": marker}
        ax.plot(places, raised, ms=5, lw=1.3, label=name, **look)
    ax.set_xlabel("place in the list")
    ax.set_ylabel("rank (1 is best)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    ax.spines[["top", "right"]].set_visible(False)
    return ax
