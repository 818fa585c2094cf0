"""Whether an engine samples from the trainer's distribution: a check of log-probs.

An engine computes with other kernels, maybe in another precision, and with a copy of
the weights. What it reports for a few completions is compared with what the trainer
computes for the same tokens. A stale copy, a head that is not tied, raw log-probs or
another temperature show as differences many times those of rounding.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gagar_mini.types import Completion, Engine, SamplingParams

Logits = Callable[[Int[Tensor, "traj token"]], Float[Tensor, "traj token vocab"]]
"""Of the token after each position; ids that are never sampled are left out or -inf."""

FP32_MAX, BF16_MEAN = 1e-3, 0.05  # nats


@dataclass(frozen=True)
class LogprobGap:
    """|log pi - log mu| over `num_tokens` sampled tokens, in nats."""

    mean: float
    max: float
    num_tokens: int


async def check_engine(
    engine: Engine,
    logits: Logits,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    seed: int,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
) -> LogprobGap:
    """Sample a completion of each prompt and compare (see `check_logprobs`)."""

    async def complete(index: int) -> Completion:
        with engine.conversation() as conversation:
            return await conversation.complete(prompts[index], sampling, seed + index)

    done = await asyncio.gather(*map(complete, range(len(prompts))))
    trainer = [
        teacher_forced(
            logits, prompt, completion.ids.tolist(), sampling.temperature, device
        )
        for prompt, completion in zip(prompts, done, strict=True)
    ]
    return check_logprobs(trainer, [c.logprobs for c in done], dtype=dtype)


def check_logprobs(
    trainer: Sequence[np.ndarray], engine: Sequence[np.ndarray], *, dtype: str
) -> LogprobGap:
    """How far log-probs of the same completions differ, one array for each.

    Raises ValueError, which says what to do, above the tolerance of the `dtype` that
    either computes in: 1e-3 nats for any token in float32, .05 on average in bfloat16.
    """
    differences = [abs(a - b) for a, b in zip(trainer, engine, strict=True)]
    flat = np.concatenate([np.zeros(0), *differences])
    if not len(flat):
        raise ValueError("the engine sampled no token, so nothing tells its weights")
    gap = LogprobGap(float(flat.mean()), float(flat.max()), len(flat))
    is_low = dtype != "float32"
    found, tolerance = (gap.mean, BF16_MEAN) if is_low else (gap.max, FP32_MAX)
    if not found <= tolerance:  # NaN is no pass
        raise ValueError(
            f"log-probs of engine and trainer differ by {found:.2g} nats "
            f"({'mean' if is_low else 'largest'} of {gap.num_tokens} tokens, tolerance "
            f"{tolerance:g} in {dtype}): give both the same dtype and tokenizer, have "
            "the engine report log-probs at the sampling temperature (vLLM: "
            "--logprobs-mode processed_logprobs), and look whether its weights, a tied "
            "head among them, are those of the last sync"
        )
    return gap


@torch.no_grad()
def teacher_forced(
    logits: Logits,
    prompt: Sequence[int],
    completion: Sequence[int],
    temperature: float = 1.0,
    device: torch.device | str = "cpu",
) -> Float[np.ndarray, " num"]:
    """The trainer's log-probs of a completion; at T = 0 those at T = 1."""
    ids = torch.tensor([[*prompt, *completion]], device=device)
    before = logits(ids)[0, len(prompt) - 1 : -1].float()
    logprobs = (before / (temperature or 1.0)).log_softmax(-1)
    chosen = ids[0, len(prompt) :, None]
    return logprobs.gather(-1, chosen)[:, 0].cpu().numpy()
