"""Rewards of one group -> advantages: worked numbers, edge cases, probabilities."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from gagar_mini.credit import (
    gradable_probability,
    group_advantages,
    informative_probability,
    is_gradable,
    is_informative,
    leave_one_out_advantages,
    revoke_confirmed_hacks,
)

THREE_OF_EIGHT = [1, 1, 1, 0, 0, 0, 0, 0]


def float64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_one_pass_in_four_without_scaling():
    expected = float64([3 / 4, -1 / 4, -1 / 4, -1 / 4])  # mean 1/4
    assert_close(group_advantages([1, 0, 0, 0]), expected)


def test_one_pass_in_four_by_population_std():
    std = math.sqrt(1 / 4 * 3 / 4)
    expected = float64([0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std])  # 1.73
    assert_close(group_advantages([1, 0, 0, 0], scale_by_std=True), expected)


def test_published_arithmetic_of_the_rivals():
    centred = float64([5 / 8] * 3 + [-3 / 8] * 5)
    assert_close(group_advantages(THREE_OF_EIGHT), centred)
    leave_one_out = float64([1 - 2 / 7] * 3 + [0 - 3 / 7] * 5)
    assert_close(leave_one_out_advantages(THREE_OF_EIGHT), leave_one_out)
    z_score = float64([1.290994] * 3 + [-0.774597] * 5)
    scaled = group_advantages(THREE_OF_EIGHT, scale_by_std=True)
    assert_close(scaled, z_score, atol=1e-6, rtol=0)


def test_win_share_rewards_by_population_std():
    rewards = [1.5, 1.0, 0.5, 0, 0, 0, 0, 0]  # mean 3/8
    expected = float64([2.0647, 1.1471, 0.2294] + [-0.6882] * 5)
    scaled = group_advantages(rewards, scale_by_std=True)
    assert_close(scaled, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("rewards", [[0, 0, 0], [1, 1, 1], [0.1, 0.1, 0.1], [1]])
@pytest.mark.parametrize("scale_by_std", [False, True])
def test_equal_rewards_give_exact_zeros(rewards, scale_by_std):
    advantages = group_advantages(rewards, scale_by_std=scale_by_std)
    assert advantages.tolist() == [0.0] * len(rewards)
    assert leave_one_out_advantages(rewards).tolist() == [0.0] * len(rewards)
    assert not is_informative(rewards)


def test_nearly_equal_rewards_are_not_blown_up_by_the_std():
    rewards = [0.3, 0.1 + 0.2, 0.3]  # differ by 5e-17
    assert group_advantages(rewards, scale_by_std=True).tolist() == [0.0, 0.0, 0.0]


def test_invalid_members_are_in_no_mean_and_get_zero():
    valid = [True, False, True, True]
    expected = float64([2 / 3, 0, -1 / 3, -1 / 3])  # mean of 1, 0, 0
    assert_close(group_advantages([1, 1, 0, 0], valid=valid), expected)
    others = float64([1 - 0, 0, 0 - 1 / 2, 0 - 1 / 2])
    assert_close(leave_one_out_advantages([1, 1, 0, 0], valid=valid), others)
    assert group_advantages([1, 0], valid=[False, False]).tolist() == [0.0, 0.0]
    assert leave_one_out_advantages([1, 0], valid=[True, False]).tolist() == [0, 0]


def test_a_revoked_hack_is_an_ordinary_failure():
    rewards = revoke_confirmed_hacks([1, 1, 0, 0], [False, True, False, False])
    assert_close(group_advantages(rewards), float64([3 / 4, -1 / 4, -1 / 4, -1 / 4]))


def test_advantages_follow_their_members():
    rewards = torch.rand(7, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    assert_close(group_advantages(rewards[order]), group_advantages(rewards)[order])


@pytest.mark.parametrize(
    ("rewards", "valid", "informative", "gradable"),
    [
        ([1, 1, 0], None, True, True),
        ([1, 0, 0], None, True, False),  # a single pass has nobody to share with
        ([1, 1, 1], None, False, False),  # no failure: all advantages are 0
        ([1, 1, 0], [1, 0, 1], True, False),
        ([1, 1, 0], [1, 1, 0], False, False),
        ([1, 1, 0], [0, 0, 0], False, False),
    ],
)
def test_which_groups_teach(rewards, valid, informative, gradable):
    assert is_informative(rewards, valid) is informative
    assert is_gradable(rewards, valid) is gradable


@pytest.mark.parametrize("group_size", [2, 3, 5])
@pytest.mark.parametrize("rate", [0.0, 0.2, 0.7, 1.0])
def test_probabilities_equal_the_enumeration(group_size, rate):
    groups = list(itertools.product([0, 1], repeat=group_size))
    weight = [rate ** sum(g) * (1 - rate) ** (group_size - sum(g)) for g in groups]
    informative = sum(
        w for w, g in zip(weight, groups, strict=True) if 0 < sum(g) < group_size
    )
    gradable = sum(
        w for w, g in zip(weight, groups, strict=True) if 1 < sum(g) < group_size
    )
    assert float(informative_probability(rate, group_size)) == pytest.approx(
        informative
    )
    assert float(gradable_probability(rate, group_size)) == pytest.approx(gradable)


def test_mixed_share_at_a_low_pass_rate():
    shares = [float(informative_probability(0.2, g)) for g in (2, 4, 8, 16)]
    assert shares == pytest.approx([0.32, 0.59, 0.83, 0.97], abs=0.005)


def test_every_container_gives_the_same_numbers():
    expected = group_advantages([1, 0, 0])
    as_array = np.array([1, 0, 0, 0])[::-1][1:][::-1]  # a view with negative strides
    for rewards in (as_array, torch.tensor([1, 0, 0]), np.array([True, False, False])):
        result = group_advantages(rewards)
        assert result.dtype == torch.float64
        assert_close(result, expected)
    assert group_advantages(torch.tensor([1.0, 0.0])).dtype == torch.float32
    assert group_advantages(np.float32([1, 0])).dtype == torch.float32


@pytest.mark.parametrize(
    ("rewards", "valid", "message"),
    [
        ([1, math.nan, 0], None, r"rewards\[1\] is nan"),
        ([1, 0, math.inf], None, r"rewards\[2\] is inf"),
        ([[1, 0], [0, 1]], None, r"shape \[2, 2\]"),
        ([1, None, 0], None, "must be numbers"),
        ([1, 0], [True], "valid has 1 members, but the group has 2"),
        ([1, 0], [1, 0.5], r"valid\[1\] is 0.5"),
    ],
)
def test_what_cannot_be_meant_is_refused(rewards, valid, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, valid=valid)


def test_a_group_of_one_and_an_impossible_rate_are_refused():
    with pytest.raises(ValueError, match="at least 2"):
        informative_probability(0.5, 1)
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        gradable_probability(1.2, 4)
