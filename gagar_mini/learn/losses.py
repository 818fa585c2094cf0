"""Log-probs of sampled tokens and the policy losses over them, in plain tensors.

Everything is [traj, token], index t means token t; only the functions that read logits
shift. Both losses return `(loss, sums)`. The loss of one optimiser step is a *sum* over
tokens of weight * term, with weights from `aggregation_weights`, made once on the whole
step: any split into micro-batches adds up to the same loss and the same gradient.

    weights = aggregation_weights(action_mask, group_index, "token-mean")
    for rows in micro_batches:
        logprobs = token_logprobs(policy(ids[rows]), ids[rows], temperature=temperature)
        loss, sums = clipped_policy_loss(
            logprobs, behaviour_logprobs[rows], advantages[rows], action_mask[rows],
            weights=weights[rows],
        )
        loss.backward()
        totals = add_sums(totals, sums)

On-policy the loss *value* says little (advantages of a group sum to zero, the ratio is
1) while its gradient does: log the gradient norm beside it.
"""

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**26
"""Most logits whose float32 copy is alive at a time: 256 MiB."""

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped to this before exp, so that a runaway policy stays finite."""


# --- reading logits -------------------------------------------------------------------


def token_logprobs(
    logits: Float[Tensor, "traj token vocab"],
    ids: Int[Tensor, "traj token"],
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Float[Tensor, "traj token"]:
    """Natural log-probability of each token given those before it; entry 0 is 0.

    log p_t = z_t[id_t] - logsumexp(z_t), z_t = logits[t - 1] / temperature: the
    sampling temperature belongs here too, or the ratio is not 1 on-policy. Computed in
    float32 (or float64) in chunks over tokens; with several chunks each is computed
    again in the backward pass, so that no full float32 copy of the logits is ever kept.
    """
    _check_temperature(temperature)
    # The last position predicts a token beyond the end: it gets a dummy and is dropped.
    next_ids = ids.roll(-1, dims=1)

    def chosen(logits: Tensor, next_ids: Tensor) -> Tensor:
        scaled = _upcast(logits) / temperature
        picked = scaled.gather(-1, next_ids.unsqueeze(-1).long()).squeeze(-1)
        return picked - scaled.logsumexp(-1)

    return _shift(_in_chunks(chosen, logits, next_ids, chunk_elements))


@torch.no_grad()
def token_entropy(
    logits: Float[Tensor, "traj token vocab"],
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Float[Tensor, "traj token"]:
    """Entropy (nats) of the distribution each token was drawn from; entry 0 is 0.

    A measurement: it carries no gradient. Index t means token t, as in
    `token_logprobs`.
    """
    _check_temperature(temperature)

    def entropy(logits: Tensor) -> Tensor:
        logprobs = (_upcast(logits) / temperature).log_softmax(-1)
        # A banned token has logprob -inf and probability 0: 0 * -inf counts as 0.
        return -(logprobs.exp() * logprobs.clamp(min=-1e9)).sum(-1)

    return _shift(_in_chunks(entropy, logits, None, chunk_elements))


# --- what a step averages over --------------------------------------------------------


def aggregation_weights(
    action_mask: Bool[Tensor, "traj token"],
    group_index: Int[Tensor, " traj"],
    kind: str,
    *,
    num_units: int | None = None,
) -> Float[Tensor, "traj token"]:
    """Weight of each token in the step's loss: 0 off the mask, in all 1.

    "token-mean"    every action token counts the same (the paper's controlled runs);
    "prompt-mean"   every group counts the same, tokens equal inside a group;
    "sequence-mean" every trajectory counts the same, tokens equal inside it.

    Call it once on the whole step, with untrained trajectories already off the mask:
    they must not shrink the step. Where this mask is one rank's part of the step (a
    group is whole on one rank), `num_units` is `count_units` summed over the ranks. An
    empty mask gives zeros.
    """
    num_units = num_units or count_units(action_mask, group_index, kind)
    num_tokens = action_mask.sum(1)
    if kind == "prompt-mean":
        is_sibling = group_index.unsqueeze(1) == group_index  # [traj, traj]
        num_tokens = (is_sibling * num_tokens).sum(1)
    elif kind == "token-mean":
        num_tokens = torch.ones_like(num_tokens)
    per_token = 1.0 / (num_tokens.clamp(min=1) * max(num_units, 1))
    return per_token.unsqueeze(1) * action_mask


def count_units(
    action_mask: Bool[Tensor, "traj token"],
    group_index: Int[Tensor, " traj"],
    kind: str,
) -> int:
    """How many tokens, groups or trajectories (by `kind`) have something to train."""
    if kind == "token-mean":
        return int(action_mask.sum())
    is_trained = action_mask.any(1)
    if kind == "prompt-mean":
        return len(group_index[is_trained].unique())
    if kind == "sequence-mean":
        return int(is_trained.sum())
    raise ValueError(
        f"aggregation {kind!r} is unknown: token-mean, prompt-mean or sequence-mean"
    )


# --- the losses -----------------------------------------------------------------------


def clipped_policy_loss(
    logprobs: Float[Tensor, "traj token"],
    behaviour_logprobs: Float[Tensor, "traj token"],
    advantages: Float[Tensor, " traj"] | Float[Tensor, "traj token"],
    action_mask: Bool[Tensor, "traj token"],
    *,
    weights: Float[Tensor, "traj token"],
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    entropies: Float[Tensor, "traj token"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """PPO's clipped loss with DAPO's wider upper bound (2503.14476), and its sums.

    L = - sum weight * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with the ratio
    r = exp(logprobs - behaviour_logprobs). A clipped token has no gradient: A > 0 and r
    above the upper bound, or A < 0 and r below the lower one. With one update per batch
    r is 1 throughout and the clip is never active.
    """
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, action_mask)
    advantages = _per_token(advantages, action_mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    is_clipped = (clipped * advantages < ratio * advantages) & action_mask
    loss = -(weights * objective).sum()
    return loss, _sums(log_ratio, advantages, action_mask, is_clipped, entropies)


def masked_importance_policy_loss(
    logprobs: Float[Tensor, "traj token"],
    behaviour_logprobs: Float[Tensor, "traj token"],
    advantages: Float[Tensor, " traj"] | Float[Tensor, "traj token"],
    action_mask: Bool[Tensor, "traj token"],
    *,
    weights: Float[Tensor, "traj token"],
    positive_band: tuple[float, float] = (0.2, 5.0),
    negative_band: tuple[float, float] = (0.2, 5.0),
    entropies: Float[Tensor, "traj token"] | None = None,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """The importance-weighted loss of the MiMo-V2.6 report (its Eq. 1), and its sums.

    L = - sum weight * sg(r) * M * A * logprobs, with r as in `clipped_policy_loss` and
    M = 1 where r lies in the band for the sign of A, ends included. The weight sg(r) is
    a constant for the gradient; a token outside its band has none, on either side,
    which also bounds r where A < 0.
    """
    log_ratio = _log_ratio(logprobs, behaviour_logprobs, action_mask)
    advantages = _per_token(advantages, action_mask)
    ratio = log_ratio.detach().exp()
    low, high = (
        torch.where(advantages > 0, positive, negative)
        for positive, negative in zip(positive_band, negative_band, strict=True)
    )
    is_outside = ((ratio < low) | (ratio > high)) & action_mask
    kept = torch.where(is_outside, 0.0, ratio * advantages)
    loss = -(weights * kept * torch.where(action_mask, logprobs, 0.0)).sum()
    return loss, _sums(log_ratio, advantages, action_mask, is_outside, entropies)


# --- what is logged -------------------------------------------------------------------


def add_sums(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of several micro-batches or ranks, added by name."""
    names = {name for part in parts for name in part}
    return {n: sum(part[n] for part in parts if n in part) for n in sorted(names)}


def mean_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Added sums -> means over the action tokens of the step; zeros for an empty step.

    `sampler_drift` is mean |logprobs - behaviour_logprobs|: before any update it should
    be near 0, and measures by how much sampler and trainer disagree. `approx_kl` (nats)
    is mean (r - 1 - log r), an estimate of KL(behaviour || policy). `clip_fraction` is
    the share of tokens without gradient.
    """
    num_tokens = max(float(sums["num_action_tokens"]), 1.0)
    metrics = {
        "clip_fraction": sums["num_clipped"],
        "sampler_drift": sums["drift_sum"],
        "approx_kl": sums["kl_sum"],
        "mean_ratio": sums["ratio_sum"],
        "mean_abs_advantage": sums["abs_advantage_sum"],
    }
    if "entropy_sum" in sums:
        metrics["entropy"] = sums["entropy_sum"]
    return {name: float(value) / num_tokens for name, value in metrics.items()}


@torch.no_grad()
def _sums(
    log_ratio: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    is_clipped: Tensor,
    entropies: Tensor | None,
) -> dict[str, Tensor]:
    ratio = log_ratio.exp()
    sums = {
        "num_action_tokens": action_mask.sum(),
        "num_clipped": is_clipped.sum(),
        "drift_sum": log_ratio.abs().sum(),
        "kl_sum": (ratio - 1 - log_ratio).sum(),
        "ratio_sum": ratio[action_mask].sum(),
        "abs_advantage_sum": advantages.abs().sum(),
    }
    if entropies is not None:
        sums["entropy_sum"] = entropies[action_mask].sum()
    return sums


# --- helpers --------------------------------------------------------------------------


def _log_ratio(logprobs: Tensor, behaviour: Tensor, action_mask: Tensor) -> Tensor:
    """Clamped log ratio, exactly 0 off the mask, where logprobs may be anything."""
    log_ratio = torch.where(action_mask, logprobs - behaviour, 0.0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _per_token(advantages: Tensor, action_mask: Tensor) -> Tensor:
    if advantages.ndim == 1:
        advantages = advantages.unsqueeze(1)
    return torch.where(action_mask, advantages, 0.0)


def _in_chunks(
    function: Callable[..., Tensor],
    logits: Tensor,
    ids: Tensor | None,
    chunk_elements: int,
) -> Tensor:
    """Apply a function of [traj, chunk, vocab] along the tokens, a chunk at a time."""
    num_trajectories, _, num_vocab = logits.shape
    size = max(1, chunk_elements // max(1, num_trajectories * num_vocab))
    # `split`, not slices: each slice would write a gradient of the full size.
    pieces = [(piece,) for piece in logits.split(size, dim=1)]
    if ids is not None:
        chunked_ids = ids.split(size, dim=1)
        pieces = [(*p, i) for p, i in zip(pieces, chunked_ids, strict=True)]
    if len(pieces) == 1:
        return function(*pieces[0])
    return torch.cat([checkpoint(function, *p, use_reentrant=False) for p in pieces], 1)


def _shift(values: Tensor) -> Tensor:
    """Entry t - 1, read from the logits there, moves to token t, which it is about."""
    return torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], dim=1)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}: log-probs need it above 0")
