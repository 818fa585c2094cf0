"""Supervised fine-tuning of a chat model on scripted demonstrations, in its own form.

A small chat model writes no valid tool call unasked: it learns the protocol here, from
the demonstrations that the tiny policy learns from, told in its chat template. Only
what the agent says is taught. Samples may be packed into rows of one length: each sees
itself alone, and its positions start at 0.
"""

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from gagar_mini.agent.chat_dialect import ChatDialect
from gagar_mini.config import ChatSftConfig
from gagar_mini.learn.demonstrations import DEMONSTRATORS, Demonstration, Habits
from gagar_mini.learn.sft import (
    batches_of,
    check_can_train,
    draw_demonstrations,
    schedule,
)
from gagar_mini.learn.update import next_token_logprobs
from gagar_mini.model.chat_policy import (
    ChatPolicy,
    load_chat_policy,
    save_chat_policy,
)
from gagar_mini.types import Task, seed_for
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.tasks import load_tasks

Batch = tuple[Tensor, Tensor, Tensor | None]
"""Ids, weights (1 taught, -1 context, 0 padding) and, packed, samples; [N, T] each."""


def train_chat(out_dir: Path, config: ChatSftConfig) -> dict[str, float]:
    """Warm `config.model` up into `out_dir`; the statistics, which a card there holds.

    Raises ValueError where `out_dir` exists already, or for what cannot be loaded.
    """
    check_can_train(out_dir, config.num_tokens, config.threads)
    torch.set_num_threads(config.threads)
    started, habits = time.monotonic(), DEMONSTRATORS[config.habits]
    policy, tokenizer = load_chat_policy(
        config.model,
        dtype=config.dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        lora_rank=config.lora_rank,
        seed=config.seed,
    )
    if config.pack_length:
        check_can_pack(policy)
    demonstrations = demonstrate_in_chat(ChatDialect(tokenizer), config, habits)
    final_loss = fit_chat(policy, demonstrations, config)
    # an adapter is a file to share, and half as large in what it was computed with
    to_save = policy.to(policy.dtype) if policy.has_adapter else policy
    save_chat_policy(to_save, tokenizer, out_dir)
    statistics = {
        "num_demonstrations": len(demonstrations),
        "num_tokens": sum(len(d.ids) for d in demonstrations),
        "num_taught": sum(sum(d.is_taught) for d in demonstrations),
        "num_trained_parameters": sum(w.numel() for w in trained_weights(policy)),
        "final_loss": final_loss,
        "seconds": round(time.monotonic() - started, 1),
    }
    card = {"config": asdict(config), "habits": asdict(habits), "result": statistics}
    (out_dir / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    return statistics


def demonstrate_in_chat(
    dialect: ChatDialect, config: ChatSftConfig, habits: Habits
) -> list[Demonstration]:
    """Demonstrations of about `config.num_tokens` in all, on tasks drawn by seed."""
    tasks = list(load_tasks(config.family, "train"))
    random.Random(seed_for(config.seed, "sft tasks")).shuffle(tasks)
    sandbox = open_sandbox(config.sandbox)

    def draw(tasks: Sequence[Task], num_tokens: int) -> list[Demonstration]:
        return draw_demonstrations(
            tasks, dialect, sandbox, habits, seed=config.seed, num_tokens=num_tokens
        )

    try:
        probe = draw(tasks[:16], 1)
        length = sum(len(d.ids) for d in probe) / len(probe)
        num_wanted = math.ceil(config.num_tokens / length)
        if num_wanted <= len(tasks):
            return draw(tasks[:num_wanted], 1)  # one of each
        return draw(tasks, config.num_tokens)
    finally:
        sandbox.close()


def fit_chat(
    policy: ChatPolicy, demonstrations: Sequence[Demonstration], config: ChatSftConfig
) -> float:
    """One pass over the demonstrations; the mean loss of the last tenth, in nats per
    taught token."""
    if config.pack_length:
        batches = packed_batches(demonstrations, config)
    else:
        even = batches_of(
            demonstrations, batch_tokens=config.batch_tokens, seed=config.seed
        )
        batches = [(*batch, None) for batch in even]
    weights = trained_weights(policy)
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    progress = tqdm(batches, desc="sft", unit="update")
    for update, batch in enumerate(progress):
        share = schedule((update + 1) / len(batches), config.warmup_share)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * share
        losses.append(accumulate(policy, batch, config.micro_batch_tokens))
        if not math.isfinite(losses[-1]):
            raise FloatingPointError(
                f"the loss of update {update} is {losses[-1]}: lower the learning rate"
            )
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def accumulate(policy: ChatPolicy, batch: Batch, max_tokens: int) -> float:
    """Gradient of the mean loss over the taught tokens of a batch; the loss, nats."""
    num_taught = int((batch[1] > 0).sum())
    rows = max(1, max_tokens // batch[0].shape[1])
    parts = [None if part is None else part.split(rows) for part in batch]
    total = 0.0
    for index, (ids, weights) in enumerate(zip(parts[0], parts[1], strict=True)):
        samples = None if parts[2] is None else parts[2][index]
        loss = taught_loss(policy, ids, weights > 0, samples) / max(num_taught, 1)
        loss.backward()
        total += loss.item()
    return total


def taught_loss(
    policy: ChatPolicy, ids: Tensor, is_taught: Tensor, samples: Tensor | None = None
) -> Tensor:
    """Sum of the negative log-likelihoods of the taught tokens, in nats."""
    device = next(policy.parameters()).device
    ids, is_taught = ids.to(device), is_taught.to(device)
    hidden = policy.forward_hidden(ids, samples)
    before = hidden[:, :-1][is_taught[:, 1:]]
    logprobs, _ = next_token_logprobs(policy, before, ids[:, 1:][is_taught[:, 1:]])
    return -logprobs.sum()


def trained_weights(policy: ChatPolicy) -> list[Tensor]:
    return [weight for weight in policy.parameters() if weight.requires_grad]


# --- packing --------------------------------------------------------------------------


def check_can_pack(policy: ChatPolicy) -> None:
    """Raise ValueError where a mask of pairs does not say all of who sees whom."""
    config = policy.causal_model.config
    text = config.get_text_config()
    kinds = {*(getattr(text, "layer_types", None) or ["full_attention"])}
    if kinds != {"full_attention"} or config._attn_implementation != "sdpa":
        raise ValueError(
            "pack_length needs a model of full attention in the kernel sdpa, so that "
            "packed samples do not see each other: use 0"
        )


def packed_batches(
    demonstrations: Sequence[Demonstration], config: ChatSftConfig
) -> list[Batch]:
    """Batches of packed rows in a shuffled order.

    Raises ValueError for a demonstration that is longer than a row.
    """
    rows = pack([len(d.ids) for d in demonstrations], config.pack_length)
    random.Random(seed_for(config.seed, "batches")).shuffle(rows)
    num_rows = max(1, config.batch_tokens // config.pack_length)
    return [
        pack_tensors(
            [
                [demonstrations[i] for i in row]
                for row in rows[start : start + num_rows]
            ],
            config.pack_length,
        )
        for start in range(0, len(rows), num_rows)
    ]


def pack(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Which samples share a row: the longest first, each where it fits first."""
    rows: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] > row_length:
            raise ValueError(
                f"a demonstration has {lengths[index]} tokens, more than a row of "
                f"{row_length}: raise pack_length"
            )
        fits = (row for row, free in enumerate(left) if free >= lengths[index])
        row = next(fits, len(rows))
        if row == len(rows):
            rows.append([])
            left.append(row_length)
        rows[row].append(index)
        left[row] -= lengths[index]
    return rows


def pack_tensors(rows: Sequence[Sequence[Demonstration]], length: int) -> Batch:
    """Rows [N, length]; `samples` counts the samples of a row, padding being the
    last."""
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    weights = torch.zeros(len(rows), length)
    samples: Int[Tensor, "row token"] = torch.zeros_like(ids)
    for line, row in enumerate(rows):
        start = 0
        for number, demonstration in enumerate(row):
            stop = start + len(demonstration.ids)
            ids[line, start:stop] = torch.tensor(demonstration.ids)
            taught = torch.tensor(demonstration.is_taught).float() * 2 - 1
            taught[0] = 0  # the token before it is another sample's
            weights[line, start:stop] = taught
            samples[line, start:stop] = number
            start = stop
        samples[line, start:] = len(row)
    return ids, weights, samples
