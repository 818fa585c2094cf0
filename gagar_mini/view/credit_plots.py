"""Figures of the arithmetic: one group, its credit, and what the loss does with it.

Each function draws numbers on the axes that it gets and returns them; it computes
nothing. Colours keep the meanings of `plots`, and are never the only cue.
"""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gagar_mini.view.plots import BASELINE, FAIL, METHOD, PASS

Interval = tuple[float, float]
MUTED = "0.45"
SIZE_COLOURS = ("#9ecae1", "#4292c6", "#08306b")
SIZE_STYLES = (":", "--", "-")
SIZE_MARKERS = "^so"


def figure_with_axes(
    rows: int, columns: int, *, size: tuple[float, float], **options
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes [rows, columns], whose panels keep clear of each other."""
    figure = Figure(figsize=size, layout="constrained", dpi=110)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06, wspace=0.04)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def to_png(figure: Figure, *, caption: str) -> bytes:
    """The figure as PNG, with small print below it: n, seeds, preset, source.

    Bytes rather than a figure, since what a notebook shows of a figure depends on the
    backend that happens to be set.
    """
    figure.supxlabel(caption, fontsize=8, color=MUTED)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def quiet(ax: Axes) -> Axes:
    """Without the frame above and to the right, which carries nothing."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_group_table(
    columns: Mapping[str, Sequence[str]],
    passed: Sequence[bool],
    ax: Axes,
    *,
    widths: Sequence[float] | None = None,
) -> Axes:
    """One row per member, one column per quantity; passes green, failures red.

    The first column stands to the left, the others are centred; `widths` are relative.
    """
    widths = np.array(widths or [1.0] * len(columns), float)
    right = np.cumsum(widths) / widths.sum()
    left = np.concatenate([[0], right[:-1]])
    ax.set(xlim=(0, 1), ylim=(len(passed) - 0.4, -1.1))
    ax.axis("off")
    for number, (name, cells) in enumerate(columns.items()):
        x, align = left[number] + 0.01, "left"
        if number > 0:
            x, align = (left[number] + right[number]) / 2, "center"
        ax.text(x, -0.75, name, ha=align, va="center", fontsize=9, color=MUTED)
        for row, cell in enumerate(cells):
            colour = PASS if passed[row] else FAIL
            font = "monospace" if number == 0 else None
            text = {"ha": align, "va": "center", "fontsize": 10, "family": font}
            ax.text(x, row, cell, color=colour if number == 1 else "0.1", **text)
    for row in range(len(passed) + 1):
        ax.axhline(row - 0.5, color="0.85" if row else "0.3", lw=0.8)
    return ax


def plot_pushes(
    names: Sequence[str], pushes: Mapping[str, Sequence[float]], ax: Axes
) -> Axes:
    """Horizontal bars around zero: how far each rule moves each logit in one step."""
    height = 0.8 / len(pushes)
    colours, hatches = (BASELINE, METHOD), ("", "//")
    for number, (rule, values) in enumerate(pushes.items()):
        y = np.arange(len(names)) + (number - (len(pushes) - 1) / 2) * height
        style = {"color": colours[number], "hatch": hatches[number], "edgecolor": "w"}
        bars = ax.barh(y, values, height * 0.9, label=rule, **style)
        ax.bar_label(bars, [f"{v:+.4f}" for v in values], padding=4, fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.axvline(0, color="0.2", lw=0.8)
    ax.margins(x=0.3)
    ax.set_xlabel("change of the logit in one step")
    ax.legend(frameon=False, fontsize=8, loc="best")
    return quiet(ax)


def plot_probability_curves(
    rates: np.ndarray,
    curves: Mapping[int, np.ndarray],
    ax: Axes,
    *,
    samples: Mapping[int, Sequence[tuple[float, float, Interval]]] | None = None,
) -> Axes:
    """Share of groups (0 to 1) against the pass rate, one line per group size.

    `samples` are (pass rate, observed share, interval) of simulated groups.
    """
    for number, (size, values) in enumerate(curves.items()):
        number = min(number, len(SIZE_COLOURS) - 1)
        colour, style = SIZE_COLOURS[number], SIZE_STYLES[number]
        marker = SIZE_MARKERS[number]
        ax.plot(rates, values, color=colour, ls=style, lw=2, label=f"G = {size}")
        for rate, share, (low, high) in (samples or {}).get(size, ()):
            bar = [[share - low], [high - share]]
            ax.errorbar(rate, share, bar, color=colour, marker=marker, ms=4, lw=1)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="pass rate p of the task")
    ax.set_ylabel("share of groups")
    ax.legend(frameon=False, loc="lower center", fontsize=9)
    return quiet(ax)


def plot_slopes(
    before: Sequence[float],
    after: Sequence[float],
    passed: Sequence[bool],
    ax: Axes,
    *,
    names: Sequence[str],
) -> Axes:
    """Lines from each advantage A to A', with the sum over the passes beside each end.

    Members that share a line are named together; passes are solid with dots, failures
    dashed with crosses.
    """
    for (start, end, is_pass), members in _same_lines(before, after, passed, names):
        style = {"color": PASS if is_pass else FAIL, "ls": "-" if is_pass else "--"}
        marker = "o" if is_pass else "x"
        ax.plot([0, 1], [start, end], marker=marker, ms=6, lw=1.8, **style)
        label = f"{end:+.3f}  {', '.join(members)}"
        ax.annotate(label, (1, end), (8, 0), va="center", fontsize=8.5, **_OFFSET)
    for x, values in ((0, before), (1, after)):
        total = sum(v for v, is_pass in zip(values, passed, strict=True) if is_pass)
        text = f"passing sum\n{total:.3f}"
        ax.text(x, -0.2, text, ha="center", va="center", fontsize=9, color=PASS)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set(xlim=(-0.4, 1.85), ylim=(-0.62, 1.0), ylabel="advantage (in rewards)")
    ax.set_xticks([0, 1], ["A", "A'"])
    return quiet(ax)


_OFFSET = {"textcoords": "offset points"}


def plot_by_ratio(
    ratios: np.ndarray,
    curves: Mapping[str, np.ndarray],
    ax: Axes,
    *,
    dots: Mapping[str, tuple[np.ndarray, np.ndarray]] | None = None,
    bounds: Sequence[float] = (),
) -> Axes:
    """A quantity of one token against its importance ratio (log axis), per loss.

    `dots` are finite differences (ratios, values); `bounds` are marked on the axis.
    """
    colours, styles, markers = (BASELINE, METHOD), ("-", "--"), "os"
    for number, (name, values) in enumerate(curves.items()):
        look = {"color": colours[number], "ls": styles[number]}
        ax.plot(ratios, values, lw=2, label=name, **look)
        if dots and name in dots:
            dot = {"marker": markers[number], "ls": "", "ms": 5, "mfc": "w"}
            ax.plot(*dots[name], color=colours[number], **dot)
    for bound in bounds:
        ax.axvline(bound, color="0.85", lw=0.8, zorder=0)
    ax.axhline(0, color="0.8", lw=0.8, zorder=0)
    ax.set_xscale("log")
    ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    return quiet(ax)


def _same_lines(before, after, passed, names):
    """Members with the same (A, A', passed), to be drawn and named as one line."""
    lines: dict[tuple[float, float, bool], list[str]] = {}
    for start, end, is_pass, name in zip(before, after, passed, names, strict=True):
        key = (round(float(start), 6), round(float(end), 6), bool(is_pass))
        lines.setdefault(key, []).append(name)
    return lines.items()
