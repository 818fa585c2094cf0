"""Log-probs and losses: by hand, by finite differences, and what must not matter."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from gagar_mini.learn.losses import (
    add_sums,
    aggregation_weights,
    clipped_policy_loss,
    count_units,
    masked_importance_policy_loss,
    mean_metrics,
    token_entropy,
    token_logprobs,
)

KINDS = ["token-mean", "prompt-mean", "sequence-mean"]
LOSSES = [clipped_policy_loss, masked_importance_policy_loss]


def random_step(seed: int = 0, vocab: int = 7) -> dict[str, Tensor]:
    """Two groups of three trajectories, nine tokens wide, in float64.

    Row 1 has an observation between two actions, row 4 was masked altogether.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    action_mask = torch.zeros(6, 9, dtype=torch.bool)
    for row, actions in enumerate([(3, 9), (2, 8), (2, 4), (5, 6), (0, 0), (1, 9)]):
        action_mask[row, slice(*actions)] = True
    action_mask[1, 4:6] = False
    ids = torch.randint(0, vocab, (6, 9), generator=generator)
    logits = 2 * draw(6, 9, vocab)
    return {
        "logits": logits,
        "ids": ids,
        "behaviour_logprobs": token_logprobs(logits, ids) + 0.4 * draw(6, 9),
        "advantages": torch.tensor([0.7, 0.1, -0.8, 0.5, 0.0, -0.5]).double(),
        "action_mask": action_mask,
        "group_index": torch.tensor([8, 8, 8, 3, 3, 3]),
    }


def loss_of(step: dict[str, Tensor], loss, kind: str = "token-mean", rows=slice(None)):
    """The loss of some rows of a step, with the weights of the whole step."""
    weights = aggregation_weights(step["action_mask"], step["group_index"], kind)
    return loss(
        token_logprobs(step["logits"][rows], step["ids"][rows]),
        step["behaviour_logprobs"][rows],
        step["advantages"][rows],
        step["action_mask"][rows],
        weights=weights[rows],
    )


def one_token(loss, log_ratio: float, advantage: float, **bounds):
    """Loss, gradient and sums of one token whose sampler gave it log-prob -1."""
    logprobs = torch.tensor([[-1.0 + log_ratio]], dtype=torch.float64)
    logprobs.requires_grad_()
    mask = torch.ones(1, 1, dtype=torch.bool)
    behaviour, weights = torch.full_like(logprobs, -1.0).detach(), mask.double()
    advantages = torch.tensor([advantage], dtype=torch.float64)
    value, sums = loss(logprobs, behaviour, advantages, mask, weights=weights, **bounds)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.item(), gradient.item(), sums


# --- reading logits -------------------------------------------------------------------


def test_entry_t_is_about_token_t():
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1, 1, 1]]]))
    ids = torch.tensor([[0, 1, 2]])
    expected = torch.tensor([[0.0, math.log(0.25), math.log(0.7)]])
    assert_close(token_logprobs(logits, ids), expected)
    entropies = [0.0, 1.5 * math.log(2), -sum(p * math.log(p) for p in (0.1, 0.2, 0.7))]
    assert_close(token_entropy(logits), torch.tensor([entropies]))


def test_temperature_divides_the_logits():
    logits, ids = torch.tensor([[[2.0, 0.0], [0.0, 0.0]]]), torch.tensor([[1, 0]])
    expected = math.log(math.e**4 / (math.e**4 + 1))  # 2 / 0.5 = 4
    # ids[0, 1] is 0, the token with logit 2
    logprobs = token_logprobs(logits.double(), ids, temperature=0.5)
    assert float(logprobs[0, 1]) == pytest.approx(expected)
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprobs(logits, ids, temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_change_neither_values_nor_gradients(dtype):
    step = random_step(vocab=11)
    results = []
    for chunk_elements in (10**9, 3 * 6 * 11, 1):  # one chunk, three, one per token
        logits = step["logits"].to(dtype).requires_grad_()
        read = {"temperature": 0.7, "chunk_elements": chunk_elements}
        logprobs = token_logprobs(logits, step["ids"], **read)
        (gradient,) = torch.autograd.grad((logprobs**2).sum(), logits)
        results.append((logprobs, gradient, token_entropy(logits, **read)))
    for result in results[1:]:
        assert_close(result, results[0])
    scaled = results[0][0].new_tensor(step["logits"].to(dtype).tolist()) / 0.7
    naive = scaled.log_softmax(-1)[:, :-1]
    expected = naive.gather(-1, step["ids"][:, 1:, None]).squeeze(-1)
    assert_close(results[0][0][:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_logprob_gradient_equals_finite_differences():
    step = random_step(vocab=3)
    logits = step["logits"][:2, :4].clone().requires_grad_()
    for chunk_elements in (10**9, 1):
        read = partial(token_logprobs, ids=step["ids"][:2, :4], temperature=1.3)
        assert torch.autograd.gradcheck(
            partial(read, chunk_elements=chunk_elements), (logits,)
        )


def test_a_banned_token_has_no_share_in_the_entropy():
    logits = torch.tensor([[[0.0, 0.0, -math.inf]] * 2])
    assert float(token_entropy(logits)[0, 1]) == pytest.approx(math.log(2))


# --- what a step averages over --------------------------------------------------------


def test_weights_by_hand():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    groups = torch.tensor([5, 5, 2, 9])  # the last group has nothing to train
    expected = {
        "token-mean": [1 / 6, 1 / 6, 1 / 6, 0],
        "prompt-mean": [1 / 2 / 4, 1 / 2 / 4, 1 / 2 / 2, 0],
        "sequence-mean": [1 / 3 / 3, 1 / 3 / 1, 1 / 3 / 2, 0],
    }
    for kind in KINDS:
        weights = aggregation_weights(mask, groups, kind)
        assert_close(weights, torch.tensor(expected[kind]).unsqueeze(1) * mask)
    assert [count_units(mask, groups, kind) for kind in KINDS] == [6, 2, 3]


def test_a_long_trajectory_outweighs_a_short_one_only_by_tokens():
    # 4 tokens of loss 1 and one of loss 5: 9/5 by tokens, 3 as a mean of means
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]).bool()
    losses = torch.tensor([[1.0, 1, 1, 1], [5.0, 0, 0, 0]])
    for kind, expected in (("token-mean", 9 / 5), ("sequence-mean", 3.0)):
        weights = aggregation_weights(mask, torch.tensor([0, 1]), kind)
        assert float((weights * losses).sum()) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_with_a_global_count_equal_one(kind):
    step = random_step()
    mask, groups = step["action_mask"], step["group_index"]
    parts = [slice(0, 3), slice(3, 6)]  # a group is whole on one rank
    num_units = sum(count_units(mask[p], groups[p], kind) for p in parts)
    by_rank = [
        aggregation_weights(mask[p], groups[p], kind, num_units=num_units)
        for p in parts
    ]
    assert_close(torch.cat(by_rank), aggregation_weights(mask, groups, kind))


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="'mean' is unknown"):
        aggregation_weights(torch.ones(1, 1).bool(), torch.tensor([0]), "mean")


# --- one token ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # gradient by log-prob: -ratio * A
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -1.28 * 2, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -1.0),  # below, but A > 0: not clipped
        (0.5, -2.0, 0.8 * 2, 0.0),  # clipped below
        (1.5, -2.0, 3.0, 3.0),  # above, but A < 0: not clipped
    ],
)
def test_clip_by_hand(ratio, advantage, value, gradient):
    result = one_token(clipped_policy_loss, math.log(ratio), advantage)
    assert result[:2] == pytest.approx((value, gradient))
    assert int(result[2]["num_clipped"]) == (gradient == 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_kept"),
    [
        (1.0, 2.0, 1),
        (4.9, 2.0, 1),
        (5.1, 2.0, 0),
        (0.19, -2.0, 0),
        (2.9, -2.0, 1),
        (3.1, -2.0, 0),
    ],
)
def test_masked_importance_by_hand(ratio, advantage, is_kept):
    bands = {"positive_band": (0.2, 5.0), "negative_band": (0.2, 3.0)}
    value, gradient, sums = one_token(
        masked_importance_policy_loss, math.log(ratio), advantage, **bands
    )
    logprob = -1 + math.log(ratio)
    expected = (-is_kept * ratio * advantage * logprob, -is_kept * ratio * advantage)
    assert (value, gradient) == pytest.approx(expected)
    assert int(sums["num_clipped"]) == 1 - is_kept


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [-1e4, -60.0, 60.0, 1e4])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_runaway_policy_stays_finite(loss, log_ratio, advantage):
    value, gradient, sums = one_token(loss, log_ratio, advantage)
    metrics = mean_metrics(sums)
    assert all(map(math.isfinite, [value, gradient, *metrics.values()]))


# --- a whole step ---------------------------------------------------------------------


def test_clipped_gradient_equals_finite_differences():
    step = random_step(vocab=3)
    logits = step["logits"].requires_grad_()

    def value(logits: Tensor) -> Tensor:
        return loss_of({**step, "logits": logits}, clipped_policy_loss)[0]

    assert torch.autograd.gradcheck(value, (logits,))


def test_masked_importance_gradient_treats_the_weight_as_constant():
    step = random_step()
    logprobs = token_logprobs(step["logits"], step["ids"]).requires_grad_()
    mask, behaviour = step["action_mask"], step["behaviour_logprobs"]
    weights = aggregation_weights(mask, step["group_index"], "token-mean")
    loss, _ = masked_importance_policy_loss(
        logprobs, behaviour, step["advantages"], mask, weights=weights
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    ratio = (logprobs - behaviour).exp().detach()
    kept = mask & (ratio >= 0.2) & (ratio <= 5.0)
    assert_close(gradient, -weights * kept * ratio * step["advantages"][:, None])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_any_split_into_micro_batches_is_the_same_step(loss, kind):
    step = random_step()
    step["logits"].requires_grad_()
    whole, sums = loss_of(step, loss, kind)
    (gradient,) = torch.autograd.grad(whole, step["logits"])
    for split in (
        [[0, 1, 2, 3, 4, 5]],
        [[5, 0], [4], [1, 3, 2]],
        [[i] for i in range(6)],
    ):
        parts = [loss_of(step, loss, kind, rows) for rows in split]
        total = sum(part for part, _ in parts)
        assert_close(total, whole)
        assert_close(torch.autograd.grad(total, step["logits"])[0], gradient)
        added = mean_metrics(add_sums(*(sums for _, sums in parts)))
        assert added == pytest.approx(mean_metrics(sums))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing(loss, kind):
    step = random_step()
    whole, sums = loss_of(step, loss, kind)
    for left, right in ((0, 3), (2, 0), (1, 4)):
        pad = partial(torch.nn.functional.pad, pad=(left, right))
        padded = {
            **step,
            "ids": pad(step["ids"]),
            "logits": pad(step["logits"].transpose(1, 2)).transpose(1, 2),
            "behaviour_logprobs": pad(step["behaviour_logprobs"], value=math.nan),
            "action_mask": pad(step["action_mask"]),
        }
        again, again_sums = loss_of(padded, loss, kind)
        assert_close(again, whole)
        assert mean_metrics(again_sums) == pytest.approx(mean_metrics(sums))


@pytest.mark.parametrize("loss", LOSSES)
def test_observations_teach_nothing_and_the_end_of_a_turn_does(loss):
    step = random_step()
    step["behaviour_logprobs"] = token_logprobs(step["logits"], step["ids"])
    step["logits"].requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(step, loss)[0], step["logits"])
    # Token t is scored by the logits at t - 1.
    is_trained = gradient.abs().sum(-1).roll(1, dims=1) > 0
    expected = step["action_mask"] & (step["advantages"] != 0).unsqueeze(1)
    assert torch.equal(is_trained, expected)
    assert is_trained[1, [3, 7]].all()  # the last token of each turn of row 1
    assert not is_trained[1, 4:6].any()  # the observation between them


@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(loss):
    step = random_step()
    logprobs = token_logprobs(step["logits"], step["ids"]).requires_grad_()
    mask = step["action_mask"]
    weights = aggregation_weights(mask, step["group_index"], "token-mean")
    advantages = step["advantages"].unsqueeze(1).expand_as(mask)  # [N, T] serves too
    value, sums = loss(logprobs, logprobs.detach(), advantages, mask, weights=weights)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert_close(gradient, -weights * advantages)
    metrics = mean_metrics(sums)
    assert metrics["mean_ratio"] == 1
    assert metrics["clip_fraction"] == metrics["sampler_drift"] == 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_actions_is_a_legal_no_op(loss, kind):
    step = random_step()
    step["action_mask"] = torch.zeros_like(step["action_mask"])
    step["logits"].requires_grad_()
    value, sums = loss_of(step, loss, kind)
    (gradient,) = torch.autograd.grad(value, step["logits"])
    assert value.item() == 0
    assert not gradient.any()
    assert set(mean_metrics(sums).values()) == {0.0}


def test_metrics_are_means_over_action_tokens():
    logprobs = torch.tensor([[-9.0, -1.0, -2.0], [-9.0, -3.0, -9.0]])
    behaviour = torch.tensor([[0.0, -1.5, -2.0], [0.0, -2.0, 0.0]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]]).bool()
    _, sums = clipped_policy_loss(
        logprobs,
        behaviour,
        torch.tensor([1.0, -1.0]),
        mask,
        weights=mask / 3,
        entropies=torch.tensor([[7.0, 0.5, 0.25], [7.0, 0.75, 7.0]]),
    )
    metrics = mean_metrics(
        sums
    )  # log ratios 0.5 (A > 0: clipped), 0, -1 (A < 0: clipped)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["sampler_drift"] == pytest.approx(1.5 / 3)
    assert metrics["entropy"] == pytest.approx(1.5 / 3)
    kl = (math.exp(0.5) - 1.5) + (math.exp(-1) - 1 + 1)
    assert metrics["approx_kl"] == pytest.approx(kl / 3)
