"""The check that an engine samples from the trainer's distribution."""

import asyncio

import numpy as np
import pytest
import torch
from test_engine import SAMPLING, make_policy, random_ids

from gagar_mini.model.self_check import check_engine, check_logprobs, teacher_forced
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.types import SamplingParams

PROMPTS = [random_ids(9 + 5 * i, i) for i in range(3)]


def check(engine, policy, sampling=SAMPLING, **settings):
    return asyncio.run(
        check_engine(engine, policy, PROMPTS, sampling, seed=0, **settings)
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_the_same_weights_pass(temperature):
    policy = make_policy(peak=3.0)
    gap = check(TorchEngine(policy), policy, SamplingParams(temperature, 12, ()))
    assert gap.num_tokens == 3 * 12 and gap.mean <= gap.max < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stale_weights_are_told(dtype):
    engine, policy = TorchEngine(make_policy(seed=0)), make_policy(seed=1)
    with pytest.raises(ValueError, match="last sync"):
        check(engine, policy, dtype=dtype)


def test_another_temperature_is_told():
    policy = make_policy(peak=3.0)
    with pytest.raises(ValueError, match="processed_logprobs"):
        check(TorchEngine(policy), lambda ids: policy(ids) / 0.9)


def test_logits_that_are_left_out_do_not_count():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    found = teacher_forced(lambda ids: logits.expand(1, ids.shape[1], 4), [0], [1])
    assert found == pytest.approx(np.log([0.25]))
    found = teacher_forced(lambda ids: logits[:3].expand(1, 2, 3), [0], [1])
    assert found == pytest.approx(np.log([0.25 / 0.875]))


def test_float32_looks_at_the_largest_gap_and_bfloat16_at_the_mean():
    one_off = [np.zeros(99), np.array([-0.01])]
    exact = [np.zeros(99), np.zeros(1)]
    with pytest.raises(ValueError, match="largest of 100 tokens"):
        check_logprobs(exact, one_off, dtype="float32")
    assert check_logprobs(exact, one_off, dtype="bfloat16").mean == pytest.approx(1e-4)
    with pytest.raises(ValueError, match="mean of 100 tokens"):
        check_logprobs(exact, [x - 0.06 for x in exact], dtype="bfloat16")


def test_nothing_and_nan_are_no_pass():
    with pytest.raises(ValueError, match="no token"):
        check_logprobs([np.zeros(0)], [np.zeros(0)], dtype="float32")
    with pytest.raises(ValueError, match="nan nats"):
        check_logprobs([np.zeros(2)], [np.array([0.0, np.nan])], dtype="bfloat16")
