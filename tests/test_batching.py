"""Padding, masks and splits: none of them may change the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic import FAIL, INFRA, PASS, make_group
from torch.testing import assert_close

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.learn.batching import (
    build_batch,
    padded,
    split_micro_batches,
    split_minibatches,
)
from gagar_mini.learn.losses import add_sums, clipped_policy_loss

CONFIG = RunConfig()


def two_groups():
    groups = [
        make_group([PASS, FAIL, INFRA], group_id="a", lengths=[5, 70, 6], seed=1),
        make_group([FAIL, PASS], group_id="b", lengths=[9, 4], seed=2),
    ]
    return groups, [torch.tensor([0.5, -0.5, 0.0]), torch.tensor([-0.5, 0.5])]


def test_rows_carry_their_own_tokens_and_infra_is_left_out():
    groups, advantages = two_groups()
    batch = build_batch(groups, advantages, CONFIG)
    assert batch.lengths.tolist() == [5, 70, 9, 4]  # the third of group a is not there
    assert batch.advantages.tolist() == [0.5, -0.5, -0.5, 0.5]
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.ids.shape == (4, 128)  # 70 rounded up to a multiple of 64
    for row, trajectory in enumerate(
        (*groups[0].trajectories[:2], *groups[1].trajectories)
    ):
        length = len(trajectory.ids)
        assert np.array_equal(batch.ids[row, :length], trajectory.ids)
        assert np.array_equal(batch.action_mask[row, :length], trajectory.action_mask)
        assert not batch.action_mask[row, length:].any()


def test_a_trajectory_beyond_the_context_is_refused_and_not_cut():
    config = with_overrides(CONFIG, {"rollout.max_context_tokens": 64})
    groups, advantages = two_groups()
    with pytest.raises(ValueError, match="'a/1' has 70 tokens"):
        build_batch(groups, advantages, config)


def test_minibatches_hold_whole_groups_and_weigh_their_own_tokens():
    groups = [make_group([PASS, FAIL], group_id=str(i), seed=i) for i in range(5)]
    batch = build_batch(groups, [torch.tensor([0.5, -0.5])] * 5, CONFIG)
    minibatches = split_minibatches(batch, 2, aggregation="token-mean", seed=3)
    members = [set(m.group_index.tolist()) for m in minibatches]
    assert sorted(map(len, members)) == [2, 3]
    assert set.union(*members) == set(range(5))
    for minibatch in minibatches:
        assert len(minibatch) == 2 * len(set(minibatch.group_index.tolist()))
        assert_close(minibatch.token_weights.sum(), torch.tensor(1.0))
    again = split_minibatches(batch, 2, aggregation="token-mean", seed=3)
    assert [m.group_index.tolist() for m in again] == [
        m.group_index.tolist() for m in minibatches
    ]
    orders = {
        tuple(
            split_minibatches(batch, 2, aggregation="token-mean", seed=s)[
                0
            ].group_index.tolist()
        )
        for s in range(8)
    }
    assert len(orders) > 1


def test_empty_batches_and_masked_groups_are_no_ops():
    empty = build_batch([], [], CONFIG)
    assert len(empty) == 0
    assert split_minibatches(empty, 2, aggregation="token-mean", seed=0) == []
    assert split_micro_batches(empty, 64) == []
    group = make_group([PASS, FAIL])
    silent = replace(
        group,
        trajectories=tuple(
            replace(t, action_mask=np.zeros(len(t.ids), dtype=bool))
            for t in group.trajectories
        ),
    )
    batch = build_batch([silent], [torch.zeros(2)], CONFIG)
    assert split_minibatches(batch, 2, aggregation="token-mean", seed=0) == []


@pytest.mark.parametrize("aggregation", ["token-mean", "prompt-mean", "sequence-mean"])
def test_any_split_into_micro_batches_adds_up_to_the_whole(aggregation):
    groups, advantages = two_groups()
    batch = build_batch(groups, advantages, CONFIG)
    (whole,) = split_minibatches(batch, 1, aggregation=aggregation, seed=0)

    def total(max_tokens):
        parts = split_micro_batches(whole, max_tokens)
        losses, sums = zip(*(loss_of(part) for part in parts), strict=True)
        return len(parts), sum(losses), add_sums(*sums)

    num_parts, loss, sums = total(10_000)
    assert num_parts == 1
    for max_tokens, expected_parts in ((1, 4), (128, 3), (64 * 3, 2)):
        num_parts, split_loss, split_sums = total(max_tokens)
        assert num_parts == expected_parts
        assert_close(split_loss, loss)
        assert_close(split_sums, sums)


def test_micro_batches_stay_inside_their_budget():
    rng = np.random.default_rng(0)
    lengths = [int(n) for n in rng.integers(4, 400, 24)]
    group = make_group([PASS] * 24, lengths=lengths)
    batch = build_batch([group], [torch.zeros(24)], CONFIG)
    parts = split_micro_batches(batch, 1024)
    assert all(part.ids.numel() <= 1024 for part in parts)
    assert sorted(n for part in parts for n in part.lengths.tolist()) == sorted(lengths)
    assert all(part.ids.shape[1] == padded(int(part.lengths.max())) for part in parts)


def loss_of(part):
    """The loss under made-up log-probs that depend on the tokens alone."""
    logprobs = torch.where(part.action_mask, -part.ids.float() / 32, 0.0)
    return clipped_policy_loss(
        logprobs,
        part.behaviour_logprobs,
        part.advantages,
        part.action_mask,
        weights=part.token_weights,
    )
