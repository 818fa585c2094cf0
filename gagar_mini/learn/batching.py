"""Groups -> padded tensors -> minibatches of whole groups -> micro-batches of memory.

A minibatch is one optimiser update, and what its loss averages over is fixed here, once
for all of its micro-batches (`token_weights`): the split changes memory and never the
gradient. Trajectories whose harness failed are left out: they are no failures.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gagar_mini.config import RunConfig
from gagar_mini.learn.losses import aggregation_weights
from gagar_mini.types import RolloutGroup, Trajectory

LENGTH_MULTIPLE = 64
"""Padded lengths are multiples of this: ever-new shapes make CPU kernels recompile."""


@dataclass(frozen=True)
class TokenBatch:
    """N trajectories padded on the right to one length T; index t means token t.

    `group_index` [N] tells whose siblings are whose, by position in the list of groups;
    `weight_versions` [N] with which weights a trajectory was sampled.
    `token_weights` [N, T] are the weights of the tokens in the loss of their optimiser
    update, zeros until `split_minibatches` knows which update that is.
    """

    ids: Int[Tensor, "traj token"]
    action_mask: Bool[Tensor, "traj token"]
    behaviour_logprobs: Float[Tensor, "traj token"]
    advantages: Float[Tensor, " traj"]
    group_index: Int[Tensor, " traj"]
    lengths: Int[Tensor, " traj"]
    weight_versions: Int[Tensor, " traj"]
    token_weights: Float[Tensor, "traj token"]

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, index: Int[Tensor, " row"]) -> "TokenBatch":
        """Some of the trajectories, no wider than the longest of them needs."""
        width = padded(int(self.lengths[index].max())) if len(index) else 0
        return TokenBatch(
            ids=self.ids[index, :width],
            action_mask=self.action_mask[index, :width],
            behaviour_logprobs=self.behaviour_logprobs[index, :width],
            advantages=self.advantages[index],
            group_index=self.group_index[index],
            lengths=self.lengths[index],
            weight_versions=self.weight_versions[index],
            token_weights=self.token_weights[index, :width],
        )


def build_batch(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Float[Tensor, " _"]],
    config: RunConfig,
) -> TokenBatch:
    """The valid trajectories of `groups` with their advantages; empty is legal.

    Raises ValueError for a trajectory longer than the context that the config allows.
    """
    members = [
        (index, trajectory, float(advantage))
        for index, (group, shared) in enumerate(zip(groups, advantages, strict=True))
        for trajectory, advantage, is_valid in zip(
            group.trajectories, shared, group.valid, strict=True
        )
        if is_valid
    ]
    trajectories = [trajectory for _, trajectory, _ in members]
    _check_lengths(trajectories, config.rollout.max_context_tokens)
    lengths = torch.tensor([len(t.ids) for t in trajectories], dtype=torch.long)
    width = padded(int(lengths.max())) if members else 0
    return TokenBatch(
        ids=_pad([t.ids for t in trajectories], width, torch.long),
        action_mask=_pad([t.action_mask for t in trajectories], width, torch.bool),
        behaviour_logprobs=_pad(
            [t.behaviour_logprobs for t in trajectories], width, torch.float32
        ),
        advantages=torch.tensor([a for _, _, a in members], dtype=torch.float32),
        group_index=torch.tensor([index for index, _, _ in members], dtype=torch.long),
        lengths=lengths,
        weight_versions=torch.tensor(
            [t.weight_version for t in trajectories], dtype=torch.long
        ),
        token_weights=torch.zeros(len(members), width),
    )


def split_minibatches(
    batch: TokenBatch, num_minibatches: int, *, aggregation: str, seed: int
) -> list[TokenBatch]:
    """Whole groups in a seeded order, dealt evenly; each weighs its own tokens.

    Fewer groups than `num_minibatches` give fewer minibatches, no groups give none.
    """
    group_ids = batch.group_index.unique().numpy()
    order = np.random.default_rng(seed).permutation(group_ids)
    minibatches = []
    for chosen in np.array_split(order, min(num_minibatches, max(len(order), 1))):
        is_member = torch.isin(batch.group_index, torch.from_numpy(chosen))
        rows = batch.rows(is_member.nonzero().squeeze(1))
        if not rows.action_mask.any():
            continue
        weights = aggregation_weights(rows.action_mask, rows.group_index, aggregation)
        minibatches.append(replace(rows, token_weights=weights))
    return minibatches


def deal_groups(batch: TokenBatch, num_parts: int) -> list[TokenBatch]:
    """Whole groups for each rank, the longest first to who has the fewest tokens so
    far. The parts of many ranks and few groups may be empty."""
    if num_parts == 1:
        return [batch]
    num_tokens = {
        group: int(batch.lengths[batch.group_index == group].sum())
        for group in batch.group_index.unique().tolist()
    }
    hands: list[list[int]] = [[] for _ in range(num_parts)]
    for group in sorted(num_tokens, key=lambda group: -num_tokens[group]):
        min(hands, key=lambda hand: sum(num_tokens[g] for g in hand)).append(group)
    members = [
        torch.isin(batch.group_index, torch.tensor(hand, dtype=torch.long))
        for hand in hands
    ]
    return [batch.rows(is_member.nonzero().squeeze(1)) for is_member in members]


def idle_part(batch: TokenBatch) -> TokenBatch:
    """A micro-batch without an action: for a rank that has to take part in a pass and
    has nothing to train."""
    part = batch.rows(batch.lengths.argmin().unsqueeze(0))
    return replace(
        part,
        action_mask=torch.zeros_like(part.action_mask),
        token_weights=torch.zeros_like(part.token_weights),
    )


def split_micro_batches(batch: TokenBatch, max_tokens: int) -> list[TokenBatch]:
    """Rows of similar length, each part at most `max_tokens` with its padding.

    A single trajectory that is longer than that is a part of its own.
    """
    parts, rows = [], []
    for row in batch.lengths.sort(stable=True).indices.tolist():
        # Sorted by length, so the newest row sets the width of the part.
        width = padded(int(batch.lengths[row]))
        if rows and width * (len(rows) + 1) > max_tokens:
            parts.append(rows)
            rows = []
        rows.append(row)
    if rows:
        parts.append(rows)
    return [batch.rows(torch.tensor(part)) for part in parts]


def padded(length: int) -> int:
    """The next multiple of `LENGTH_MULTIPLE`."""
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def _pad(arrays: Sequence[np.ndarray], width: int, dtype: torch.dtype) -> Tensor:
    """[N, width], zeros on the right. Zero is a token id like any other: the masks come
    from who spoke, and a causal policy looks at nothing to its right."""
    out = torch.zeros(len(arrays), width, dtype=dtype)
    for row, array in enumerate(arrays):
        out[row, : len(array)] = torch.from_numpy(np.asarray(array)).to(dtype)
    return out


def _check_lengths(trajectories: Sequence[Trajectory], max_tokens: int) -> None:
    for trajectory in trajectories:
        if len(trajectory.ids) > max_tokens:
            raise ValueError(
                f"trajectory {trajectory.id!r} has {len(trajectory.ids)} tokens, more "
                f"than rollout.max_context_tokens {max_tokens}: cutting it would train "
                "on something that was not sampled"
            )
        assert len(trajectory.ids) == len(trajectory.action_mask)
        assert len(trajectory.ids) == len(trajectory.behaviour_logprobs)
