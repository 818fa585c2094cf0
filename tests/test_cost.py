"""The cost model: exact counts, what changes with ranks, and measured memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gagar_mini.config import tiny, with_overrides
from gagar_mini.cost import (
    Device,
    Lengths,
    block_activation_bytes,
    estimate_memory,
    estimate_step_time,
    gib,
    model_size,
)
from gagar_mini.model.chat_policy import ChatPolicy
from gagar_mini.model.policy import load_policy
from gagar_mini.paths import find_checkpoint

POLICY = find_checkpoint("data/policy/tiny")
SIZE = model_size(json.loads((POLICY / "config.json").read_text()))
QWEN_HALF = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
SMOL = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_parameters_are_those_of_published_models():
    policy, _ = load_policy(POLICY)
    assert SIZE.num_parameters == sum(w.numel() for w in policy.parameters())
    assert model_size(SMOL).num_parameters == 134_515_008
    assert model_size(QWEN_HALF).num_parameters == 494_032_768


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_parameters_are_those_that_transformers_makes(kind, is_tied):
    more = {"head_dim": 32} if kind == "qwen3" else {}
    config = AutoConfig.for_model(kind, **SMALL, **more, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = model_size(config.to_dict())
    assert size.num_parameters == sum(w.numel() for w in model.parameters())


@pytest.mark.parametrize(
    "broken, said",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_a_config_of_something_else_is_refused(broken, said):
    with pytest.raises(ValueError, match=said):
        model_size({"model_type": "llama"} | SMALL | broken)


def test_what_ranks_share_and_what_they_do_not():
    """Four ranks, eight tasks of eight trajectories: two groups of rows each."""
    size, sharded = model_size(SMOL), with_overrides(tiny(), {"optim.sharded": True})
    one = estimate_memory(size, sharded)
    four = estimate_memory(size, sharded, ranks=4)
    alike = estimate_memory(size, tiny(), ranks=4)
    assert one.master_weights == 4 * size.num_parameters == alike.master_weights
    for part in ("master_weights", "gradients", "moments"):
        assert getattr(four, part) == getattr(one, part) / 4
    assert four.kv_cache == one.kv_cache / 4 == alike.kv_cache
    # three groups to an update: a rank has one of 8 * 768 tokens, less than 8192
    assert four.activations == one.activations * 8 * 768 / 8192
    two = estimate_memory(size, sharded, ranks=2)
    assert (two.activations, two.logits) == (one.activations, one.logits)
    token = 2 * 30 * 3 * 64  # keys and values, layers, heads, channels
    assert one.kv_cache == 4 * token * 64 * 768


def test_precision_checkpointing_adapters_and_servers():
    size, config = model_size(SMOL), tiny()
    full = estimate_memory(size, config)
    half = estimate_memory(size, with_overrides(config, {"dtype": "bfloat16"}))
    assert half.compute_weights == 2 * size.num_parameters and not full.compute_weights
    assert half.kv_cache == full.kv_cache / 2
    saving = {"optim.gradient_checkpointing": True, "optim.lora_rank": 1}
    cheap = estimate_memory(size, with_overrides(config, saving), has_own_engine=False)
    assert cheap.activations < full.activations / 10
    assert cheap.engine_weights == cheap.kv_cache == 0
    # in and out of q, k, v, o, gate, up, down in 30 blocks
    widths = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    assert cheap.gradients == 4 * 30 * widths
    assert str(cheap).endswith(gib(cheap.total))
    assert cheap.total == sum(vars(cheap).values())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_what_autograd_keeps(kind, dtype):
    """Two blocks more keep this much more, the bf16 copies of their weights aside."""
    more = {"head_dim": 32} if kind == "qwen3" else {}
    kept = []
    for num_layers in (2, 4):
        sizes = SMALL | more | {"num_hidden_layers": num_layers}
        written = AutoConfig.for_model(kind, **sizes)
        policy = ChatPolicy(
            AutoModelForCausalLM.from_config(written).float(), 300, dtype=dtype
        )
        kept.append(kept_bytes(policy, torch.zeros(2, 64, dtype=torch.long)))
    size = model_size(written.to_dict())
    number = {"float32": 4, "bfloat16": 2}[dtype]
    weights = 0 if number == 4 else 2 * number * size.block_matrices
    expected = 2 * 2 * 64 * block_activation_bytes(size, number)
    assert kept[1] - kept[0] == expected + weights


def kept_bytes(policy, ids):
    """What a forward pass keeps beside the weights, each storage counted once."""
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    storages = []  # kept alive, so that no address is used twice

    def keep(tensor):
        storages.append(tensor.untyped_storage())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = policy.forward_hidden(ids)
    found = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in weights}
    assert hidden.requires_grad
    return sum(found.values())


MEASURED = """
import dataclasses, json, sys
import torch
from pathlib import Path
from gagar_mini.config import tiny, with_overrides
from gagar_mini.cost import estimate_memory, model_size
from gagar_mini.learn.batching import TokenBatch
from gagar_mini.learn.update import action_logprobs
from gagar_mini.model.chat_policy import ChatPolicy
from gagar_mini.model.policy import PolicyConfig, TinyPolicy

torch.set_num_threads(1)

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(l.split()[1]) for l in lines if l.startswith(name))

def update(policy, optimizer, num, length, actions):
    mask = torch.zeros(num, length, dtype=torch.bool)
    mask[:, -actions:] = True
    zeros, none = torch.zeros(num, length), torch.zeros(num, dtype=torch.long)
    ids = mask.long()
    batch = TokenBatch(ids, mask, zeros, none.float(), none, none, none, zeros)
    logprobs, _ = action_logprobs(policy, batch, temperature=1.0)
    logprobs.sum().backward()
    optimizer.step()

def ready(config):
    policy = TinyPolicy(config)
    return policy, torch.optim.AdamW(policy.parameters())

update(*ready(PolicyConfig()), 1, 64, 8)  # libraries load on first use
before = resident("VmRSS")
sizes = PolicyConfig(num_hidden_layers=6)
update(*ready(sizes), 16, 512, 64)
written = dataclasses.asdict(sizes) | {"model_type": "llama"}
size = model_size(written | {"tie_word_embeddings": True})
config = with_overrides(tiny(), {
    "optim.micro_batch_tokens": 8192,
    "rollout.max_context_tokens": 512,
    "rollout.max_action_tokens": 64,
})
estimate = estimate_memory(size, config, has_own_engine=False)
print((resident("VmHWM") - before) / estimate.total)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_of_an_update_is_what_it_takes():
    """With tensors straight from the system: glibc's heap adds a fifth in gaps."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(1, abs=0.1)


def test_time_of_a_step_by_hand():
    """A model of one matrix product a token, on a device of round numbers."""
    config = with_overrides(
        tiny(),
        {
            "rollout.group_size": 2,
            "sampling.tasks_per_round": 4,
            "sampling.groups_per_step": 4,
            "optim.num_minibatches": 2,
        },
    )
    size, lengths = model_size({"model_type": "llama"} | SMALL), Lengths(100.0, 10.0)
    device = Device(1e9, 1e9, 1e9, compute_share=0.5, memory_share=0.5, pass_s=1.0)
    width = 3 * 64 * (2 * 64 + 2 * 32 + 3 * 96)  # layers, channels, matrices
    token = 2 * width + 3 * 4 * 64 * 100 / 2  # weights, attention behind 50 others
    head = 2 * 300 * 64
    one = estimate_step_time(size, config, device, lengths=lengths)
    assert one.prefill == pytest.approx(8 * 90 * token / 0.5e9)
    assert one.decode == pytest.approx(10 * 1.0)  # a pass takes a second at least
    assert one.update == pytest.approx(3 * 8 * (100 * token + 10 * head) / 0.5e9)
    assert one.communication == 0
    two = estimate_step_time(size, config, device, ranks=2, lengths=lengths)
    assert two.update == pytest.approx(one.update / 2)
    # two updates, each reduced and sent: half of the gradient twice
    assert two.communication == pytest.approx(2 * 4 * size.num_parameters / 1e9)
