"""Figures of scale: stacks add up, and what was measured lies across its bar."""

import pytest
from matplotlib.figure import Figure

from gagar_mini.view.scale_plots import (
    mark_measured,
    plot_gradient_errors,
    plot_stacks,
)


def test_parts_of_a_bar_stand_on_each_other():
    stacks = {"1": {"rollout": 2.0, "update": 3.0}, "2": {"rollout": 1.0, "update": 2}}
    ax = plot_stacks(stacks, Figure().subplots(), ylabel="seconds")
    tops = [bar.get_y() + bar.get_height() for bar in ax.patches]
    assert tops == [2, 1, 2 + 3, 1 + 2]  # first all rollouts, then all updates
    assert len({bar.get_hatch() for bar in ax.patches}) == 2  # not by colour alone
    mark_measured({"1": 4.5, "2": 3.5}, ax)
    assert [line.get_ydata()[0] for line in ax.lines] == [4.5, 3.5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "update",
        "rollout",
        "measured",
    ]


def test_errors_are_drawn_by_rank_on_a_log_scale():
    errors = {"right": [1e-7, 2e-7], "wrong": [0.1, 0.4]}
    ax = plot_gradient_errors(errors, [2, 4], Figure().subplots())
    assert [line.get_ydata().tolist() for line in ax.lines] == [
        pytest.approx(values) for values in errors.values()
    ]
    assert ax.get_yscale() == "log"
    assert {line.get_marker() for line in ax.lines} == {"o", "s"}
