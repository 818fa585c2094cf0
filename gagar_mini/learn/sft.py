"""Supervised fine-tuning of the tiny policy on scripted demonstrations.

From nothing to the start checkpoint: draw demonstrations over the training tasks, train
the tokenizer on their text, train the policy on their tokens. The policy must learn not
only to solve tasks but *how its habits go along with solving them*
(demonstrations.Habits): that takes several million tokens, and `gagar-mini eval
--habits` checks it afterwards.
"""

import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from gagar_mini.agent.dialect import SPECIAL_TOKENS, CompactDialect, Dialect
from gagar_mini.learn.demonstrations import (
    HABITS,
    CheckedWorkspace,
    Demonstration,
    Habits,
    demonstrate,
    play,
)
from gagar_mini.learn.losses import token_logprobs
from gagar_mini.model.policy import PolicyConfig, TinyPolicy, save_policy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.paths import check_can_be_made
from gagar_mini.types import Task, seed_for
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.sandbox.base import Sandbox
from gagar_mini.world.tasks import load_tasks


@dataclass(frozen=True)
class FitConfig:
    """How demonstrations are fitted, whatever they show."""

    seed: int = 0
    batch_tokens: int = 4096
    """Padded tokens of one optimiser update."""
    muon_lr: float = 0.02
    lr: float = 3e-3
    """Peak learning rates of Muon (matrices) and AdamW (the rest), after a warm-up and
    before a cosine decay to a tenth."""
    warmup_share: float = 0.05
    context_weight: float = 0.3
    """Weight of prompt and observation tokens in the loss; sampled ones weigh 1.
    Reading code a little teaches to copy it, which every edit needs."""
    threads: int = 2


@dataclass(frozen=True)
class SftConfig(FitConfig):
    """The start checkpoint of the tiny policy."""

    family: str = "core"
    """Task set whose training split is demonstrated."""
    num_tokens: int = 6_500_000
    """Tokens of demonstrations, each seen once."""
    vocab_size: int = 1024
    sandbox: str = "bubblewrap"


def train_policy(
    out_dir: Path, config: SftConfig = SftConfig(), habits: Habits = HABITS
) -> dict[str, float]:
    """Train the start checkpoint into `out_dir` (Hugging Face layout); its statistics.

    Raises ValueError where `out_dir` exists already: nothing is overwritten.
    """
    check_can_train(out_dir, config.num_tokens, config.threads)
    torch.set_num_threads(config.threads)
    started = time.monotonic()
    tasks = load_tasks(config.family, "train")
    sandbox = open_sandbox(config.sandbox)
    try:
        tokenizer = train_tokenizer(
            texts_of(tasks, sandbox, config.seed, habits),
            vocab_size=config.vocab_size,
            special_tokens=SPECIAL_TOKENS,
        )
        dialect = CompactDialect(tokenizer)
        demonstrations = draw_demonstrations(
            tasks,
            dialect,
            sandbox,
            habits,
            seed=config.seed,
            num_tokens=config.num_tokens,
        )
    finally:
        sandbox.close()
    policy = TinyPolicy(PolicyConfig(vocab_size=len(tokenizer)), seed=config.seed)
    final_loss = fit(policy, demonstrations, config)
    save_policy(policy, tokenizer, out_dir)
    statistics = {
        "num_demonstrations": len(demonstrations),
        "num_tokens": sum(len(d.ids) for d in demonstrations),
        "num_parameters": sum(p.numel() for p in policy.parameters()),
        "final_loss": final_loss,
        "seconds": round(time.monotonic() - started, 1),
    }
    card = {"config": asdict(config), "habits": asdict(habits), "result": statistics}
    (out_dir / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    return statistics


def check_can_train(out_dir: Path, num_tokens: int, threads: int) -> None:
    """Raise ValueError, in a sentence, before an hour is lost: nothing is overwritten,
    and there must be something to train on."""
    check_can_be_made(out_dir)
    if out_dir.exists() and any(out_dir.iterdir()):
        raise ValueError(f"{out_dir} exists and is not empty: choose another folder")
    if num_tokens < 1 or threads < 1:
        raise ValueError(
            f"num_tokens is {num_tokens}, threads is {threads}: both must be above 0"
        )


def texts_of(
    tasks: Sequence[Task], sandbox: Sandbox, seed: int, habits: Habits
) -> Iterator[str]:
    """Text that the tokenizer learns from: statements, files, and what scripts
    write."""
    rng = random.Random(seed_for(seed, "tokenizer"))
    for task in rng.sample(list(tasks), min(400, len(tasks))):
        yield f"{task.statement}\n{' '.join(sorted(task.files))}\n"
        workspace = CheckedWorkspace(task, sandbox, {})
        script = demonstrate(task, rng, habits)
        call = next(script)
        while call.name != "submit":
            yield from call.arguments.values()
            observation = workspace.act(call)
            yield observation
            call = script.send(observation)


def draw_demonstrations(
    tasks: Sequence[Task],
    dialect: Dialect,
    sandbox: Sandbox,
    habits: Habits,
    *,
    seed: int,
    num_tokens: int,
) -> list[Demonstration]:
    """Demonstrations of about `num_tokens` in all, spread evenly over the tasks."""
    sample = tasks[:: max(1, len(tasks) // 50)]
    drawn = [_demonstrate(t, 0, dialect, sandbox, {}, habits, seed) for t in sample]
    length = sum(len(d.ids) for d in drawn) / len(drawn)
    per_task = math.ceil(num_tokens / length / len(tasks))

    def of_task(task: Task) -> list[Demonstration]:
        reports: dict[str, str] = {}
        return [
            _demonstrate(task, index, dialect, sandbox, reports, habits, seed)
            for index in range(per_task)
        ]

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        lists = tqdm(pool.map(of_task, tasks), total=len(tasks), desc="demonstrations")
        return [demonstration for drawn in lists for demonstration in drawn]


def _demonstrate(
    task: Task,
    index: int,
    dialect: Dialect,
    sandbox: Sandbox,
    reports: dict[str, str],
    habits: Habits,
    seed: int,
) -> Demonstration:
    rng = random.Random(seed_for(seed, "demonstration", task.id, index))
    workspace = CheckedWorkspace(task, sandbox, reports)
    return play(demonstrate(task, rng, habits), workspace, dialect)


def fit(
    policy: TinyPolicy, demonstrations: Sequence[Demonstration], config: FitConfig
) -> float:
    """One pass over the demonstrations; the mean loss of the last tenth, in nats."""
    batches = batches_of(
        demonstrations, batch_tokens=config.batch_tokens, seed=config.seed
    )
    optimizers = make_optimizers(policy, config)
    peaks = [[group["lr"] for group in o.param_groups] for o in optimizers]
    losses = []
    progress = tqdm(batches, desc="sft", unit="update")
    for update, batch in enumerate(progress):
        share = schedule(update / len(batches), config.warmup_share)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
        policy.zero_grad()
        loss = sft_loss(policy, *batch, context_weight=config.context_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if update % 20 == 0:
            progress.set_postfix(loss=f"{np.mean(losses[-20:]):.3f}")
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


def make_optimizers(
    policy: TinyPolicy, config: FitConfig
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings and norms. After a
    million tokens the loss per action was .27 nats this way, .33 with AdamW alone."""
    matrices, others = [], []
    for name, parameter in policy.named_parameters():
        is_inner = parameter.ndim == 2 and "embed" not in name
        (matrices if is_inner else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=config.muon_lr, weight_decay=0.01),
        torch.optim.AdamW(others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(progress: float, warmup_share: float) -> float:
    """Share of the peak learning rate at `progress` in [0, 1]."""
    if progress < warmup_share:
        return (progress + 0.02 * warmup_share) / warmup_share
    decay = (progress - warmup_share) / (1 - warmup_share)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * decay))


def sft_loss(
    policy: TinyPolicy, ids: Tensor, weights: Tensor, *, context_weight: float
) -> Tensor:
    """Weighted mean negative log-likelihood in nats; `weights` [N, T]: 1 taught,
    -1 context, 0 neither."""
    scale = torch.where(weights < 0, context_weight, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_fast_bfloat16()):
        hidden = policy.forward_hidden(ids)
        logits = policy.logits(hidden)
    logprobs = token_logprobs(logits.float(), ids)
    return -(logprobs * scale).sum() / scale.sum()


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; emulated, it would be
    slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def batches_of(
    demonstrations: Sequence[Demonstration], *, batch_tokens: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """(ids, weights) [N, T] each, of similar lengths, in a shuffled order.

    Lengths are padded to multiples of 64: ever-new shapes make CPU kernels recompile.
    """
    rng = random.Random(seed_for(seed, "batches"))
    ordered = sorted(demonstrations, key=lambda d: (-(-len(d.ids) // 64), rng.random()))
    batches, start = [], 0
    while start < len(ordered):
        # The longest of a batch comes last, so look ahead until the batch is full.
        stop = start + 1
        while stop < len(ordered) and (
            (stop + 1 - start) * padded(len(ordered[stop].ids)) <= batch_tokens
        ):
            stop += 1
        batches.append(to_tensors(ordered[start:stop]))
        start = stop
    rng.shuffle(batches)
    return batches


def padded(length: int) -> int:
    return -(-length // 64) * 64


def to_tensors(demonstrations: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    width = padded(max(len(d.ids) for d in demonstrations))
    ids = torch.zeros(len(demonstrations), width, dtype=torch.long)
    weights = torch.zeros(len(demonstrations), width)
    for row, demonstration in enumerate(demonstrations):
        length = len(demonstration.ids)
        ids[row, :length] = torch.tensor(demonstration.ids)
        weights[row, :length] = torch.tensor(demonstration.is_taught).float() * 2 - 1
    weights[:, 0] = 0  # nothing comes before the first token
    return ids, weights
