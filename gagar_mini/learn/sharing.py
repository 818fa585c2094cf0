"""From a group to the advantages that train it."""

import torch

from gagar_mini.config import CreditConfig
from gagar_mini.credit import GroupCredit, share_rewards
from gagar_mini.types import RolloutGroup


def share_credit(group: RolloutGroup, config: CreditConfig) -> GroupCredit:
    """The advantages of a group before and after its grade, float64."""
    return share_rewards(
        group.rewards,
        [trajectory.id for trajectory in group.trajectories],
        group.grade,
        rule=config.rule,
        max_scale=config.max_scale,
        scale_by_std=config.scale_by_std,
        valid=torch.from_numpy(group.valid),
    )
