"""Chat models in training: log-probs, adapters, packing, checkpoints, updates.

The models are random, small, and of real architectures; their tokenizer is bytes.
"""

import asyncio
import json
import shutil
from dataclasses import replace

import pytest
import torch
from chat_world import chat_tokenizer
from synthetic import FAIL, PASS
from test_chat import random_model
from torch.testing import assert_close
from transformers import GraniteConfig, GraniteForCausalLM

from gagar_mini.agent.chat_dialect import ChatDialect
from gagar_mini.agent.rollouts import Harness, rollout_group
from gagar_mini.config import PRESETS, ChatSftConfig, RunConfig, with_overrides
from gagar_mini.cost import estimate_memory, model_size
from gagar_mini.learn.batching import build_batch
from gagar_mini.learn.chat_sft import fit_chat, pack, packed_batches, taught_loss
from gagar_mini.learn.collecting import TaskSampler
from gagar_mini.learn.demonstrations import Demonstration
from gagar_mini.learn.opening import (
    expected_memory,
    is_chat,
    open_engine,
    open_policy,
    read_weights,
    save_any_policy,
)
from gagar_mini.learn.rl import check_first_weights, credit, train
from gagar_mini.learn.state import TrainState, make_optimizer
from gagar_mini.learn.update import action_logprobs, next_token_logprobs, update_policy
from gagar_mini.model.chat_policy import ChatPolicy, load_chat_policy
from gagar_mini.model.hf_engine import load_chat_model
from gagar_mini.records import open_run, read_metrics
from gagar_mini.world.tasks import load_tasks

TASKS = load_tasks("core", "train")[:3]
SETTINGS = {
    "rollout.group_size": 4,
    "rollout.max_turns": 2,
    "rollout.max_new_tokens": 12,
    "rollout.max_action_tokens": 24,
    "rollout.max_context_tokens": 1600,
    "sampling.tasks_per_round": 2,
    "optim.lr": 1e-3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A chat model on disk, its context long enough for a task told in bytes."""
    path = tmp_path_factory.mktemp("chat") / "model"
    random_model(max_position_embeddings=2048).save_pretrained(path)
    chat_tokenizer().save_pretrained(path)
    return path


def config_of(folder, **overrides):
    return with_overrides(RunConfig(), {"policy": str(folder), **SETTINGS, **overrides})


def random_ids(rows=2, length=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, (rows, length), generator=generator)


# --- log-probs ------------------------------------------------------------------------


def test_chunks_give_value_and_gradient_of_the_whole(folder):
    """In chunks of 7 positions, the last one short, and at once."""
    policy, _ = load_chat_policy(str(folder))
    ids = random_ids()
    found = []
    for chunk_elements in (7 * policy.num_tokens, 2**26):
        policy.zero_grad()
        hidden = policy.forward_hidden(ids)[:, :-1].flatten(0, 1)
        logprobs, entropies = next_token_logprobs(
            policy,
            hidden,
            ids[:, 1:].flatten(),
            temperature=0.7,
            chunk_elements=chunk_elements,
        )
        logprobs.square().sum().backward()
        gradient = torch.cat([w.grad.flatten() for w in policy.parameters()])
        found.append((logprobs.detach(), entropies, gradient))
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    naive = (policy(ids)[:, :-1] / 0.7).log_softmax(-1).gather(2, ids[:, 1:, None])
    assert_close(found[0][0], naive.detach().flatten(), rtol=1e-5, atol=1e-5)


def test_ids_without_a_token_have_no_probability(folder):
    """The random model has 32 more: with them the sum of the rest is below 1."""
    policy, tokenizer = load_chat_policy(str(folder))
    logits = policy(random_ids())
    assert logits.shape[-1] == len(tokenizer) < policy.causal_model.config.vocab_size


def test_gradient_checkpointing_changes_memory_only(folder):
    gradients = []
    for is_on in (False, True):
        policy, _ = load_chat_policy(str(folder), gradient_checkpointing=is_on)
        taught_loss(
            policy, random_ids(), torch.ones(2, 30, dtype=torch.bool)
        ).backward()
        gradients.append([weight.grad for weight in policy.parameters()])
    assert_close(gradients[0], gradients[1])


# --- adapters and files ---------------------------------------------------------------


def test_adapters_train_alone_and_merge_into_what_the_engine_loads(folder, tmp_path):
    policy, tokenizer = load_chat_policy(str(folder), lora_rank=4)
    before = policy(random_ids()).detach()
    trained = [w for w in policy.parameters() if w.requires_grad]
    assert (
        0
        < sum(w.numel() for w in trained)
        < sum(w.numel() for w in policy.parameters() if not w.requires_grad)
    )
    fit_chat(policy, demonstrations(6), ChatSftConfig(lr=1e-2, batch_tokens=128))
    after = policy(random_ids()).detach()
    assert (after - before).abs().max() > 0.1

    merged = policy.empty_copy()
    merged.causal_model.load_state_dict(policy.export_weights())
    assert_close(merged(random_ids()).detach(), after, rtol=1e-4, atol=1e-4)

    save_any_policy(policy, tokenizer, tmp_path / "adapter")
    assert is_chat(tmp_path / "adapter")
    model, _ = load_chat_model(str(tmp_path / "adapter"))
    assert_close(
        ChatPolicy(model, policy.num_tokens)(random_ids()).detach(),
        after,
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("adapter") / "adapter"
    policy, tokenizer = load_chat_policy(str(folder), lora_rank=4)
    save_any_policy(policy, tokenizer, path)
    return path


def test_an_adapter_is_read_in_bf16_without_rounding_its_rotary_angles(adapter, folder):
    model, _ = load_chat_model(str(adapter), dtype=torch.bfloat16)
    plain, _ = load_chat_model(str(folder), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert_close(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)


def test_an_adapter_trains_on_or_all_weights_do(adapter):
    going_on, _ = load_chat_policy(str(adapter), lora_rank=4)
    assert going_on.has_adapter
    whole, _ = load_chat_policy(str(adapter))
    assert all(weight.requires_grad for weight in whole.parameters())
    with pytest.raises(ValueError, match="has rank 4 and not 8"):
        load_chat_policy(str(adapter), lora_rank=8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"base_model_name_or_path": None}, "does not say for which model"),
        ({"base_model_name_or_path": "."}, "does not say for which model"),
        ({"peft_type": "IA3"}, "plain LoRA"),
        ({"use_dora": True}, "plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "plain LoRA"),
        ({"r": 3}, "does not fit its model"),
    ],
)
def test_a_strange_adapter_is_told_in_a_sentence(
    adapter, tmp_path, monkeypatch, change, told
):
    shutil.copytree(adapter, tmp_path / "strange")
    path = tmp_path / "strange" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    monkeypatch.chdir(tmp_path / "strange")
    with pytest.raises(ValueError, match=told):
        load_chat_model(str(tmp_path / "strange"))


def test_an_adapter_without_its_weights_asks_nobody_for_them(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "empty")
    (tmp_path / "empty" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks adapter_model"):
        load_chat_model(str(tmp_path / "empty"))


def test_a_model_that_changes_its_logits_is_refused(tmp_path):
    config = GraniteConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        logits_scaling=8.0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="change logits behind their head"):
        load_chat_policy(str(tmp_path))


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_a_saved_policy_is_read_back(folder, tmp_path, lora_rank):
    config = config_of(folder, **{"optim.lora_rank": lora_rank})
    policy, tokenizer = open_policy(config)
    fit_chat(policy, demonstrations(4), ChatSftConfig(lr=1e-2, batch_tokens=128))
    save_any_policy(policy, tokenizer, tmp_path / "saved")
    fresh, _ = open_policy(config)
    fresh.load_state_dict(read_weights(fresh, tmp_path / "saved"))
    assert_close(fresh(random_ids()), policy(random_ids()))


def test_what_the_tiny_policy_has_not_is_told():
    with pytest.raises(ValueError, match="are for chat models"):
        open_policy(with_overrides(RunConfig(), {"optim.lora_rank": 4}))


def test_memory_is_told_before_anything_is_loaded(folder):
    told = expected_memory(config_of(folder, **{"optim.lora_rank": 4}))
    assert told.startswith("memory: about ") and "kv cache" in told
    assert expected_memory(RunConfig()) == ""
    with pytest.raises(ValueError, match="cannot be loaded"):
        expected_memory(config_of(folder / "nowhere"))


QWEN_SIZES = {24: (24, 896, 4864, 14), 80: (28, 1536, 8960, 12)}


@pytest.mark.parametrize("gigabytes", QWEN_SIZES)
def test_the_preset_one_gpu_fits(gigabytes):
    """Qwen2.5's .5B on 24 GB, its 1.5B on 80 GB."""
    num_layers, width, inner, num_heads = QWEN_SIZES[gigabytes]
    written = {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    needed = estimate_memory(model_size(written), PRESETS["one_gpu"]())
    assert needed.total < 0.9 * gigabytes * 1e9


# --- packing --------------------------------------------------------------------------


def demonstrations(num, seed=0):
    lengths = torch.randint(
        8, 40, (num,), generator=torch.Generator().manual_seed(seed)
    )
    ids = random_ids(1, int(lengths.sum()), seed)[0].split(lengths.tolist())
    return [
        Demonstration(i.tolist(), [k % 3 != 0 for k in range(len(i))], []) for i in ids
    ]


def test_packed_samples_do_not_see_each_other(folder):
    """Loss and gradient of packed rows are those of the samples one by one."""
    policy, _ = load_chat_policy(str(folder))
    drawn, found = demonstrations(9), []
    config = ChatSftConfig(pack_length=64, batch_tokens=10_000)
    (packed,) = packed_batches(drawn, config)
    alone = [
        (torch.tensor([d.ids]), torch.tensor([[False, *d.is_taught[1:]]]))
        for d in drawn
    ]
    for parts in (alone, [(packed[0], packed[1] > 0, packed[2])]):
        policy.zero_grad()
        loss = sum(taught_loss(policy, *part) for part in parts)
        loss.backward()
        gradient = torch.cat([w.grad.flatten() for w in policy.parameters()])
        found.append((loss.detach(), gradient))
    assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)
    assert len(packed[0]) < len(drawn)


def test_every_sample_is_packed_once_and_too_long_ones_are_told():
    lengths = [5, 60, 3, 64, 30, 34, 1]
    rows = pack(lengths, 64)
    assert sorted(index for row in rows for index in row) == list(range(7))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    with pytest.raises(ValueError, match="raise pack_length"):
        pack([65], 64)


# --- the loop -------------------------------------------------------------------------


def open_chat_state(config, sandbox, path):
    """A run whose every other trajectory counts as a pass, whatever it did."""
    policy, tokenizer = open_policy(config)
    dialect = ChatDialect(tokenizer)
    engine = open_engine(policy, tokenizer, config, max_rows=8)
    harness = Harness(engine, dialect, sandbox)

    async def sample_group(task, group_id, seed):
        group = await rollout_group(
            harness, task, config.rollout, group_id=group_id, seed=seed
        )
        outcomes = [
            replace(outcome, status=status)
            for outcome, status in zip(group.outcomes, [PASS, FAIL] * 2, strict=True)
        ]
        return replace(group, outcomes=tuple(outcomes))

    return TrainState(
        config=config,
        run=open_run(path, config),
        policy=policy,
        tokenizer=tokenizer,
        optimizer=make_optimizer(policy, config),
        engine=engine,
        sampler=TaskSampler(TASKS, 0),
        sample_group=sample_group,
        trial_prompts=[dialect.prompt_ids(task) for task in TASKS],
    )


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_an_update_starts_on_policy_and_moves_what_samples(
    folder, sandbox, tmp_path, lora_rank
):
    config = config_of(folder, **{"optim.lora_rank": lora_rank})
    state = open_chat_state(config, sandbox, tmp_path / "run")

    async def step():
        await state.engine.sync_weights(state.policy, version=0)
        await check_first_weights(state)
        group = await state.sample_group(TASKS[0], "g", 1)
        batch = build_batch([group], [credit(group, config.credit)], config)
        found = update_policy(state, batch, 0)
        await state.engine.sync_weights(state.policy, version=1)
        again = await state.sample_group(TASKS[0], "g", 1)
        return found, again

    found, again = asyncio.run(step())
    assert found["policy/sampler_drift"] < 1e-4
    assert found["policy/grad_norm"] > 0
    batch = build_batch([again], [torch.zeros(4)], config)
    logprobs, _ = action_logprobs(state.policy, batch, temperature=1.0)
    assert (logprobs - batch.behaviour_logprobs).abs().max() < 1e-3


def test_an_engine_with_other_weights_is_told_before_the_first_step(
    folder, sandbox, tmp_path
):
    state = open_chat_state(config_of(folder), sandbox, tmp_path / "run")
    with torch.no_grad():
        state.policy.causal_model.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(ValueError, match="log-probs of engine and trainer differ"):
        asyncio.run(check_first_weights(state))


def test_a_chat_model_trains_and_resumes_from_the_command_line(folder, tmp_path):
    """Random weights pass no test, so no step has an update: the loop around it."""
    config = config_of(
        folder, **{"steps": 1, "optim.lora_rank": 4, "dtype": "bfloat16"}
    )
    assert train(config, tmp_path / "run", progress=False)["status"] == "finished"
    longer = replace(config, steps=2)
    assert train(longer, tmp_path / "run", resume=True, progress=False)["steps_done"]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1]
    saved = next((tmp_path / "run" / "checkpoints").glob("*/adapter_config.json"))
    assert json.loads(saved.read_text())["base_model_name_or_path"] == str(folder)
