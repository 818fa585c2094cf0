"""Pure functions on one group of rewards: one equation, one function."""

from gagar_mini.credit.advantages import (
    gradable_probability,
    group_advantages,
    informative_probability,
    is_gradable,
    is_informative,
    leave_one_out_advantages,
    revoke_confirmed_hacks,
)
from gagar_mini.credit.redistribution import (
    PAPER_FLASH,
    FactorConstants,
    credit_scale,
    downweight_only,
    quality_factors,
    redistribute,
    redistribute_bounded,
    redistribute_token_mass,
)
from gagar_mini.credit.rules import CREDIT_RULES, Rule
from gagar_mini.credit.shared import GroupCredit, share_rewards

__all__ = [
    "CREDIT_RULES",
    "PAPER_FLASH",
    "FactorConstants",
    "GroupCredit",
    "Rule",
    "credit_scale",
    "downweight_only",
    "gradable_probability",
    "group_advantages",
    "informative_probability",
    "is_gradable",
    "is_informative",
    "leave_one_out_advantages",
    "quality_factors",
    "redistribute",
    "redistribute_bounded",
    "redistribute_token_mass",
    "revoke_confirmed_hacks",
    "share_rewards",
]
