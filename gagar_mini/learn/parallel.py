"""Many processes as one run: the only module that knows of torch.distributed.

`torchrun --nproc-per-node N -m gagar_mini train ...` starts N ranks of one program.
Each draws the same tasks, samples and grades every N-th of them, and hears of the
groups of the others. From there on all ranks hold the same groups, so that dynamic
sampling, credit, minibatches and denominators are those of one process, without a vote.
Forward and backward passes run on each rank's own whole groups, and gradients are
summed. One rank, the default, is a no-op of the same functions.

Left out: pipeline and tensor parallelism, and ranks that come and go during a run.
"""

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from gagar_mini.learn.opening import Policy

T = TypeVar("T")

PATIENCE = datetime.timedelta(minutes=30)
"""How long a rank waits for another one; one that has died is noticed at once."""


class RankLost(ConnectionError):
    """Another rank has ended, or no longer answers."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run. All ranks call the same methods in the same
    order, also those that have nothing to say."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """The first rank writes the records and talks to the user."""
        return self.rank == 0

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """Every `size`-th item, from the one numbered `rank`."""
        return items[self.rank :: self.size]

    def gather(self, part: T) -> list[T]:
        """What each rank gave, in the order of the ranks."""
        if self.size == 1:
            return [part]
        parts: list[T | None] = [None] * self.size
        with _all_alive():
            dist.all_gather_object(parts, part)
        return parts

    def first(self, value: T) -> T:
        """What the first rank gave."""
        if self.size == 1:
            return value
        box = [value]
        with _all_alive():
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether some rank says yes."""
        return any(self.gather(flag))

    def sum_gradients(self, policy: Policy) -> None:
        """Add the gradients of all ranks; one without data adds zeros. FSDP2 has done
        it for a sharded policy."""
        if self.size == 1 or is_sharded(policy):
            return
        weights = [weight for weight in policy.parameters() if weight.requires_grad]
        flat = torch.cat(
            [
                (torch.zeros_like(w) if w.grad is None else w.grad).flatten()
                for w in weights
            ]
        )
        with _all_alive():
            dist.all_reduce(flat)
        sizes = [weight.numel() for weight in weights]
        for weight, gradient in zip(weights, flat.split(sizes), strict=True):
            weight.grad = gradient.view_as(weight)


ALONE = Ranks()
"""A run in one process."""


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that torchrun started, connected; `ALONE` without torchrun."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # or all take the first
    with _all_alive():
        dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def interleave(parts: Sequence[Sequence[T]]) -> list[T]:
    """The inverse of `Ranks.own`: the items of all ranks in their order."""
    num_items = sum(map(len, parts))
    return [
        parts[index % len(parts)][index // len(parts)] for index in range(num_items)
    ]


# --- sharded weights ------------------------------------------------------------------


def shard(policy: Policy, ranks: Ranks) -> None:
    """Spread weights, gradients and so the optimiser over the ranks, in place (FSDP2).

    One unit per block and one for the rest. Passes run in the dtype of the policy (its
    residual stream, too, in bf16) and gradients are reduced in fp32; the weights that
    the optimiser sees are fp32 everywhere.
    FSDP2 takes the mean of the ranks' gradients: see `gradient_scale`.
    """
    if ranks.size == 1:
        return
    # Slow to import, and of no use to a run in one process.
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    device = next(policy.parameters()).device
    precision = MixedPrecisionPolicy(policy.dtype, torch.float32)
    mesh = init_device_mesh(device.type, (ranks.size,))
    for block in policy.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    register_fsdp_forward_method(policy, "forward_hidden")


def is_sharded(policy: Policy) -> bool:
    return any(isinstance(weight, DTensor) for weight in policy.parameters())


def gradient_scale(policy: Policy, ranks: Ranks) -> int:
    """What a loss is multiplied by before its backward pass, so that gradients come out
    as a sum over ranks: the denominators are global already."""
    return ranks.size if is_sharded(policy) else 1


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor in one piece, any other as it is. All ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_policy(policy: Policy) -> Policy:
    """A copy of a sharded policy in one piece, any other itself. All ranks call it."""
    if not is_sharded(policy):
        return policy
    copy = policy.empty_copy()
    weights = {name: whole(weight) for name, weight in policy.state_dict().items()}
    copy.load_state_dict(weights)
    return copy


def cut_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """This rank's share of `tensor`, which all ranks hold, cut as `weight` is."""
    if not isinstance(weight, DTensor):
        return tensor
    return distribute_tensor(
        tensor, weight.device_mesh, weight.placements, src_data_rank=None
    )


@torch.no_grad()
def load_weights(policy: Policy, weights: dict[str, Tensor]) -> None:
    """`load_state_dict` of weights in one piece, for a policy sharded or not."""
    if not is_sharded(policy):
        policy.load_state_dict(weights)
        return
    for name, weight in policy.named_parameters():
        weight.copy_(cut_like(weight, weights[name]))


@contextlib.contextmanager
def _all_alive() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(
            "another process of the run has ended or no longer answers; what it said "
            "stands above, and the run resumes from its newest checkpoint"
        ) from error
