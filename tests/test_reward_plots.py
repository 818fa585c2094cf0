"""The figure of verifiers says who is paid, in numbers and not by colour alone."""

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from gagar_mini.view.plots import FAIL, PASS
from gagar_mini.view.reward_plots import plot_rewards


def test_unearned_rewards_are_red_and_hatched():
    ax = plot_rewards(
        ["repair", "cheat"],
        ["weak", "strict"],
        [[1.0, 1.0], [1.0, 0.0]],
        [True, False],
        Figure().subplots(),
    )
    assert [text.get_text() for text in ax.texts] == ["1", "1", "1", "0"]
    colours = [patch.get_facecolor() for patch in ax.patches]
    assert colours[:3] == [to_rgba(PASS), to_rgba(PASS), to_rgba(FAIL)]
    assert [patch.get_hatch() for patch in ax.patches] == [None, None, "//", None]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["repair", "cheat"]
