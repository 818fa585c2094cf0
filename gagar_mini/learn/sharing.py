"""From a group to the advantages that train it, in the order that the paper needs.

mask infra -> revoke confirmed hacks -> group statistics -> quality factors -> rule. A
group without a grade (nobody to rank, or a grade that could not be used) keeps its
advantages to the bit, whatever the rule.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gagar_mini.config import CreditConfig
from gagar_mini.credit import (
    CREDIT_RULES,
    credit_scale,
    group_advantages,
    quality_factors,
    revoke_confirmed_hacks,
)
from gagar_mini.types import RolloutGroup


@dataclass(frozen=True, eq=False)
class GroupCredit:
    """How the credit of one group was shared; every array is [G].

    `before` are the advantages of plain GRPO, `after` those that train. `scale` is the
    uncapped lambda that the grade asks for, whichever rule is in force; `is_cap_hit`
    tells whether it exceeds the cap.
    """

    before: Tensor
    after: Tensor
    factors: Tensor
    passed: Tensor
    scale: float
    is_cap_hit: bool


def share_credit(group: RolloutGroup, config: CreditConfig) -> GroupCredit:
    """The advantages of a group before and after its grade, float64."""
    ids = [trajectory.id for trajectory in group.trajectories]
    hacks = group.grade.confirmed_hacks if group.grade else ()
    valid = torch.from_numpy(group.valid)
    rewards = revoke_confirmed_hacks(group.rewards, [name in hacks for name in ids])
    before = group_advantages(rewards, scale_by_std=config.scale_by_std, valid=valid)
    passed = (rewards > 0) & valid
    factors = _factors(group, ids)
    after = before
    if group.grade is not None:
        after = CREDIT_RULES[config.rule](
            before, passed, factors, valid=valid, max_scale=config.max_scale
        )
    scale = float(credit_scale(before, passed, factors))
    return GroupCredit(
        before=before,
        after=after,
        factors=factors,
        passed=passed,
        scale=scale,
        # Rounding must not turn a scale that meets the cap into one that exceeds it.
        is_cap_hit=scale > config.max_scale + 1e-9,
    )


def _factors(group: RolloutGroup, ids: list[str]) -> Tensor:
    grades = group.grade.grades if group.grade else {}
    tiers = [grades[name].tier.value if name in grades else None for name in ids]
    order = [grades[name].order if name in grades else 0 for name in ids]
    return quality_factors(tiers, order)
