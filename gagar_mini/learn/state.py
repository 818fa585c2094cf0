"""What a run carries from step to step, and how it goes into a checkpoint and back.

A checkpoint is a policy folder in the Hugging Face layout, with the optimiser's
tensors, the surplus groups and the counters beside it. Tensors are safetensors and the
rest is JSON: nothing that is loaded can run code. Every random number is drawn from a
seed that depends on the step, so there is no random state to keep, and nothing in a
checkpoint depends on how many ranks wrote it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gagar_mini.config import RunConfig
from gagar_mini.learn.collecting import SampleGroup, TaskSampler
from gagar_mini.learn.opening import Policy, read_weights, save_any_policy
from gagar_mini.learn.parallel import (
    ALONE,
    Ranks,
    cut_like,
    load_weights,
    whole,
    whole_policy,
)
from gagar_mini.records import (
    Checkpoint,
    Json,
    RunFolder,
    group_arrays,
    group_from_record,
    group_record,
)
from gagar_mini.types import Engine, Grader, RolloutGroup, Task

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class TrainState:
    """What a run carries from step to step; changed in place. With `trial_prompts`
    engine and policy are compared before the first step."""

    config: RunConfig
    run: RunFolder
    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    optimizer: torch.optim.AdamW
    engine: Engine
    sampler: TaskSampler
    sample_group: SampleGroup
    trial_prompts: Sequence[Sequence[int]] = ()
    grader: Grader | None = None
    surplus: list[RolloutGroup] = field(default_factory=list)
    num_updates: int = 0
    ranks: Ranks = ALONE


def make_optimizer(policy: Policy, config: RunConfig) -> torch.optim.AdamW:
    """AdamW on fp32 weights: in bf16 an update of 1e-4 would be rounded away."""
    assert all(weight.dtype == torch.float32 for weight in policy.parameters())
    return torch.optim.AdamW(
        [weight for weight in policy.parameters() if weight.requires_grad],
        lr=config.optim.lr,
        betas=(config.optim.beta1, config.optim.beta2),
        weight_decay=config.optim.weight_decay,
    )


def save_state(state: TrainState, step: int) -> None:
    """Write the checkpoint after `step` steps, in whole pieces, on the first rank: it
    does not tell how many ranks there were. All ranks call it."""
    groups = state.surplus
    policy, moments = whole_policy(state.policy), optimizer_tensors(state)
    if not state.ranks.is_first:
        return

    def write_files(folder: Path) -> None:
        try:
            write_tensors(folder)
        except SafetensorError as error:  # also where a disk is full
            raise OSError(f"a checkpoint cannot be written: {error}") from error

    def write_tensors(folder: Path) -> None:
        save_any_policy(policy, state.tokenizer, folder)
        save_file(moments, folder / "optimizer.safetensors")
        arrays = {
            f"{index}/{name}": array
            for index, group in enumerate(groups)
            for name, array in group_arrays(group).items()
        }
        save_arrays(arrays, folder / "surplus.safetensors")

    counters = {
        "num_updates": state.num_updates,
        "num_tasks_drawn": state.sampler.num_drawn,
        "surplus": [group_record(group) for group in groups],
        "tasks": fingerprint(state.sampler.tasks),
    }
    state.run.save_checkpoint(step, counters, write_files)


def restore_state(state: TrainState, checkpoint: Checkpoint) -> None:
    """Put a checkpoint into `state`. Raises ValueError when the tasks have changed."""
    saved = checkpoint.state
    if saved["tasks"] != fingerprint(state.sampler.tasks):
        raise ValueError(
            f"the tasks of split {state.config.tasks.split!r} have changed since the "
            "checkpoint was written: start a new run"
        )
    load_weights(state.policy, read_weights(state.policy, checkpoint.folder))
    load_optimizer(state, load_file(checkpoint.folder / "optimizer.safetensors"))
    state.num_updates = saved["num_updates"]
    state.sampler.num_drawn = saved["num_tasks_drawn"]
    arrays = load_arrays(checkpoint.folder / "surplus.safetensors")
    state.surplus = read_surplus(saved["surplus"], arrays, state.sampler.tasks)


def optimizer_tensors(state: TrainState) -> dict[str, Tensor]:
    """Adam's moments by the name of the weight; empty before the first update."""
    moments = state.optimizer.state
    return {
        f"{name}/{moment}": whole(moments[weight][moment])
        for name, weight in state.policy.named_parameters()
        if weight in moments
        for moment in MOMENTS
    }


def load_optimizer(state: TrainState, tensors: dict[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    for name, weight in state.policy.named_parameters():
        if f"{name}/step" in tensors:
            saved = {moment: tensors[f"{name}/{moment}"] for moment in MOMENTS}
            state.optimizer.state[weight] = {
                # "step" is a number, which every rank has on its CPU
                moment: cut_like(weight, tensor.to(weight.device))
                if tensor.ndim
                else tensor
                for moment, tensor in saved.items()
            }


def read_surplus(
    records: Sequence[dict[str, Json]], arrays: dict[str, object], tasks: Sequence[Task]
) -> list[RolloutGroup]:
    by_id = {task.id: task for task in tasks}
    groups = []
    for index, record in enumerate(records):
        prefix = f"{index}/"
        own = {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }
        groups.append(group_from_record(record, own, by_id[record["task_id"]]))
    return groups


def fingerprint(tasks: Sequence[Task]) -> str:
    """A hash of what the tasks ask, in their order."""
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(f"{task.id}\n{task.statement}\n".encode())
        for path, content in sorted(task.files.items()):
            digest.update(f"{path} {len(content)}\n".encode() + content)
    return digest.hexdigest()
