"""From rewards and a grade to the advantages that train, in the order the paper needs.

mask infra -> revoke confirmed hacks -> group statistics -> quality factors -> rule.
This is the whole method but for its grader: our own trainer and those of others come
through here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gagar_mini.credit.advantages import group_advantages, revoke_confirmed_hacks
from gagar_mini.credit.inputs import ArrayLike, as_flags, as_valid, as_values
from gagar_mini.credit.redistribution import credit_scale, quality_factors
from gagar_mini.credit.rules import CREDIT_RULES
from gagar_mini.types import GroupGrade


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


def share_rewards(
    rewards: ArrayLike,
    ids: Sequence[str],
    grade: GroupGrade | None,
    *,
    rule: str = "gagar",
    max_scale: float = 1.5,
    scale_by_std: bool = False,
    valid: ArrayLike | None = None,
    passed: ArrayLike | None = None,
) -> GroupCredit:
    """The credit of one group whose members [G] have `rewards` and `ids`.

    A pass is a positive reward unless `passed` says otherwise (rewards that hold more
    than the outcome). A group without a grade keeps its advantages to the bit, whatever
    the rule. A confirmed hack has reward 0 and is no pass.
    """
    rewards = as_values("rewards", rewards)
    valid = as_valid(valid, rewards)
    hacks = grade.confirmed_hacks if grade else ()
    hacked = as_flags("hacked", [name in hacks for name in ids], rewards)
    rewards = revoke_confirmed_hacks(rewards, hacked)
    before = group_advantages(rewards, scale_by_std=scale_by_std, valid=valid)
    passed = rewards > 0 if passed is None else as_flags("passed", passed, rewards)
    passed = passed & valid & ~hacked
    factors = _factors(ids, grade)
    after = before
    if grade is not None:
        after = CREDIT_RULES[rule](
            before, passed, factors, valid=valid, max_scale=max_scale
        )
    scale = float(credit_scale(before, passed, factors))
    return GroupCredit(
        before=before,
        after=after,
        factors=factors,
        passed=passed,
        scale=scale,
        # Rounding must not turn a scale that meets the cap into one that exceeds it.
        is_cap_hit=scale > max_scale + 1e-9,
    )


def _factors(ids: Sequence[str], grade: GroupGrade | None) -> Tensor:
    grades = grade.grades if grade else {}
    tiers = [grades[name].tier.value if name in grades else None for name in ids]
    order = [grades[name].order if name in grades else 0 for name in ids]
    return quality_factors(tiers, order)
