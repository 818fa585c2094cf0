"""The torch engine: the policy's own distribution, whatever the tools' timing."""

import asyncio
import random

import numpy as np
import pytest
import torch

from gagar_mini.model.policy import PolicyConfig, TinyPolicy
from gagar_mini.model.torch_engine import TorchEngine, sample
from gagar_mini.types import Completion, SamplingParams

VOCAB, STOP = 64, 1
SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=12, stop_ids=(STOP,))
CONFIG = PolicyConfig(
    vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=256
)


def make_policy(seed: int = 0, peak: float = 8.0) -> TinyPolicy:
    """A policy with random weights; `peak` sets how far from uniform it samples."""
    policy = TinyPolicy(CONFIG, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.model.norm.weight.mul_(peak)
        for layer in policy.model.layers:  # gains of 1 would hide a wrong folding
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.uniform_(0.5, 1.5, generator=generator)
    return policy


def random_ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


async def talk(engine, prompt, seed, *, turns=3, sampling=SAMPLING, delay=0.0):
    """Turns with ragged observations: all ids, and each turn's start and completion."""
    ids, completions = list(prompt), []
    with engine.conversation() as conversation:
        for turn in range(turns):
            done = await conversation.complete(ids, sampling, seed * 100 + turn)
            completions.append((len(ids), done))
            ids += done.ids.tolist() + random_ids(3 + 7 * (seed % 3) + turn, seed)
            if delay:
                await asyncio.sleep(random.random() * delay)
    return ids, completions


def run_together(engine, prompts, seeds=None, **options):
    async def gather():
        tasks = [
            talk(engine, prompt, seed, **options)
            for prompt, seed in zip(prompts, seeds or range(len(prompts)), strict=True)
        ]
        return await asyncio.gather(*tasks)

    return asyncio.run(gather())


def largest_gap(policy, talks, temperature=1.0) -> float:
    """Largest difference between reported log-probs and the policy's own, in nats."""
    gaps = []
    for ids, completions in talks:
        with torch.no_grad():
            logits = policy(torch.tensor([ids]))[0] / temperature
        logprobs = logits.log_softmax(-1).numpy()
        for start, done in completions:
            positions = np.arange(start, start + len(done.ids))
            gaps.append(logprobs[positions - 1, done.ids] - done.logprobs)
    return float(np.abs(np.concatenate(gaps)).max())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_policy(temperature):
    policy = make_policy(peak=3.0)
    prompts = [random_ids(20 + 17 * (i % 4), seed=i) for i in range(8)]
    sampling = SamplingParams(temperature, 12, (STOP,))
    talks = run_together(TorchEngine(policy), prompts, sampling=sampling, turns=4)
    lengths = {len(done.ids) for _, completions in talks for _, done in completions}
    assert len(lengths) > 3  # ragged
    assert largest_gap(policy, talks, temperature) < 1e-4


def test_sampling_follows_the_softmax():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    grid = ((np.arange(8) + 0.5) / 8).tolist()
    ids, logprobs = sample(logits.expand(8, 4), [1.0] * 8, grid)
    assert ids.tolist() == [0, 0, 0, 0, 1, 1, 2, 3]
    assert torch.equal(logprobs, logits[ids])


def test_temperature_zero_is_greedy_with_the_logprob_at_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ids, logprobs = sample(logits, [0.0], [0.99])
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())


def test_tool_delays_change_nothing():
    prompts = [random_ids(20 + i % 5, seed=i // 4) for i in range(12)]
    quick, slow, slower = (
        run_together(TorchEngine(make_policy()), prompts, delay=delay)
        for delay in (0.0, 0.02, 0.05)
    )
    for one, two in ((quick, slow), (quick, slower)):
        for (ids, completions), (other_ids, others) in zip(one, two, strict=True):
            assert ids == other_ids
            for (_, done), (_, other) in zip(completions, others, strict=True):
                assert np.array_equal(done.logprobs, other.logprobs)  # bitwise


def test_company_changes_nothing():
    prompts = [random_ids(20 + 9 * i, seed=i) for i in range(6)]
    together = run_together(TorchEngine(make_policy()), prompts)
    for seed in (0, 3, 5):
        (alone,) = run_together(TorchEngine(make_policy()), [prompts[seed]], [seed])
        assert alone[0] == together[seed][0]


def test_members_differ_by_their_seed_alone():
    prompt = random_ids(30, seed=0)
    same = run_together(TorchEngine(make_policy(peak=1.0)), [prompt] * 3, [5, 5, 6])
    assert same[0][0] == same[1][0] != same[2][0]


def test_a_shared_prompt_is_read_once(monkeypatch):
    policy, prompt = make_policy(peak=3.0), random_ids(40, seed=0)
    engine, read = TorchEngine(policy), []
    prefill = engine.model.prefill

    def count(rows, ids, starts):
        read.extend(len(new) for new in ids)
        return prefill(rows, ids, starts)

    monkeypatch.setattr(engine.model, "prefill", count)
    talks = run_together(engine, [prompt] * 5, turns=1)
    assert read == [40]
    assert largest_gap(policy, talks) < 1e-4


def test_more_conversations_than_rows_wait_their_turn():
    policy = make_policy(peak=3.0)
    prompts = [random_ids(15 + i, seed=i) for i in range(9)]
    narrow = run_together(TorchEngine(policy, max_rows=2), prompts)
    assert [ids for ids, _ in narrow] == [
        ids for ids, _ in run_together(TorchEngine(policy), prompts)
    ]
    assert largest_gap(policy, narrow) < 1e-4


def test_a_completion_ends_with_its_stop_token_or_at_its_limit():
    policy = make_policy(peak=1.0)
    sampling = SamplingParams(1.0, 30, tuple(range(VOCAB // 8)))
    talks = run_together(TorchEngine(policy), [random_ids(9, 0)] * 8, sampling=sampling)
    completions = [done for _, turns in talks for _, done in turns]
    for done in completions:
        assert not set(done.ids[:-1].tolist()) & set(sampling.stop_ids)
        assert done.is_finished == (done.ids[-1] in sampling.stop_ids)
        assert done.is_finished or len(done.ids) == 30
    assert any(done.is_finished for done in completions)


def test_a_full_context_ends_the_completion_unfinished():
    engine = TorchEngine(make_policy(), max_context=32)
    endless = SamplingParams(1.0, 20, ())

    async def fill() -> tuple[Completion, Completion]:
        with engine.conversation() as conversation:
            ids = random_ids(25, seed=0)
            first = await conversation.complete(ids, endless, 0)
            ids += first.ids.tolist()
            return first, await conversation.complete(ids, endless, 1)

    first, second = asyncio.run(fill())
    assert (len(first.ids), first.is_finished) == (32 - 25, False)
    assert (len(second.ids), second.is_finished) == (0, False)


def test_a_failed_conversation_gives_its_row_back():
    engine = TorchEngine(make_policy(), max_rows=2)

    async def fail(seed: int) -> None:
        with engine.conversation() as conversation:
            await conversation.complete(random_ids(9, seed), SAMPLING, seed)
            raise LookupError("a tool broke")

    async def gather() -> list[object]:
        failures = [fail(seed) for seed in range(5)]
        cancelled = asyncio.create_task(talk(engine, random_ids(9, 9), 9, turns=50))
        asyncio.get_running_loop().call_later(0.05, cancelled.cancel)
        good = talk(engine, random_ids(12, 1), 1)
        return await asyncio.gather(*failures, cancelled, good, return_exceptions=True)

    *failures, cancelled, good = asyncio.run(gather())
    assert all(isinstance(failure, LookupError) for failure in failures)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert good[0] == run_together(engine, [random_ids(12, 1)], [1])[0][0]


def test_an_error_in_a_round_reaches_every_caller(monkeypatch):
    engine = TorchEngine(make_policy())
    monkeypatch.setattr(engine.model, "cache", torch.zeros(1))  # of a wrong shape

    async def gather() -> list[object]:
        talks = [talk(engine, random_ids(9, 0), seed) for seed in range(3)]
        return await asyncio.gather(*talks, return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(gather(), timeout=10))
    assert all(isinstance(result, IndexError) for result in results)


def test_synced_weights_are_sampled_and_stamped():
    old, new = make_policy(seed=0, peak=3.0), make_policy(seed=1, peak=3.0)
    engine, prompts = TorchEngine(old), [random_ids(20, 0)] * 4
    run_together(engine, prompts)
    asyncio.run(engine.sync_weights(new, version=7))
    with torch.no_grad():  # the copy is private
        next(old.parameters()).zero_()
    talks = run_together(engine, prompts)
    assert largest_gap(new, talks) < 1e-4
    versions = [done.weight_version for _, turns in talks for _, done in turns]
    assert set(versions) == {7}


def test_weights_cannot_change_under_a_conversation():
    engine, policy = TorchEngine(make_policy()), make_policy(seed=1)

    async def sync_too_early() -> None:
        with engine.conversation():
            await engine.sync_weights(policy, version=1)

    with pytest.raises(RuntimeError, match="conversation is open"):
        asyncio.run(sync_too_early())
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(engine.sync_weights(policy, version=1))
    assert engine.weight_version == 0


def test_a_changed_past_is_refused():
    async def rewrite(engine: TorchEngine) -> None:
        with engine.conversation() as conversation:
            done = await conversation.complete([2, 3, 4], SAMPLING, 0)
            await conversation.complete([2, 9, 4, *done.ids, 5], SAMPLING, 1)

    with pytest.raises(AssertionError, match="past"):
        asyncio.run(rewrite(TorchEngine(make_policy())))


def test_sleep_frees_the_cache_and_work_wakes_it():
    engine, prompts = TorchEngine(make_policy()), [random_ids(20, 0)]
    before = run_together(engine, prompts)
    asyncio.run(engine.sleep())
    assert engine.model.cache is None
    assert run_together(engine, prompts)[0][0] == before[0][0]
    asyncio.run(engine.close())
