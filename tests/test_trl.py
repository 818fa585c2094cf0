"""GAGAR inside the installed TRL: its tensors, its ranks, a real training step."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peer_world import GOLDEN, LOGGED_MAXIMA, T1, T3, ScriptedGrader
from torch.testing import assert_close

from gagar_mini.types import UnusableGrade

pytestmark = pytest.mark.peers


@pytest.fixture
def make_trainer(tmp_path):
    from trl_world import make_trainer

    return lambda **settings: make_trainer(tmp_path, **settings)


def trained_on(trainer):
    """The advantages of one generated and scored batch, [N]."""
    trainer.model.train()
    rows = next(iter(trainer.get_train_dataloader()))
    return trainer._generate_and_score_completions(rows)["advantages"]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers_arrive_in_the_tensors_of_trl(make_trainer, name):
    tiers, num_failures, rule, passes, failure = GOLDEN[name]
    rewards = [1.0] * len(tiers) + [0.0] * num_failures
    trainer = make_trainer(
        rewards=rewards,
        group_size=len(rewards),
        grader=ScriptedGrader(tiers),
        rule=rule,
    )
    expected = torch.tensor([*passes, *[failure] * num_failures])
    advantages = trained_on(trainer)
    assert advantages.dtype == torch.float32
    assert_close(advantages, expected, atol=5e-6, rtol=0)
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages.tolist())


@pytest.mark.parametrize("tiers", LOGGED_MAXIMA)
def test_maxima_of_the_published_run(make_trainer, tiers):
    rewards = [1.0] * len(tiers) + [0.0] * (16 - len(tiers))
    trainer = make_trainer(rewards=rewards, group_size=16, grader=ScriptedGrader(tiers))
    assert trained_on(trainer).max().item() == pytest.approx(
        LOGGED_MAXIMA[tiers], abs=5e-6
    )


def test_a_training_step_moves_weights_and_counts_what_happened(make_trainer):
    grader = ScriptedGrader((T1, T3))
    trainer = make_trainer(
        rewards=[1, 1, 0, 0, 0, 1, 0, 0], group_size=4, grader=grader
    )
    before = trainer.model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.lm_head.weight.detach(), before)
    ungraded = [-0.25, 0.75, -0.25, -0.25]  # a single pass: nobody to share with
    expected = torch.tensor([0.775, 0.175, -0.475, -0.475, *ungraded])
    assert_close(trainer.trained_on, expected, atol=5e-6, rtol=0)
    log = trainer.state.log_history[0]
    assert log["gagar/gradable_groups"] == 1 and log["gagar/fallback_share"] == 0
    assert log["gagar/credit_scale"] == pytest.approx(1 / 0.6)
    assert log["gagar/cap_hit_share"] == 1
    # the grader saw the completions themselves, of its own group only
    task, candidates = grader.seen[0]
    completions = list(trainer._logs["completion"])[:4]
    assert [c.patch.decode() for c in candidates] == completions
    assert task.statement == trainer._logs["prompt"][0]


def test_a_hack_is_a_failure_and_a_dead_harness_is_in_no_mean(make_trainer):
    # m1 hacked, m3 unknown: rewards 1 0 1 - 0, mean 1/2; graded (1, .2), cap 1.5
    trainer = make_trainer(
        rewards=[1, 1, 1, None, 0],
        group_size=5,
        grader=ScriptedGrader((T1, T3), hacks=("m1",)),
        rule="gagar-exact",
    )
    expected = torch.tensor([5 / 6, -0.5, 1 / 6, 0, -0.5])
    assert_close(trained_on(trainer), expected, atol=5e-6, rtol=0)


def test_a_format_reward_is_no_pass(make_trainer):
    def tests_pass(prompts, **_):
        return [1.0, 1.0, 0.0, 0.0]

    def is_tidy(prompts, **_):
        return [0.0, 0.0, 0.5, 0.0]

    settings = {
        "rewards": [0] * 4,
        "group_size": 4,
        "grader": ScriptedGrader((T1, T3)),
        "reward_funcs": [tests_pass, is_tidy],
    }
    with pytest.raises(ValueError, match="name the reward function"):
        make_trainer(**settings)
    # sums 1 1 .5 0, mean .625: A = .375 .375 -.125 -.625; lambda = min(1 / .6, 1.5)
    passes, rest = (1.5 * 0.375, 1.5 * 0.2 * 0.375), (-0.125, -0.625)
    mean = (sum(passes) + sum(rest)) / 4
    expected = torch.tensor([*passes, *rest]) - mean
    advantages = trained_on(make_trainer(**settings, outcome="tests_pass"))
    assert_close(advantages, expected, atol=5e-6, rtol=0)


class Refusing:
    async def grade(self, task, candidates, seed):
        raise UnusableGrade("malformed")


class Blocking:
    async def grade(self, task, candidates, seed):
        time.sleep(3)


class Sleeping:
    async def grade(self, task, candidates, seed):
        await asyncio.sleep(3)


@pytest.mark.parametrize(
    ("grader", "reason"),
    [(Refusing(), "malformed"), (Blocking(), "timeout"), (Sleeping(), "timeout")],
)
def test_without_a_grade_the_group_is_plain_grpo(make_trainer, grader, reason):
    trainer = make_trainer(
        rewards=[1, 1, 0, 0], group_size=4, grader=grader, grading_timeout_s=0.2
    )
    assert trained_on(trainer).tolist() == [0.5, 0.5, -0.5, -0.5]
    assert trainer._metrics["train"][f"gagar/fallback/{reason}"] == [1.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"scale_rewards": "group"}, "does not divide by a standard deviation"),
        ({"scale_rewards": "batch"}, "does not divide by a standard deviation"),
        (
            {"multi_objective_aggregation": "normalize_then_sum"},
            "sum_then_normalize",
        ),
    ],
)
def test_settings_that_are_not_the_method_are_refused(make_trainer, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_trainer(
            rewards=[1, 1, 0, 0],
            group_size=4,
            grader=ScriptedGrader((T1, T3)),
            **settings,
        )


def test_an_evaluation_asks_no_grader(make_trainer):
    grader = ScriptedGrader((T1, T3))
    trainer = make_trainer(rewards=[1, 1, 0, 0], group_size=4, grader=grader)
    trainer.model.eval()
    rows = [{"prompt": "a"}] * 4
    advantages = trainer._generate_and_score_completions(rows)["advantages"]
    assert advantages.tolist() == [0.5, 0.5, -0.5, -0.5] and grader.seen == []


def test_groups_cut_across_ranks_get_the_numbers_of_one_process(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone"]
    program = Path(__file__).with_name("trl_world.py")
    subprocess.run(
        [sys.executable, *launch, "--nproc-per-node", "2", program, tmp_path],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        timeout=280,
    )
    ranks = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("rank*.json"))]
    shared, single = [0.775, 0.175, -0.475, -0.475], [0.75, -0.25, -0.25, -0.25]
    swapped = [-0.475, 0.775, -0.475, 0.175]
    advantages = [a for rank in ranks for a in rank["advantages"]]
    assert advantages == pytest.approx([*shared, *single, *swapped], abs=5e-6)
    # each gradable group was graded once, on one rank; both ranks took the same step
    assert [rank["num_graded"] for rank in ranks] == [1, 1]
    assert ranks[0]["weight"] == ranks[1]["weight"]
