"""The policy's update: minibatches, micro-batches, one forward and backward each."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gagar_mini.config import RunConfig
from gagar_mini.learn.batching import (
    TokenBatch,
    deal_groups,
    idle_part,
    padded,
    split_micro_batches,
    split_minibatches,
)
from gagar_mini.learn.losses import (
    CHUNK_ELEMENTS,
    add_sums,
    clipped_policy_loss,
    masked_importance_policy_loss,
    mean_metrics,
    token_entropy,
    token_logprobs,
)
from gagar_mini.learn.opening import Policy
from gagar_mini.learn.parallel import gradient_scale, is_sharded, whole
from gagar_mini.learn.state import TrainState
from gagar_mini.learn.telemetry import Metrics, mean
from gagar_mini.types import seed_for


def update_policy(state: TrainState, batch: TokenBatch, step: int) -> Metrics:
    """Take the optimiser updates of one step; the "policy/" metrics.

    Nothing to train takes no update at all: Adam's momentum would move the weights even
    on a zero gradient. Raises FloatingPointError on a loss or gradient that is not
    finite and leaves the batch in the run folder.
    """
    config = state.config
    minibatches = split_minibatches(
        batch,
        config.optim.num_minibatches,
        aggregation=config.loss.aggregation,
        seed=seed_for(config.seed, "minibatches", step),
    )
    losses, norms, totals = [], [], {}
    for index, minibatch in enumerate(minibatches):
        loss, sums, drift = accumulate_gradient(state, minibatch)
        norm = whole(
            torch.nn.utils.clip_grad_norm_(
                state.policy.parameters(), config.optim.max_grad_norm
            )
        )
        if not (math.isfinite(loss) and torch.isfinite(norm)):
            save_failure(state, minibatch, step, f"loss {loss}, gradient norm {norm}")
        learning_rate = take_update(state)
        losses.append(loss)
        norms.append(float(norm))
        totals = add_sums(totals, sums)
        if index == 0:
            first_drift = drift
    if not minibatches:
        return {"policy/updates": 0}
    means = {f"policy/{name}": value for name, value in mean_metrics(totals).items()}
    return means | {
        "policy/loss": mean(losses),
        "policy/grad_norm": mean(norms),
        "policy/sampler_drift": first_drift,
        "policy/lr": learning_rate,
        "policy/updates": len(minibatches),
    }


def accumulate_gradient(
    state: TrainState, minibatch: TokenBatch
) -> tuple[float, dict[str, Tensor], float | None]:
    """Gradient of the minibatch's loss, one forward and backward pass a micro-batch.

    The minibatch is that of all ranks; each computes on its own groups, with weights
    that were made on the whole, and gets the whole gradient and numbers.

    Gives the loss, the sums for `mean_metrics`, and the mean |log pi - log mu| over the
    tokens sampled with the engine's weights (None without any): before an update it
    should be near 0.
    """
    config, ranks = state.config, state.ranks
    state.optimizer.zero_grad(set_to_none=True)
    total, totals, gaps = 0.0, {}, []
    scale = gradient_scale(state.policy, ranks)
    for part in own_micro_batches(state, minibatch):
        logprobs, entropies = action_logprobs(
            state.policy, part, temperature=config.rollout.temperature
        )
        loss, sums = policy_loss(logprobs, entropies, part, config)
        (scale * loss).backward()
        total += loss.item()
        # to the CPU: what ranks exchange must not lie on the GPU of one of them
        totals = add_sums(totals, {name: value.cpu() for name, value in sums.items()})
        is_fresh = part.weight_versions == state.engine.weight_version
        gap = (logprobs.detach().cpu() - part.behaviour_logprobs).abs()
        gaps += gap[part.action_mask & is_fresh.unsqueeze(1)].tolist()
    ranks.sum_gradients(state.policy)
    losses, sums_of_ranks, gaps_of_ranks = zip(
        *ranks.gather((total, totals, gaps)), strict=True
    )
    all_gaps = [gap for gaps in gaps_of_ranks for gap in gaps]
    return sum(losses), add_sums(*sums_of_ranks), mean(all_gaps)


def own_micro_batches(state: TrainState, minibatch: TokenBatch) -> list[TokenBatch]:
    """This rank's part of the minibatch, split.

    The passes of a sharded policy are collective: ranks with fewer parts fill up.
    """
    own = deal_groups(minibatch, state.ranks.size)[state.ranks.rank]
    parts = split_micro_batches(own, state.config.optim.micro_batch_tokens)
    if not is_sharded(state.policy):
        return parts
    num_passes = max(state.ranks.gather(len(parts)))
    return parts + [idle_part(minibatch)] * (num_passes - len(parts))


def action_logprobs(
    policy: Policy, batch: TokenBatch, *, temperature: float
) -> tuple[Float[Tensor, "traj token"], Float[Tensor, "traj token"]]:
    """Log-probs and entropies of the action tokens, 0 elsewhere.

    Few tokens are actions, so logits are computed at the positions before them only.
    """
    device = next(policy.parameters()).device
    ids, action_mask = batch.ids.to(device), batch.action_mask.to(device)
    assert not action_mask[:, 0].any(), (
        "the first token has no context to be drawn from"
    )
    hidden = policy.forward_hidden(ids)
    before = hidden[:, :-1][action_mask[:, 1:]]
    logprobs, entropies = next_token_logprobs(
        policy, before, ids[action_mask], temperature=temperature
    )

    def in_place(values: Tensor) -> Tensor:
        empty = torch.zeros(ids.shape, dtype=values.dtype, device=device)
        return empty.masked_scatter(action_mask, values)

    return in_place(logprobs), in_place(entropies)


def next_token_logprobs(
    policy: Policy,
    hidden: Float[Tensor, "position hidden"],
    next_ids: Int[Tensor, " position"],
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Float[Tensor, " position"], Float[Tensor, " position"]]:
    """Log-probs and entropies (nats) of `next_ids`, each drawn after its hidden state.

    With a large vocabulary the logits of all positions are never there at once: the
    head runs in chunks, and again in the backward pass.
    """

    def read(hidden: Tensor, next_ids: Tensor) -> Tensor:
        num = len(hidden)
        # One position more, as `token_logprobs` shifts, then up to a shape seen before.
        padding = padded(num + 1) - num
        logits = policy.logits(F.pad(hidden, (0, 0, 0, padding))).unsqueeze(0)
        chosen = F.pad(next_ids, (1, padding - 1)).unsqueeze(0)
        logprobs = token_logprobs(logits, chosen, temperature=temperature)
        entropies = token_entropy(logits, temperature=temperature)
        return torch.cat([logprobs, entropies])[:, 1 : num + 1]

    size = max(1, chunk_elements // policy.num_tokens)
    pieces = list(zip(hidden.split(size), next_ids.split(size), strict=True))
    if len(pieces) == 1:
        return tuple(read(*pieces[0]))
    return tuple(
        torch.cat([checkpoint(read, *p, use_reentrant=False) for p in pieces], dim=1)
    )


def policy_loss(
    logprobs: Float[Tensor, "traj token"],
    entropies: Float[Tensor, "traj token"],
    part: TokenBatch,
    config: RunConfig,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The loss that the config names, over one micro-batch, and its sums."""
    arguments = (
        logprobs,
        part.behaviour_logprobs.to(logprobs.device),
        part.advantages.to(logprobs.device),
        part.action_mask.to(logprobs.device),
    )
    weights = part.token_weights.to(logprobs.device)
    loss = config.loss
    if loss.kind == "clipped":
        return clipped_policy_loss(
            *arguments,
            weights=weights,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            entropies=entropies,
        )
    band = (loss.band_low, loss.band_high)
    return masked_importance_policy_loss(
        *arguments,
        weights=weights,
        positive_band=band,
        negative_band=band,
        entropies=entropies,
    )


def take_update(state: TrainState) -> float:
    """One optimiser update; the learning rate that it used, which warms up."""
    optim = state.config.optim
    state.num_updates += 1
    learning_rate = optim.lr * min(1.0, state.num_updates / max(optim.warmup_steps, 1))
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    return learning_rate


def save_failure(
    state: TrainState, minibatch: TokenBatch, step: int, finding: str
) -> None:
    """Keep the batch that broke the update, then end the run."""
    path = state.run.path / f"failed_step_{step:05d}.safetensors"
    if state.ranks.is_first:
        tensors = {name: value.contiguous() for name, value in vars(minibatch).items()}
        save_file(tensors, path)
    raise FloatingPointError(
        f"step {step} gave {finding}; the batch is in {str(path)!r}, and the newest "
        "checkpoint holds the weights from before"
    )
