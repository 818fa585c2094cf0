"""What the shipped tiny agentic grader promises, measured against known orders."""

import asyncio

import pytest
from grader_world import NOISY, TASK, candidate, patch

from gagar_mini.config import GraderConfig
from gagar_mini.evaluating_graders import load_sets
from gagar_mini.grader.baselines import LintGrader
from gagar_mini.grader.controls import ShortestGrader, make_grader
from gagar_mini.grader.evaluation import FIGURES, estimate, figures, judge
from gagar_mini.paths import find_data
from gagar_mini.types import Status, Tier


def test_it_is_small():
    folder = find_data("grader/tiny")
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8_000_000


def test_it_grades_a_group_that_is_like_none_it_has_met():
    """Another repository, other wording, and the largest group that it was trained on:
    seven passing trees and a failure."""
    names = [name for name in NOISY if name != "two files"]
    group = [candidate(name, patch(**NOISY[name])) for name in names]
    group.append(candidate("failing", b"", status=Status.FAIL))
    grader = make_grader(GraderConfig(name="agentic"))
    grades = asyncio.run(grader.grade(TASK, group, 0)).grades
    assert grades.keys() == {*names}
    assert [id_ for id_, g in grades.items() if g.tier is Tier.T1] == ["clean"]
    looks = [e.call.name for e in grader.records[-1].exchanges]
    assert looks.count("stats") == len(names) and looks.count("diff") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rollouts_eval", "ladders_eval"])
def test_it_beats_length_and_lint_and_keeps_its_order(name):
    (groups,) = load_sets([name]).values()

    def judged(grader, num_orders):
        return asyncio.run(
            judge(grader, groups, num_orders=num_orders, seed=0, concurrency=8)
        )

    mine = judged(make_grader(GraderConfig(name="agentic")), 3)
    for baseline in (ShortestGrader(), LintGrader()):
        other = judged(baseline, 3)
        gain = estimate(mine, FIGURES["accuracy"], minus=other)
        assert gain.low > 0
    found = figures(mine)
    assert found["invalid"].value <= 0.02
    assert found["consistency"].value >= 0.9
