"""What needs no peer: grading from code that is not async, and who counts as a pass."""

import asyncio
import time

import pytest
import torch
from peer_world import GOLDEN, LOGGED_MAXIMA, T1, T3, ScriptedGrader
from torch.testing import assert_close

from gagar_mini.credit import share_rewards
from gagar_mini.integrations import verl
from gagar_mini.integrations.groups import (
    GradingJob,
    as_candidate,
    grade_all,
    task_of_text,
    worst_case_s,
)
from gagar_mini.types import Status, UnusableGrade


def job(rewards, key="0"):
    candidates = tuple(
        as_candidate(f"m{i}", b"", float(reward)) for i, reward in enumerate(rewards)
    )
    return GradingJob(key, task_of_text("fix it"), candidates, seed=0)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers_from_a_grade(name):
    tiers, num_failures, rule, passes, failure = GOLDEN[name]
    rewards = [1.0] * len(tiers) + [0.0] * num_failures
    graded = grade_all(ScriptedGrader(tiers), [job(rewards)], 5.0)[0]
    ids = [f"m{i}" for i in range(len(rewards))]
    credit = share_rewards(rewards, ids, graded.grade, rule=rule)
    expected = torch.tensor([*passes, *[failure] * num_failures]).double()
    assert_close(credit.after, expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("tiers", LOGGED_MAXIMA)
def test_maxima_of_the_published_run(tiers):
    rewards = [1.0] * len(tiers) + [0.0] * (16 - len(tiers))
    graded = grade_all(ScriptedGrader(tiers), [job(rewards)], 5.0)[0]
    credit = share_rewards(rewards, [f"m{i}" for i in range(16)], graded.grade)
    assert credit.after.max().item() == pytest.approx(LOGGED_MAXIMA[tiers], abs=5e-6)


def test_outcomes_told_apart_from_rewards():
    # the third passed, the second only looks good: A = 1/6 1/6 -1/3, f on the third
    grade = grade_all(ScriptedGrader((T3,)), [job([0, 0, 1])], 5.0)[0].grade
    credit = share_rewards(
        [1.0, 1.0, 0.5], ["m0", "m1", "m2"], grade, passed=[False, False, True]
    )
    assert credit.passed.tolist() == [False, False, True]
    # a pass below the mean has no positive credit to share
    assert_close(credit.after, credit.before)


def test_statuses_of_candidates():
    found = [as_candidate("m", b"", r).outcome.status for r in (1.0, 0.0, None)]
    assert found == [Status.PASS, Status.FAIL, Status.INFRA]


class Moody:
    """Grades the first group, refuses the second, blocks its thread on the third."""

    async def grade(self, task, candidates, seed):
        number = int(task.id)
        if number == 1:
            raise UnusableGrade("malformed")
        if number == 2:
            await asyncio.sleep(0.5)  # a blocked thread delays those not yet answered
            time.sleep(20)
        return await ScriptedGrader((T1, T3)).grade(task, candidates, seed)


def test_each_group_has_its_own_fate_also_under_a_running_loop():
    jobs = [
        GradingJob(str(i), task_of_text("", str(i)), job([1, 1, 0]).candidates, 0)
        for i in range(3)
    ]

    async def notebook_cell():
        return grade_all(Moody(), jobs, 1.0)

    started = time.monotonic()
    results = asyncio.run(notebook_cell())
    assert time.monotonic() - started < 15
    assert [(r.key, r.fallback_reason) for r in results[1:]] == [
        ("1", "malformed"),
        ("2", "timeout"),
    ]
    assert worst_case_s(17, 60.0) == 180.0  # eight at once


def test_rows_of_a_session_are_one_member_of_its_group():
    found = verl.members_of(["a", "b", "a", "a"], ["a_0", "b_0", "a_1", "a_0"])
    assert found == {"a": [[0, 3], [2]], "b": [[1]]}
