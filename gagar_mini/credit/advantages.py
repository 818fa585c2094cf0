"""Rewards of one group -> advantages: how much better than its siblings a member did.

The base of GAGAR is the mean-centred reward without a standard deviation (MiMo-V2.6
report, section 4.3; Dr. GRPO, arXiv 2503.20783). The original GRPO and leave-one-out
are here for comparison. Invalid members (the harness failed) are in no mean and get 0.
"""

import torch
from torch import Tensor

from gagar_mini.credit.inputs import ArrayLike, as_flags, as_valid, as_values

REWARD_TOLERANCE = 1e-6
"""Rewards closer than this are equal; 0 and 1 are told apart exactly."""


def group_advantages(
    rewards: ArrayLike, *, scale_by_std: bool = False, valid: ArrayLike | None = None
) -> Tensor:
    """Reward of each member [G] relative to its group: A_i = r_i - mean(r).

    `scale_by_std=True` divides by the population standard deviation (original GRPO,
    arXiv 2402.03300); GAGAR does not, since with few passes or few failures the
    division enlarges them. Equal rewards give exact zeros: such a group teaches
    nothing.
    """
    rewards = as_values("rewards", rewards)
    valid = as_valid(valid, rewards)
    if not is_informative(rewards, valid):
        return torch.zeros_like(rewards)
    counted = rewards[valid]
    centred = torch.where(valid, rewards - counted.mean(), 0.0)
    return centred / counted.std(correction=0) if scale_by_std else centred


def leave_one_out_advantages(
    rewards: ArrayLike, *, valid: ArrayLike | None = None
) -> Tensor:
    """Reward of each member [G] minus the mean reward of the *others* (RLOO).

    Equals G / (G - 1) times the mean-centred advantage, with G the valid members. A
    member without siblings gets 0.
    """
    rewards = as_values("rewards", rewards)
    valid = as_valid(valid, rewards)
    num_valid = int(valid.sum())
    if num_valid < 2:
        return torch.zeros_like(rewards)
    return group_advantages(rewards, valid=valid) * (num_valid / (num_valid - 1))


def revoke_confirmed_hacks(rewards: ArrayLike, hacked: ArrayLike) -> Tensor:
    """Rewards [G] with 0 for each confirmed hack, taken before any group statistic.

    A revoked pass is an ordinary failure from here on (MiMo-V2.6 report).
    """
    rewards = as_values("rewards", rewards)
    hacked = as_flags("hacked", hacked, rewards)
    return torch.where(hacked, 0.0, rewards)


def is_informative(rewards: ArrayLike, valid: ArrayLike | None = None) -> bool:
    """Whether the rewards of the valid members differ; else every advantage is 0.

    Dynamic sampling keeps informative groups only (DAPO, arXiv 2503.14476). Give it raw
    outcomes: shaped rewards would let a group of failures through.
    """
    rewards = as_values("rewards", rewards)
    counted = rewards[as_valid(valid, rewards)]
    return len(counted) > 1 and bool(counted.max() - counted.min() > REWARD_TOLERANCE)


def is_gradable(rewards: ArrayLike, valid: ArrayLike | None = None) -> bool:
    """Whether a grade can move credit: two valid passes or more, one valid failure.

    A pass is a positive reward. Without a failure all advantages are 0; with a single
    pass there is nobody to share with.
    """
    rewards = as_values("rewards", rewards)
    counted = rewards[as_valid(valid, rewards)]
    num_passes = int((counted > 0).sum())
    return num_passes >= 2 and num_passes < len(counted)


def informative_probability(pass_rate: float | ArrayLike, group_size: int) -> Tensor:
    """P(a pass and a failure) = 1 - p^G - (1 - p)^G, for each pass rate p."""
    rate = _as_rate(pass_rate, group_size)
    return 1 - rate**group_size - (1 - rate) ** group_size


def gradable_probability(pass_rate: float | ArrayLike, group_size: int) -> Tensor:
    """P(at least two passes and one failure), for each pass rate p.

    The informative groups without those of a single pass: minus G p (1 - p)^(G - 1).
    """
    rate = _as_rate(pass_rate, group_size)
    single_pass = group_size * rate * (1 - rate) ** (group_size - 1)
    return informative_probability(rate, group_size) - single_pass


def _as_rate(pass_rate: float | ArrayLike, group_size: int) -> Tensor:
    if group_size < 2:
        raise ValueError(
            f"group_size is {group_size}: a group needs at least 2 members"
        )
    rate = torch.as_tensor(pass_rate, dtype=torch.float64)
    if not ((rate >= 0) & (rate <= 1)).all():
        raise ValueError(f"pass_rate is {pass_rate}: it must lie in [0, 1]")
    return rate
