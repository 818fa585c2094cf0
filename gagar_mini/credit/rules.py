"""Credit rules behind one signature, by the name that `--credit.rule` takes.

A rule maps (advantages, passed, factors), each [G], to the advantages that train. A new
rule is one function here and one line in `CREDIT_RULES`.
"""

from typing import Protocol

from torch import Tensor

from gagar_mini.credit.inputs import ArrayLike, as_valid, as_values
from gagar_mini.credit.redistribution import (
    downweight_only,
    redistribute,
    redistribute_bounded,
)


class Rule(Protocol):
    """Advantages after the grade, [G]; invalid members are 0 before and after."""

    def __call__(
        self,
        advantages: ArrayLike,
        passed: ArrayLike,
        factors: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        max_scale: float = 1.5,
    ) -> Tensor: ...


def binary(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    max_scale: float = 1.5,
) -> Tensor:
    """The baseline: tests alone decide, every pass is worth the same."""
    return _mask(advantages, valid)


def downweight(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    max_scale: float = 1.5,
) -> Tensor:
    """The ablation: factors applied, nothing restored."""
    return downweight_only(_mask(advantages, valid), passed, factors)


def gagar(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    max_scale: float = 1.5,
) -> Tensor:
    """The paper's training form (Eqs 7-8): scale capped at `max_scale`, new mean."""
    return redistribute_bounded(
        advantages, passed, factors, max_scale=max_scale, valid=valid
    )


def gagar_exact(
    advantages: ArrayLike,
    passed: ArrayLike,
    factors: ArrayLike,
    *,
    valid: ArrayLike | None = None,
    max_scale: float = 1.5,
) -> Tensor:
    """The sum-preserving form (Eq. 2), uncapped."""
    return redistribute(_mask(advantages, valid), passed, factors)


CREDIT_RULES: dict[str, Rule] = {
    "binary": binary,
    "downweight": downweight,
    "gagar": gagar,
    "gagar-exact": gagar_exact,
}


def _mask(advantages: ArrayLike, valid: ArrayLike | None) -> Tensor:
    advantages = as_values("advantages", advantages)
    return advantages.where(as_valid(valid, advantages), 0.0)
