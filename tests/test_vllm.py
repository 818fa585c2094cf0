"""The engine that is vLLM: the trainer's distribution after every sync, whatever runs
beside it. All but the first test need vLLM itself (marker `vllm`)."""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import torch
from chat_world import chat_tokenizer
from test_chat import SIZES
from test_engine import largest_gap, run_together, talk
from transformers import Qwen3Config, Qwen3ForCausalLM

from gagar_mini.config import PRESETS, with_overrides
from gagar_mini.learn.opening import open_engine, save_whole_policy
from gagar_mini.model.chat_policy import ChatPolicy
from gagar_mini.model.policy import load_policy
from gagar_mini.model.vllm_engine import VllmEngine, VllmOptions, barred_ids
from gagar_mini.model.vllm_server import VllmServerEngine
from gagar_mini.paths import find_checkpoint
from gagar_mini.types import SamplingParams

needs_vllm = pytest.mark.vllm
FOLDER = find_checkpoint("data/policy/tiny")
NUM_TOKENS = 1000  # of 1024: the rest is barred, as if the tokenizer did not have it
SAMPLING = SamplingParams(1.0, 12, (3,))
MAX_GAP = 1e-3  # nats


def random_ids(length, seed):
    return np.random.default_rng(seed).integers(0, NUM_TOKENS, length).tolist()


PROMPTS = [random_ids(60 + 70 * (i % 4), i) for i in range(12)]


def fresh_policy():
    return load_policy(FOLDER)[0]


def changed(policy, seed):
    """Moved as far as many updates would, tied embedding and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return policy


def masked(policy, num_tokens=NUM_TOKENS):
    def logits(ids):
        found = policy(ids).clone()
        found[..., num_tokens:] = -torch.inf
        return found

    return logits


def completions(talks):
    return [done for _, turns in talks for _, done in turns]


def next_logprobs(policy, prompt):
    with torch.no_grad():
        return masked(policy)(torch.tensor([prompt]))[0, -1].log_softmax(-1)


@pytest.fixture(scope="module")
def engine():
    """One engine for all tests, fewer rows than conversations; a test that needs known
    weights syncs them."""
    opened = VllmEngine(FOLDER, NUM_TOKENS, VllmOptions(max_rows=8))
    yield opened
    asyncio.run(opened.close())


@pytest.fixture
def synced(engine):
    """The engine with the shipped weights."""
    asyncio.run(engine.sync_weights(fresh_policy(), version=0))
    return engine


def test_without_vllm_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'gagar-mini\[vllm\]'"):
        VllmEngine(FOLDER, NUM_TOKENS)
    with pytest.raises(ValueError, match=r"pip install 'gagar-mini\[endpoint\]'"):
        VllmServerEngine(
            ["http://h"], 1, 1, write_folder=save_whole_policy, exchange=FOLDER
        )


def test_ids_beyond_the_tokenizer_are_barred():
    assert barred_ids(3, 5) == {3: -100.0, 4: -100.0}
    assert barred_ids(5, 5) == {}
    with pytest.raises(ValueError, match="1024 ids at most"):
        barred_ids(10, 2000)


@needs_vllm
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_after_every_sync(engine, temperature):
    policy, sampling = fresh_policy(), SamplingParams(temperature, 12, (3,))
    for version in range(1, 4):
        changed(policy, seed=version)
        asyncio.run(engine.sync_weights(policy, version))
        talks = run_together(engine, PROMPTS, sampling=sampling)
        assert largest_gap(masked(policy), talks, temperature) < MAX_GAP
        assert {done.weight_version for done in completions(talks)} == {version}


@needs_vllm
def test_the_engine_keeps_a_copy_of_its_own(engine):
    policy = changed(fresh_policy(), seed=5)
    asyncio.run(engine.sync_weights(policy, version=1))
    with torch.no_grad():
        next(policy.parameters()).zero_()
    talks = run_together(engine, PROMPTS[:4])
    assert largest_gap(masked(changed(fresh_policy(), seed=5)), talks) < MAX_GAP


@needs_vllm
def test_sampling_follows_the_softmax(synced):
    prompt, num = PROMPTS[0], 400
    sampling = SamplingParams(1.0, 1, ())
    talks = run_together(synced, [prompt] * num, sampling=sampling, turns=1)
    drawn = [int(done.ids[0]) for done in completions(talks)]
    counts = np.bincount(drawn, minlength=1024) / num
    expected = next_logprobs(fresh_policy(), prompt).exp().numpy()
    likely = np.flatnonzero(expected > 0.02)
    assert len(likely) > 3  # there is something to tell
    standard_error = np.sqrt(expected * (1 - expected) / num)
    assert (abs(counts - expected)[likely] < 4 * standard_error[likely]).all()


@needs_vllm
def test_equal_weights_and_seeds_repeat_and_other_seeds_differ(synced):
    first = run_together(synced, [PROMPTS[1]] * 3, [5, 5, 6])
    assert first[0][0] == first[1][0] != first[2][0]
    asyncio.run(synced.sync_weights(fresh_policy(), version=1))
    assert run_together(synced, [PROMPTS[1]] * 3, [5, 5, 6])[2][0] == first[2][0]


@needs_vllm
def test_temperature_zero_is_greedy_with_the_logprob_at_one(synced):
    talks = run_together(synced, PROMPTS[:3], sampling=SamplingParams(0.0, 5, ()))
    assert largest_gap(masked(fresh_policy()), talks) < MAX_GAP
    for ids, turns in talks:
        start, done = turns[0]
        best = next_logprobs(fresh_policy(), ids[:start]).argmax()
        assert done.ids[0] == best


@needs_vllm
def test_a_completion_ends_with_its_stop_token_or_at_its_limit(synced):
    sampling = SamplingParams(1.0, 30, tuple(range(300)))
    found = completions(run_together(synced, PROMPTS, sampling=sampling))
    for done in found:
        assert not set(done.ids[:-1].tolist()) & set(sampling.stop_ids)
        assert done.is_finished == (done.ids[-1] in sampling.stop_ids)
        assert done.is_finished or len(done.ids) == 30
        assert len(done.ids) == len(done.logprobs)
    assert any(done.is_finished for done in found)


@needs_vllm
def test_ids_without_a_token_are_never_sampled(engine):
    policy, prompt = fresh_policy(), PROMPTS[0]
    favourite = int(next_logprobs(policy, prompt).argmax())
    with torch.no_grad():  # the tied head would choose it everywhere
        policy.model.embed_tokens.weight[NUM_TOKENS + 5] = (
            4 * policy.model.embed_tokens.weight[favourite]
        )
        unmasked = policy(torch.tensor([prompt]))[0, -1]
    assert unmasked.argmax() == NUM_TOKENS + 5
    asyncio.run(engine.sync_weights(policy, version=1))
    talks = run_together(engine, [prompt] * 8)
    assert max(int(done.ids.max()) for done in completions(talks)) < NUM_TOKENS
    assert largest_gap(masked(policy), talks) < MAX_GAP


@needs_vllm
def test_keys_and_values_of_old_weights_are_forgotten(synced, monkeypatch):
    policy, prompts = changed(fresh_policy(), seed=1), [random_ids(300, 1)] * 4
    run_together(synced, prompts)
    with monkeypatch.context() as patched:
        patched.setattr(synced.core, "reset_prefix_cache", lambda: True)
        asyncio.run(synced.sync_weights(policy, version=1))
    stale = run_together(synced, prompts)
    assert largest_gap(masked(policy), stale) > 0.1
    asyncio.run(synced.sync_weights(policy, version=2))
    assert largest_gap(masked(policy), run_together(synced, prompts)) < MAX_GAP


@needs_vllm
def test_more_tokens_than_one_pass_reads(synced):
    prompts = [random_ids(700, seed) for seed in range(8)]
    talks = run_together(synced, prompts, turns=2)
    assert largest_gap(masked(fresh_policy()), talks) < MAX_GAP


@needs_vllm
def test_a_full_context_ends_the_completion_unfinished(synced):
    ids, turns = asyncio.run(talk(synced, random_ids(1020, 0), 0, turns=2))
    first, second = (done for _, done in turns)
    assert (len(first.ids), first.is_finished) == (4, False) or first.is_finished
    if len(ids) > 1024:
        assert (len(second.ids), second.is_finished) == (0, False)


@needs_vllm
def test_a_cancelled_call_leaves_the_others_alone(synced):
    endless = SamplingParams(1.0, 700, ())

    async def gather():
        doomed = asyncio.create_task(talk(synced, PROMPTS[0], 1, sampling=endless))
        good = asyncio.create_task(talk(synced, PROMPTS[1], 1))
        await asyncio.sleep(0.05)
        doomed.cancel()
        return await asyncio.gather(doomed, good, return_exceptions=True)

    cancelled, good = asyncio.run(gather())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert largest_gap(masked(fresh_policy()), [good]) < MAX_GAP
    policy = changed(fresh_policy(), seed=2)
    asyncio.run(synced.sync_weights(policy, version=1))  # nothing holds the cache
    assert largest_gap(masked(policy), run_together(synced, PROMPTS[:4])) < MAX_GAP
    assert synced.num_open == 0


@needs_vllm
def test_an_error_reaches_every_caller(synced, monkeypatch):
    def fail():
        raise LookupError("broken")

    async def gather():
        talks = [talk(synced, PROMPTS[0], seed) for seed in range(3)]
        return await asyncio.gather(*talks, return_exceptions=True)

    with monkeypatch.context() as patched:
        patched.setattr(synced.core, "step", fail)
        errors = asyncio.run(asyncio.wait_for(gather(), timeout=20))
    assert all(isinstance(error, LookupError) for error in errors)
    talks = run_together(synced, PROMPTS[:3])
    assert largest_gap(masked(fresh_policy()), talks) < MAX_GAP


@needs_vllm
def test_weights_that_do_not_fit_are_refused(engine):
    policy = fresh_policy()

    async def sync_too_early():
        with engine.conversation():
            await engine.sync_weights(policy, version=9)

    with pytest.raises(RuntimeError, match="conversation is open"):
        asyncio.run(sync_too_early())

    for name in ("model.norm.weight", "otherwise.named"):
        partial = torch.nn.Module()
        partial.export_weights = lambda name=name: {name: policy.model.norm.weight}
        with pytest.raises((KeyError, ValueError), match=r"no weight|otherwise"):
            asyncio.run(engine.sync_weights(partial, version=9))
    with torch.no_grad():
        policy.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(engine.sync_weights(policy, version=9))
    assert engine.weight_version != 9


@needs_vllm
def test_a_cpu_has_nothing_to_sleep_on(synced):
    before = run_together(synced, PROMPTS[:2])
    asyncio.run(synced.sleep())
    asyncio.run(synced.wake())
    assert run_together(synced, PROMPTS[:2])[1][0] == before[1][0]


@needs_vllm
@pytest.mark.parametrize("uses_disk", [True, False])
def test_weights_may_go_through_the_disk(engine, uses_disk):
    """From the start, or once they turn out to have other names."""
    policy, tokenizer = load_policy(FOLDER)

    def write_folder(policy, folder):
        save_whole_policy(policy, tokenizer, folder)

    options = VllmOptions(max_rows=8, write_folder=write_folder, uses_disk=uses_disk)
    disk = VllmEngine(FOLDER, NUM_TOKENS, options)
    policy.export_weights = lambda: {"otherwise.named": policy.model.norm.weight}
    for version in (1, 2):
        changed(policy, seed=version)
        asyncio.run(disk.sync_weights(policy, version))
        assert disk.uses_disk
        assert largest_gap(masked(policy), run_together(disk, PROMPTS)) < MAX_GAP


def random_qwen(tie):
    """Wide enough heads for vLLM, and 32 logits without a token."""
    config = Qwen3Config(
        vocab_size=len(chat_tokenizer()) + 32,
        tie_word_embeddings=tie,
        **(SIZES | {"head_dim": 32, "max_position_embeddings": 512}),
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


@needs_vllm
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_chat_models_and_their_adapters(engine, tie, lora_rank):
    tokenizer, model = chat_tokenizer(), random_qwen(tie)
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=lora_rank, target_modules="all-linear")
        model = get_peft_model(model, adapter)
    policy = ChatPolicy(model, max(tokenizer.get_vocab().values()) + 1)
    config = with_overrides(
        PRESETS["tiny"](), {"engine": "vllm", "rollout.max_context_tokens": 256}
    )
    chat = open_engine(policy, tokenizer, config, max_rows=4)
    prompts = [np.random.default_rng(i).integers(0, 200, 40).tolist() for i in range(5)]
    for seed in (1, 2):
        trained = [w for w in policy.parameters() if w.requires_grad]
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in trained:
                weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
        asyncio.run(chat.sync_weights(policy, version=seed))
        assert largest_gap(policy, run_together(chat, prompts)) < MAX_GAP


@needs_vllm
def test_a_run_samples_with_vllm(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "gagar_mini", "train", "--preset", "tiny"]
    command += ["--engine", "vllm", "--steps", "2", "--run-dir", str(run)]
    command += ["--sampling.tasks-per-round", "4", "--sampling.groups-per-step", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [m["step"] for m in metrics] == [0, 1]
    # none where what trained first was carried over, from older weights
    drifts = [d for m in metrics if (d := m["policy/sampler_drift"]) is not None]
    assert drifts and max(drifts) < 1e-4
    assert all(0 < m["reward/pass_rate"] < 1 for m in metrics)


@contextlib.contextmanager
def vllm_server(log):
    """A server of the shipped policy, by the command of the module's first lines."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(FOLDER), "--dtype", "float32", "--enforce-eager"]
    command += ["--logprobs-mode", "processed_logprobs", "--port", str(port)]
    command += ["--generation-config", "vllm", "--no-enable-chunked-prefill"]
    command += ["--kv-cache-memory-bytes", str(128 << 20), "--host", "127.0.0.1"]
    command += ["--worker-extension-cls"]
    command += ["gagar_mini.model.vllm_server.ReloadExtension"]
    settings = {"OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    settings |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(url, process, log, timeout_s=400):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(urllib.error.URLError, OSError):
            return urllib.request.urlopen(f"{url}/health", timeout=5).close()
        time.sleep(0.5)
    raise AssertionError(f"no server: {log.read_text()[-2000:]}")


@needs_vllm
def test_a_server_samples_and_takes_new_weights(tmp_path):
    policy, tokenizer = load_policy(FOLDER)

    def write_folder(policy, folder):
        save_whole_policy(policy, tokenizer, folder)

    with vllm_server(tmp_path / "log") as url:
        engine = VllmServerEngine(
            [url, f"{url}/v1"],
            NUM_TOKENS,
            policy.config.vocab_size,
            write_folder=write_folder,
            exchange=tmp_path,
        )
        assert engine.max_context == 1024
        for version in range(3):
            talks = run_together(engine, PROMPTS, sampling=SAMPLING)
            assert largest_gap(masked(policy), talks) < MAX_GAP
            done = completions(talks)
            assert {one.weight_version for one in done} == {version}
            assert max(int(one.ids.max()) for one in done) < NUM_TOKENS
            changed(policy, seed=version)
            asyncio.run(engine.sync_weights(policy, version + 1))
        assert [path.name for path in tmp_path.iterdir()] == ["log"]
        asyncio.run(engine.close())
    with pytest.raises(ValueError, match="no vLLM server answers"):
        VllmServerEngine([url], 1, 1, write_folder=write_folder, exchange=tmp_path)
