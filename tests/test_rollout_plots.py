"""Figures of trajectories: who spoke can be told without colour; bars are log-probs."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from gagar_mini.types import StopReason
from gagar_mini.view.rollout_plots import (
    DEEPEST,
    flow,
    plot_drift,
    plot_stops,
    plot_token_strip,
)


def test_strip_hangs_a_bar_under_each_sampled_token_and_no_other():
    texts = ["fix $f$", "\n", "view", "<|end|>", "x = 1"]
    mask = np.array([False, False, True, True, False])
    logprobs = np.array([0, 0, -1.5, -99, 0])
    ax = plot_token_strip(texts, mask, logprobs, Figure().subplots())
    weights = [text.get_weight() for text in ax.texts]
    assert weights == ["normal", "normal", "bold", "bold", "normal"]
    assert [text.get_style() for text in ax.texts] == ["normal"] * 4 + ["italic"]
    bars = [patch for patch in ax.patches if patch.get_y() == 0.25]
    assert [bar.get_height() for bar in bars] == [
        pytest.approx(0.45 * 1.5 / DEEPEST),
        pytest.approx(0.45),
    ]
    ax.figure.canvas.draw()  # dollars and line breaks are text, not formulas


def test_boxes_flow_like_words():
    assert flow([4, 4, 4], 8) == [(0, 0), (0, 4), (1, 0)]
    assert flow([9, 1], 8) == [(0, 0), (1, 0)]


def test_drift_counts_every_token_once_even_an_exact_zero():
    ax = plot_drift({"same": np.array([0.0, 1e-6, -50.0])}, Figure().subplots())
    (outline,) = ax.patches
    heights = outline.get_xy()[:, 1]
    assert [heights[:3].max(), heights[-3:].max()] == pytest.approx([1 / 3, 1 / 3])
    assert sum(np.diff(heights) > 0.3) == 3
    assert ax.get_legend().get_texts()[0].get_text() == "same: at most 5e+01"


def test_stops_add_up_and_name_the_pass_rate():
    counts = {
        "T = 1": {StopReason.SUBMITTED: 3, StopReason.MAX_TURNS: 1},
        "T = 2": {StopReason.MAX_TOKENS: 2},
    }
    ax = plot_stops(counts, {"T = 1": 0.5, "T = 2": 0.0}, Figure().subplots())
    widths = np.array([patch.get_width() for patch in ax.patches])
    assert widths.reshape(3, 2).sum(0) == pytest.approx([1, 1])
    assert [text.get_text() for text in ax.texts] == ["50% pass", "0% pass"]
    assert len({patch.get_hatch() for patch in ax.patches}) == 3
