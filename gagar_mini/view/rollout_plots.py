"""Figures of trajectories: one token by token, how many ended how, and how far the
sampler's log-probs lie from the trainer's.

Each function draws on the axes that it gets and returns them. Colours keep the meanings
of `plots` and are never the only cue.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gagar_mini.types import StopReason
from gagar_mini.view.plots import OBSERVATION, POLICY, PROMPT

DEEPEST = 3.0  # nats: a longer bar would hang into the next row
DRIFT_STYLES = ((POLICY, "-"), ("tab:purple", "--"), ("tab:red", ":"))
SMALLEST_GAP = 1e-8  # where an exact 0 is drawn
STOP_STYLES = {
    StopReason.SUBMITTED: ("tab:green", ""),
    StopReason.MAX_TURNS: ("0.8", "//"),
    StopReason.MAX_TOKENS: ("0.6", "\\\\"),
    StopReason.MAX_CONTEXT: ("0.45", "xx"),
    StopReason.MAX_TOOL_SECONDS: ("0.3", ".."),
    StopReason.INFRA: ("tab:red", "++"),
}


def plot_token_strip(
    texts: Sequence[str],
    action_mask: Bool[np.ndarray, " token"],
    logprobs: Float[np.ndarray, " token"],
    ax: Axes,
    *,
    chars_per_row: int = 130,
) -> Axes:
    """The tokens of a trajectory in reading order, each as wide as its text.

    Prompt grey, policy blue and bold with a bar below, observation orange and italic. A
    bar is as long as -log mu of its token (nats, cut at `DEEPEST`).
    """
    num_prompt = int(action_mask.argmax()) if action_mask.any() else len(texts)
    shown = [shown_text(text) for text in texts]
    places = flow([len(text) for text in shown], chars_per_row)
    for index, (text, place) in enumerate(zip(shown, places, strict=True)):
        if action_mask[index]:
            draw_token(text, place, POLICY, ax, weight="bold")
            draw_surprise(len(text), place, -logprobs[index], ax)
        elif index < num_prompt:
            draw_token(text, place, PROMPT, ax)
        else:
            draw_token(text, place, OBSERVATION, ax, style="italic")
    ax.set(xlim=(0, chars_per_row), ylim=(places[-1][0] + 0.8, -0.5))
    ax.axis("off")
    names = {
        "prompt": PROMPT,
        "policy (bold; the bar below is -log mu)": POLICY,
        "observation (italic)": OBSERVATION,
    }
    handles = [Patch(color=c, alpha=0.4, label=name) for name, c in names.items()]
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": len(handles)}
    ax.legend(handles=handles, frameon=False, fontsize=8, **place)
    return ax


def draw_token(
    text: str, place: tuple[int, int], colour: str, ax: Axes, **font: str
) -> None:
    """A box as wide as its text, at (row, left edge)."""
    row, left = place
    look = {"color": colour, "alpha": 0.25, "ec": "w", "lw": 1}
    ax.barh(row, len(text), height=0.5, left=left, **look)
    font |= {"family": "monospace", "va": "center", "ha": "center"}
    ax.text(left + len(text) / 2, row, text, fontsize=7.5, parse_math=False, **font)


def draw_surprise(width: int, place: tuple[int, int], nats: float, ax: Axes) -> None:
    """A bar that hangs from the box of a token."""
    row, left = place
    depth = 0.45 * min(nats, DEEPEST) / DEEPEST
    # a little narrower than its token, so that neighbours stay apart
    ax.bar(left + width / 2, depth, 0.8 * width, bottom=row + 0.25, color=POLICY)


def shown_text(text: str) -> str:
    """A token as one visible word: a line break is an arrow, a space a middle dot."""
    return text.replace("\n", "\u21b5").replace(" ", "\u00b7") or "\u2205"


def flow(widths: Sequence[int], row_width: int) -> list[tuple[int, int]]:
    """(row, left edge) of each of the boxes, set like words: a row is never overfull
    unless one box is wider than a row."""
    places, row, left = [], 0, 0
    for width in widths:
        if left and left + width > row_width:
            row, left = row + 1, 0
        places.append((row, left))
        left += width
    return places


def plot_drift(gaps: Mapping[str, Float[np.ndarray, " _"]], ax: Axes) -> Axes:
    """Share of tokens by |log pi - log mu| (nats, on a logarithmic axis), one outline a
    name, and its largest gap in the legend."""
    edges = np.logspace(np.log10(SMALLEST_GAP), 1, 55)
    for number, (name, values) in enumerate(gaps.items()):
        colour, line = DRIFT_STYLES[number % len(DRIFT_STYLES)]
        values = np.abs(values)
        inside = values.clip(edges[0], edges[-1])
        weights = np.full(len(values), 1 / max(len(values), 1))
        label = f"{name}: at most {values.max():.1g}"
        look = {"histtype": "step", "color": colour, "ls": line, "lw": 1.8}
        ax.hist(inside, edges, weights=weights, label=label, **look)
    ax.set_xscale("log")
    ax.set_xlabel("|log pi - log mu| of a sampled token (nats)")
    ax.set_ylabel("share of tokens")
    ax.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1.0))
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def plot_stops(
    counts: Mapping[str, Mapping[StopReason, int]],
    pass_rates: Mapping[str, float],
    ax: Axes,
) -> Axes:
    """How trajectories ended, one bar a name: stacked shares, hatched by reason, and
    the pass rate in words behind the bar."""
    names = list(counts)
    seen = [r for r in StopReason if any(found.get(r) for found in counts.values())]
    totals = np.array([sum(found.values()) for found in counts.values()], dtype=float)
    left = np.zeros(len(names))
    for reason in seen:
        share = np.array([counts[name].get(reason, 0) for name in names]) / totals
        colour, hatch = STOP_STYLES[reason]
        look = {"color": colour, "hatch": hatch, "edgecolor": "w", "left": left}
        ax.barh(range(len(names)), share, 0.7, label=reason.value, **look)
        left = left + share
    for row, name in enumerate(names):
        text = f"{pass_rates[name]:.0%} pass"
        ax.text(1.02, row, text, va="center", fontsize=8)
    ax.set_yticks(range(len(names)), names)
    ax.set(xlim=(0, 1.18), ylim=(len(names) - 0.5, -0.5))
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    ax.set_xlabel("share of trajectories")
    place = {"loc": "lower center", "bbox_to_anchor": (0.45, 1.0), "ncols": 3}
    ax.legend(frameon=False, fontsize=8, **place)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
