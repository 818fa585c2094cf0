"""Each figure of the arithmetic builds from a few numbers and says what it shows."""

import numpy as np
import pytest

from gagar_mini.view import credit_plots as draw

PNG_START = b"\x89PNG\r\n"


@pytest.fixture
def ax():
    figure, axes = draw.figure_with_axes(1, 1, size=(4.0, 3.0))
    yield axes[0, 0]
    assert draw.to_png(figure, caption="n = 1").startswith(PNG_START)


def texts(ax) -> str:
    return " | ".join(text.get_text() for text in ax.texts)


def test_slopes_name_members_and_print_the_passing_sum(ax):
    after = [0.775, 0.175, -0.475, -0.475]
    passed = [True, True, False, False]
    draw.plot_slopes([0.5, 0.5, -0.5, -0.5], after, passed, ax, names="abcd")
    assert "+0.775  a" in texts(ax)
    assert "-0.475  c, d" in texts(ax)  # members that share a line share a name
    assert "passing sum\n1.000" in texts(ax) and "passing sum\n0.950" in texts(ax)
    assert "reward" in ax.get_ylabel()


def test_group_table_has_a_row_for_each_member(ax):
    columns = {"attempt": ["a", "b"], "R": ["pass 1", "fail 0"]}
    draw.plot_group_table(columns, [True, False], ax, widths=[3.0, 1.0])
    assert all(cell in texts(ax) for cell in ("attempt", "a", "b", "pass 1", "fail 0"))


def test_pushes_are_labelled_with_their_values(ax):
    draw.plot_pushes(["edit", "submit"], {"binary": [0.1, -0.2]}, ax)
    assert "+0.1000" in texts(ax) and "-0.2000" in texts(ax)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["edit", "submit"]


def test_probability_curves_are_told_apart_without_colour(ax):
    rates = np.linspace(0, 1, 5)
    curves = {4: rates, 8: rates**2, 16: rates**3}
    samples = {8: [(0.5, 0.25, (0.2, 0.3))]}
    draw.plot_probability_curves(rates, curves, ax, samples=samples)
    lines = [line for line in ax.lines if line.get_label().startswith("G = ")]
    assert len({str(line.get_linestyle()) for line in lines}) == 3
    assert "pass rate" in ax.get_xlabel()


def test_curves_by_ratio_show_their_finite_differences(ax):
    ratios = np.geomspace(0.1, 10, 9)
    dots = {"clip": (ratios[::4], ratios[::4])}
    draw.plot_by_ratio(ratios, {"clip": ratios}, ax, dots=dots, bounds=[0.8])
    assert ax.get_xscale() == "log"
    assert {len(line.get_xdata()) for line in ax.lines} >= {9, 3}
