"""The figure of verifiers: who is paid by whom."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from gagar_mini.view.plots import FAIL, PASS

UNPAID = "0.93"


def plot_rewards(
    candidates: Sequence[str],
    verifiers: Sequence[str],
    rewards: Sequence[Sequence[float]],
    earned: Sequence[bool],
    ax: Axes,
) -> Axes:
    """A table of rewards [candidate, verifier], drawn as squares.

    A reward that was earned is green, one that was not is red and hatched; no reward is
    pale. The number stands in each square.
    """
    for row, (paid, is_earned) in enumerate(zip(rewards, earned, strict=True)):
        for column, reward in enumerate(paid):
            colour = UNPAID if not reward else PASS if is_earned else FAIL
            hatch = "//" if reward and not is_earned else None
            look = {"facecolor": colour, "hatch": hatch, "edgecolor": "w", "lw": 2}
            ax.barh(row, 1, height=1, left=column - 0.5, **look)
            style = {"color": "w" if reward else "0.4", "fontsize": 11}
            style |= {"weight": "bold" if reward else "normal"}
            style["bbox"] = {"facecolor": colour, "lw": 0, "boxstyle": "round,pad=0.15"}
            ax.text(column, row, f"{reward:.0f}", ha="center", va="center", **style)
    ax.set_xticks(range(len(verifiers)), verifiers)
    ax.set_yticks(range(len(candidates)), candidates)
    ax.set(xlim=(-0.5, len(verifiers) - 0.5), ylim=(len(candidates) - 0.5, -0.5))
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.spines[:].set_visible(False)
    return ax
