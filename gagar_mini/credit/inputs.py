"""What the credit functions accept: one value per member of a group, in any container.

Tensors keep their floating dtype and device; integers, booleans and lists become
float64, in which the sums of a group are exact to about 1e-16. What cannot be meant is
a `ValueError` that names the member, since a NaN would otherwise reach every weight.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

ArrayLike = Tensor | np.ndarray | Sequence


def as_values(name: str, values: ArrayLike) -> Tensor:
    """`values` as a floating tensor [G]; every member must be a finite number."""
    tensor = _as_tensor(name, values)
    if not tensor.is_floating_point():
        tensor = tensor.to(torch.float64)
    _check_members(name, tensor, torch.isfinite(tensor), "must be a finite number")
    return tensor


def as_flags(name: str, flags: ArrayLike, like: Tensor) -> Tensor:
    """`flags` as a boolean tensor of the shape and device of `like` (0 and 1 pass)."""
    tensor = _as_tensor(name, flags)
    _check_length(name, tensor, like)
    is_flag = (tensor == 0) | (tensor == 1)
    _check_members(name, tensor, is_flag, "must be True or False")
    return tensor.to(device=like.device, dtype=torch.bool)


def as_valid(valid: ArrayLike | None, like: Tensor) -> Tensor:
    """The mask of members that count: all of them where nothing is said."""
    if valid is None:
        return torch.ones_like(like, dtype=torch.bool)
    return as_flags("valid", valid, like)


def as_factors(factors: ArrayLike, like: Tensor) -> Tensor:
    """Quality factors, each in (0, 1] (failures have 1), in the dtype of `like`.

    A factor of 0 is refused: it would take a pass out of the group for good.
    """
    tensor = as_values("factors", factors)
    _check_length("factors", tensor, like)
    is_allowed = (tensor > 0) & (tensor <= 1)
    _check_members("factors", tensor, is_allowed, "must lie in (0, 1]")
    return tensor.to(device=like.device, dtype=like.dtype)


def as_lengths(lengths: ArrayLike, like: Tensor) -> Tensor:
    """Action tokens of each member, in the dtype and device of `like`."""
    tensor = as_values("lengths", lengths)
    _check_length("lengths", tensor, like)
    _check_members("lengths", tensor, tensor >= 0, "must not be negative")
    return tensor.to(device=like.device, dtype=like.dtype)


def _as_tensor(name: str, values: ArrayLike) -> Tensor:
    if not isinstance(values, Tensor):
        array = np.asarray(values)
        if array.dtype == object:
            raise ValueError(f"{name} must be numbers, got {list(values)!r}")
        values = torch.tensor(np.ascontiguousarray(array))
    if values.ndim != 1:
        raise ValueError(
            f"{name} must have one value per member of one group, shape [G]; "
            f"got shape {list(values.shape)}"
        )
    return values


def _check_length(name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.shape != like.shape:
        raise ValueError(
            f"{name} has {len(tensor)} members, but the group has {len(like)}"
        )


def _check_members(name: str, tensor: Tensor, is_good: Tensor, demand: str) -> None:
    if not is_good.all():
        member = int((~is_good).nonzero()[0])
        raise ValueError(f"{name}[{member}] is {tensor[member].item()}: it {demand}")
