"""The paper's step: published numbers first, then what must hold for every group."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gagar_mini.credit import (
    CREDIT_RULES,
    credit_scale,
    downweight_only,
    group_advantages,
    quality_factors,
    redistribute,
    redistribute_bounded,
    redistribute_token_mass,
)

RULES = sorted(CREDIT_RULES)


def float64(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def binary_group(num_passes: int, num_failures: int, pass_factors):
    """Advantages, passing set and factors of a group with its passes first."""
    rewards = [1.0] * num_passes + [0.0] * num_failures
    factors = [*pass_factors, *[1.0] * num_failures]
    return group_advantages(rewards), float64(rewards) == 1, float64(factors)


def random_groups(count: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Mixed binary groups of 3 to 16 members with factors in [0.2, 1], in any order."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        size = int(torch.randint(3, 17, (), generator=generator))
        num_passes = int(torch.randint(1, size, (), generator=generator))
        passed = torch.randperm(size, generator=generator) < num_passes
        draws = torch.rand(size, generator=generator, dtype=torch.float64)
        factors = torch.where(passed, 0.2 + 0.8 * draws, 1.0)
        yield group_advantages(passed), passed, factors


# --- published and hand-made numbers --------------------------------------------------


def test_half_quality_gets_half_credit():
    group = binary_group(2, 2, [1, 0.5])  # credit scale 1 / 0.75 = 4/3
    assert float(credit_scale(*group)) == pytest.approx(4 / 3)
    expected = float64([4 / 3 / 2, 4 / 3 / 4, -1 / 2, -1 / 2])
    assert_close(redistribute(*group), expected)
    assert_close(redistribute_bounded(*group), expected)


def test_the_cap_moves_the_failures_too():
    group = binary_group(2, 2, [1, 0.2])  # credit scale 1 / 0.6 = 5/3, above 1.5
    assert_close(redistribute(*group), float64([5 / 6, 1 / 6, -1 / 2, -1 / 2]))
    # capped: 0.75 and 0.15, whose excess over the failures is -0.1 / 4 = -0.025
    assert_close(redistribute_bounded(*group), float64([0.775, 0.175, -0.475, -0.475]))


def test_three_passes_in_eight_under_three_rules():
    group = binary_group(3, 5, [1, 0.85, 0.4])  # mean factor 0.75
    shared = float64([5 / 8 / 0.75 * f for f in (1, 0.85, 0.4)] + [-3 / 8] * 5)
    assert_close(redistribute(*group), shared)
    lowered = float64([5 / 8 * f for f in (1, 0.85, 0.4)] + [-3 / 8] * 5)
    assert_close(downweight_only(*group), lowered)
    assert float(lowered.sum()) == pytest.approx(5 / 8 * 3 * (0.75 - 1))  # -0.46875
    recentred = float64([0.68359, 0.58984, 0.30859] + [-0.31641] * 5)
    assert_close(lowered - lowered.mean(), recentred, atol=1e-5, rtol=0)


def test_rewards_that_are_not_binary_share_their_positive_part():
    advantages = group_advantages([1, 0.8, 0.2, 0, 0, 0])  # mean 1/3
    passed, factors = [1, 1, 1, 0, 0, 0], [1, 0.5, 0.9, 1, 1, 1]
    scale = (2 / 3 + 0.8 - 1 / 3) / (2 / 3 + 0.5 * (0.8 - 1 / 3))
    assert float(credit_scale(advantages, passed, factors)) == pytest.approx(scale)
    expected = float64([0.81728, 0.27160, -0.02222] + [-0.35556] * 3)
    result = redistribute_bounded(advantages, passed, factors)
    assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("tiers", "logged"),
    [
        (["T1", "T2", "T2"], 1.08333),
        (["T2", "T2"], 1.12246),  # a group without a T1
        (["T1", "T2", "T2", "T2"], 1.12617),  # the last two are tied
        (["T1", "T3"], 1.32344),
    ],
)
def test_largest_advantages_that_the_public_run_logged(tiers, logged):
    num_failures = 16 - len(tiers)
    order = [0, 1, 2, 2][: len(tiers)] + [0] * num_failures
    factors = quality_factors([*tiers, *[None] * num_failures], order)
    advantages, passed, _ = binary_group(len(tiers), num_failures, [1] * len(tiers))
    result = redistribute_bounded(advantages, passed, factors)
    assert float(result.max()) == pytest.approx(logged, abs=5e-6)


def test_sixteen_members_two_passes_with_and_without_the_cap():
    group = binary_group(2, 14, [1, 0.2])
    bounded = float64([1.32344, 0.27344] + [-0.11406] * 14)
    assert_close(redistribute_bounded(*group), bounded, atol=5e-6, rtol=0)
    exact = float64([0.875 / 0.6, 0.2 * 0.875 / 0.6] + [-0.125] * 14)
    assert_close(redistribute(*group), exact)


def test_equal_factors_below_the_cap_stay_tied_and_lose_credit():
    advantages, passed, factors = binary_group(2, 2, [0.625, 0.625])  # lambda 1.6
    result = redistribute_bounded(advantages, passed, factors)
    assert result[0] == result[1] < advantages[0]


def test_token_mass_needs_its_own_scale():
    advantages, passed, factors = binary_group(3, 5, [1, 0.85, 0.4])
    lengths = float64([60, 100, 200, 80, 80, 80, 80, 80])
    mass = (lengths * advantages)[passed].sum()
    by_sequence = (lengths * redistribute(advantages, passed, factors))[passed].sum()
    assert float(by_sequence / mass) == pytest.approx(300 / 360)
    kept = redistribute_token_mass(advantages, passed, factors, lengths=lengths)
    assert_close((lengths * kept)[passed].sum(), mass)
    assert float(kept[0]) == pytest.approx(1.6 * 5 / 8)  # not 4/3 of 5/8


# --- factors --------------------------------------------------------------------------


def test_factors_follow_tier_and_tied_group():
    tiers = ["T1", "T1", "T1", "T2", "T2", "T2", "T2", "T3", "T3", None]
    order = [3, 3, 8, 1, 5, 5, 9, 0, 1, 0]  # T2 has three tied groups
    expected = [1, 1, 0.9, 0.85, 0.625, 0.625, 0.4, 0.2, 0.2, 1]
    assert quality_factors(tiers, order).tolist() == pytest.approx(expected)


def test_order_compares_inside_a_tier_only():
    assert quality_factors(["T2", "T1"], [0, 7]).tolist() == [0.85, 1.0]
    assert quality_factors(["T2", "T2"], [4, 4]).tolist() == [0.85, 0.85]


def test_an_unknown_tier_is_refused_by_member():
    with pytest.raises(ValueError, match=r"tiers\[1\] is 'T4'"):
        quality_factors(["T1", "T4"], [0, 0])
    with pytest.raises(ValueError, match="2 tiers, but order has 1"):
        quality_factors(["T1", "T2"], [0])


# --- what holds for every group -------------------------------------------------------


def test_redistribution_moves_but_does_not_create():
    for advantages, passed, factors in random_groups(200):
        new = redistribute(advantages, passed, factors)
        assert_close(new[passed].sum(), advantages[passed].sum())
        assert torch.equal(new[~passed], advantages[~passed])
        assert (new[passed] > 0).all()  # no sign flips
        credit_per_factor = new[passed] / factors[passed]
        assert_close(
            credit_per_factor, credit_per_factor[:1].expand_as(credit_per_factor)
        )
        assert_close(redistribute(advantages, passed, factors * 0.3), new)


def test_bounded_equals_exact_under_an_idle_cap_and_is_centred_above_it():
    hits = 0
    for advantages, passed, factors in random_groups(200):
        new = redistribute_bounded(advantages, passed, factors)
        if credit_scale(advantages, passed, factors) <= 1.5:
            assert_close(new, redistribute(advantages, passed, factors))
        else:
            hits += 1
            assert new[passed].sum() < advantages[passed].sum()
        assert abs(float(new.mean())) < 1e-15
    assert 20 < hits < 180  # both branches were seen


@pytest.mark.parametrize("rule", RULES)
def test_members_keep_their_credit_wherever_they_stand(rule):
    for advantages, passed, factors in random_groups(50):
        order = torch.randperm(len(passed), generator=torch.Generator().manual_seed(1))
        new = CREDIT_RULES[rule](advantages, passed, factors)
        moved = CREDIT_RULES[rule](advantages[order], passed[order], factors[order])
        assert_close(moved, new[order])


@pytest.mark.parametrize("rule", ["gagar", "gagar-exact"])
def test_one_pass_or_equal_factors_change_nothing(rule):
    for num_passes, factor in [(1, 0.85), (1, 1.0), (3, 0.7), (3, 1.0)]:
        group = binary_group(num_passes, 4, [factor] * num_passes)
        assert_close(CREDIT_RULES[rule](*group), group[0])


@pytest.mark.parametrize("rule", RULES)
def test_invalid_members_are_masked_everywhere(rule):
    rewards, valid = [1, 1, 0, 0, 1], [True, True, True, True, False]
    advantages = group_advantages(rewards, valid=valid)
    factors = [1, 0.4, 1, 1, 1]
    new = CREDIT_RULES[rule](advantages, rewards, factors, valid=valid)
    without = CREDIT_RULES[rule](advantages[:4], rewards[:4], factors[:4])
    assert_close(new[:4], without)
    assert new[4] == 0


@pytest.mark.parametrize("rule", RULES)
def test_a_group_without_positive_credit_keeps_its_advantages(rule):
    for rewards in ([1, 1, 1], [0, 0, 0]):
        advantages = group_advantages(rewards)
        new = CREDIT_RULES[rule](advantages, rewards, [0.4, 0.9, 1])
        assert new.tolist() == [0.0, 0.0, 0.0]
    below = float64([-0.5, -0.1, 0.6])  # shaped rewards: both passes below the mean
    kept = redistribute_bounded(below, [1, 1, 0], [0.4, 1, 1])
    assert torch.equal(kept, below)
    zeros = redistribute_token_mass([0, 0], [1, 0], [1, 1], lengths=[5, 0])
    assert zeros.tolist() == [0.0, 0.0]


def test_an_exchangeable_grader_costs_variance_not_bias():
    advantages, passed, factors = binary_group(3, 5, [1, 0.85, 0.4])
    orders = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]]
    shuffled = [torch.cat([factors[:3][order], factors[3:]]) for order in orders]
    new = torch.stack([redistribute(advantages, passed, f) for f in shuffled])
    assert_close(new.mean(0), advantages)
    inflation = (new[:, passed] ** 2).mean() / (advantages[passed] ** 2).mean()
    assert float(inflation) == pytest.approx(3 * (1 + 0.85**2 + 0.4**2) / 2.25**2)


def test_the_caller_keeps_its_tensors_and_its_dtype():
    advantages, passed, factors = binary_group(2, 2, [1, 0.2])
    copies = [tensor.clone() for tensor in (advantages, passed, factors)]
    for rule in CREDIT_RULES.values():
        rule(advantages, passed, factors, valid=[True, True, True, False])
        assert rule(advantages.float(), passed, factors).dtype == torch.float32
    for tensor, copy in zip((advantages, passed, factors), copies, strict=True):
        assert torch.equal(tensor, copy)


# --- what cannot be meant -------------------------------------------------------------


@pytest.mark.parametrize("rule", ["downweight", "gagar", "gagar-exact"])
@pytest.mark.parametrize(
    ("advantages", "passed", "factors", "message"),
    [
        ([0.5, -0.5], [1, 0], [0.0, 1], r"factors\[0\] is 0.0"),
        ([0.5, -0.5], [1, 0], [1, 1.1], r"factors\[1\] is 1.1"),
        ([0.5, -0.5], [1, 0], [math.nan, 1], r"factors\[0\] is nan"),
        ([math.nan, -0.5], [1, 0], [1, 1], r"advantages\[0\] is nan"),
        ([0.5, -0.5], [1, 2], [1, 1], r"passed\[1\] is 2"),
        ([0.5, -0.5], [1, 0, 0], [1, 1], "passed has 3 members, but the group has 2"),
    ],
)
def test_a_bad_member_is_named(rule, advantages, passed, factors, message):
    with pytest.raises(ValueError, match=message):
        CREDIT_RULES[rule](advantages, passed, factors)


def test_the_exact_forms_refuse_a_pass_below_the_mean():
    group = ([0.7, -0.1, -0.6], [1, 1, 0], [1, 0.5, 1])
    with pytest.raises(ValueError, match=r"advantages\[1\] is -0.1, but it passed"):
        redistribute(*group)
    with pytest.raises(ValueError, match=r"advantages\[1\] is -0.1, but it passed"):
        redistribute_token_mass(*group, lengths=[1, 1, 1])


def test_a_cap_below_one_is_refused():
    with pytest.raises(ValueError, match=r"max_scale is 0\.9"):
        redistribute_bounded([0.5, -0.5], [1, 0], [1, 1], max_scale=0.9)
