"""Who deserves how much of the group's credit: the paper's contribution, in four forms.

A grade becomes a factor f in (0, 1] per passing member; the positive credit of the
group is then shared in proportion to f * A. `redistribute` keeps the passing sum
exactly (GAGAR, Eq. 2); `redistribute_bounded` is what the paper trained with (Eqs 7-8);
`downweight_only` is its ablation; `redistribute_token_mass` is ours. Broadcasting to
tokens is left to `learn`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gagar_mini.credit.inputs import (
    ArrayLike,
    as_factors,
    as_flags,
    as_lengths,
    as_valid,
    as_values,
)

TIERS = ("T1", "T2", "T3")


@dataclass(frozen=True)
class FactorConstants:
    """Factor of a T1 member below the top (`run`), of the first and last tied group of
    T2 (`max`, `min`), and of T3 (`low`). The top of T1 always has 1."""

    f_run: float = 0.9
    f_max: float = 0.85
    f_min: float = 0.40
    f_low: float = 0.2


PAPER_FLASH = FactorConstants()
"""The Flash configuration of the paper's appendix A.1."""


def quality_factors(
    tiers: Sequence[str | None],
    order: ArrayLike,
    *,
    constants: FactorConstants = PAPER_FLASH,
) -> Tensor:
    """Quality factor of each member [G], float64, from tier and order (GAGAR, Eq. 6).

    `order` compares members inside a tier only: smaller is better, equal is a tie. The
    step inside T2 counts tied groups, not members. A member without a tier (a failure,
    or a pass nobody graded) has factor 1.
    """
    order = as_values("order", order).tolist()
    if len(order) != len(tiers):
        raise ValueError(f"{len(tiers)} tiers, but order has {len(order)} members")
    for member, tier in enumerate(tiers):
        if tier is not None and tier not in TIERS:
            raise ValueError(f"tiers[{member}] is {tier!r}: must be in {TIERS} or None")
    tied_groups = {
        tier: sorted({o for t, o in zip(tiers, order, strict=True) if t == tier})
        for tier in TIERS
    }
    factors = [
        1.0
        if tier is None
        else _factor(
            tier, tied_groups[tier].index(o), len(tied_groups[tier]), constants
        )
        for tier, o in zip(tiers, order, strict=True)
    ]
    return torch.tensor(factors, dtype=torch.float64)


def redistribute(
    advantages: ArrayLike, passed: ArrayLike, factors: ArrayLike
) -> Tensor:
    """Share the credit of the passing members by quality (GAGAR, Eq. 2).

    A'_i = credit_scale * f_i * A_i on the passing set P, A_i elsewhere; credit_scale =
    sum_P A / sum_P f A keeps the passing sum. Failures are untouched, and A'_i / A'_k =
    f_i / f_k where A_i = A_k. Only ratios of factors matter. A pass with a negative
    advantage is a ValueError, since the scale could then flip signs: use
    `redistribute_bounded` there.
    """
    advantages, passed, factors = _as_group(advantages, passed, factors)
    _refuse_negative_passes(advantages, passed)
    shared = factors * advantages
    total = shared[passed].sum()
    if total == 0:
        return advantages
    scale = advantages[passed].sum() / total
    return torch.where(passed, scale * shared, advantages)


def redistribute_bounded(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    max_scale: float = 1.5,
    valid: ArrayLike | None = None,
) -> Tensor:
    """The form the paper trained with: a capped scale, then a new mean (Eqs 7-8).

    a_i = max(A_i, 0) on P; lambda = min(sum_P a / sum_P f a, max_scale);
    B_i = lambda f_i a_i on P, A_i elsewhere; A'_i = B_i - mean(B) over valid members.

    With an idle cap it equals `redistribute`. When the cap is hit, zero mean is all
    that it promises: the passing sum, the ratios and the failures' values all change. A
    pass below the group mean (rewards that are not binary) keeps no positive credit.
    Without positive credit to share it returns A.
    """
    advantages, passed, factors = _as_group(advantages, passed, factors)
    if max_scale < 1:
        raise ValueError(f"max_scale is {max_scale}: it must be at least 1")
    valid = as_valid(valid, advantages)
    advantages = torch.where(valid, advantages, 0.0)
    passed = passed & valid
    positive = advantages.clamp(min=0)
    if not positive[passed].any():
        return advantages
    scale = credit_scale(advantages, passed, factors).clamp(max=max_scale)
    bounded = torch.where(passed, scale * factors * positive, advantages)
    return torch.where(valid, bounded - bounded[valid].mean(), 0.0)


def credit_scale(
    advantages: ArrayLike, passed: ArrayLike, factors: ArrayLike
) -> Tensor:
    """The uncapped scale lambda >= 1, a scalar: sum_P a / sum_P f a, a = max(A, 0).

    The cap of the bounded form is hit where this exceeds `max_scale`. 1 where there is
    no positive credit to share.
    """
    advantages, passed, factors = _as_group(advantages, passed, factors)
    positive = advantages.clamp(min=0)[passed]
    total = (factors[passed] * positive).sum()
    return positive.sum() / total if total > 0 else torch.ones_like(total)


def downweight_only(
    advantages: ArrayLike, passed: ArrayLike, factors: ArrayLike
) -> Tensor:
    """A'_i = f_i A_i on P, A_i elsewhere: no scale, no new mean (the paper's ablation).

    The group sum falls below zero by sum_P (1 - f) A: net negative pressure in each
    step.
    """
    advantages, passed, factors = _as_group(advantages, passed, factors)
    return torch.where(passed, factors * advantages, advantages)


def redistribute_token_mass(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    lengths: ArrayLike,
) -> Tensor:
    """Like `redistribute`, but keeps sum_P l A: the credit that *tokens* of passes get.

    credit_scale = sum_P l A / sum_P l f A, with l the action tokens of a member. Under
    a token-mean loss the sequence sum of Eq. 2 does not conserve this mass. Differs
    from the paper: it discusses the sequence sum only.
    """
    advantages, passed, factors = _as_group(advantages, passed, factors)
    _refuse_negative_passes(advantages, passed)
    mass = as_lengths(lengths, advantages) * advantages
    total = (factors * mass)[passed].sum()
    if total == 0:
        return advantages
    scale = mass[passed].sum() / total
    return torch.where(passed, scale * factors * advantages, advantages)


def _factor(
    tier: str, tied_group: int, num_tied_groups: int, constants: FactorConstants
) -> float:
    if tier == "T3":
        return constants.f_low
    if tier == "T1":
        return 1.0 if tied_group == 0 else constants.f_run
    if num_tied_groups == 1:
        return constants.f_max
    share = tied_group / (num_tied_groups - 1)
    return constants.f_max - (constants.f_max - constants.f_min) * share


def _as_group(
    advantages: ArrayLike, passed: ArrayLike, factors: ArrayLike
) -> tuple[Tensor, Tensor, Tensor]:
    advantages = as_values("advantages", advantages)
    passed = as_flags("passed", passed, advantages)
    return advantages, passed, as_factors(factors, advantages)


def _refuse_negative_passes(advantages: Tensor, passed: Tensor) -> None:
    is_negative = passed & (advantages < 0)
    if is_negative.any():
        member = int(is_negative.nonzero()[0])
        raise ValueError(
            f"advantages[{member}] is {advantages[member].item()}, but it passed: the "
            "exact form needs passes at or above the group mean; see the bounded form"
        )
