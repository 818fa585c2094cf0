"""The figures of one graded group say what they are given."""

from matplotlib.figure import Figure

from gagar_mini.types import CRITERIA, CandidateGrade, Tier
from gagar_mini.view.group_plots import plot_places, plot_scores


def test_a_row_a_member_and_a_mark_a_score():
    grades = [
        CandidateGrade((5, 5, 5, 5, 4), Tier.T1, 0),
        CandidateGrade((5, 5, 2, 1, 4), Tier.T3, 0),
    ]
    ax = plot_scores(["a", "b"], grades, Figure().subplots())
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a  T1", "b  T3"]
    found = {line.get_label(): list(line.get_xdata()) for line in ax.lines}
    assert [found[name.replace("_", " ")] for name in CRITERIA] == [
        [5, 5],
        [5, 5],
        [5, 2],
        [5, 1],
        [4, 4],
    ]


def test_a_level_line_for_a_member_that_keeps_its_rank():
    ranks = {"kept": [(3, 1), (1, 1), (2, 1)], "moved": [(1, 2), (3, 3)]}
    ax = plot_places(ranks, Figure().subplots())
    kept, moved = ax.lines
    assert list(kept.get_xdata()) == [1, 2, 3]
    assert len(set(kept.get_ydata())) == 1
    first, last = moved.get_ydata()
    assert last - first == 1
    low, high = ax.get_ylim()
    assert low > high  # rank 1 is at the top
