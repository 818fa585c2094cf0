"""Which policy a name means, who samples from it, and how it is written.

A folder whose tokenizer has the tokens of the compact dialect holds a tiny policy.
Anything else is a chat model: a folder, an adapter, an id, a name of `models fetch`.
"""

import copy
import dataclasses
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gagar_mini.agent.chat_dialect import ChatDialect
from gagar_mini.agent.dialect import SPECIAL_TOKENS, CompactDialect, Dialect
from gagar_mini.config import RunConfig
from gagar_mini.cost import estimate_memory, gib, model_size
from gagar_mini.model.batch_engine import open_chat_engine
from gagar_mini.model.chat_policy import (
    ChatPolicy,
    load_chat_policy,
    read_chat_weights,
    save_chat_policy,
)
from gagar_mini.model.hf_engine import ADAPTER, copy_weights, read_model_config
from gagar_mini.model.policy import TinyPolicy, load_policy, save_policy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.model.vllm_engine import VllmEngine, VllmOptions
from gagar_mini.model.vllm_server import VllmServerEngine
from gagar_mini.paths import find_checkpoint
from gagar_mini.records import parse_json
from gagar_mini.types import Engine

Policy = TinyPolicy | ChatPolicy


def is_chat(name: str | Path) -> bool:
    """Whether a checkpoint speaks as a chat model."""
    folder = Path(name)
    if not folder.is_dir() or (folder / ADAPTER).is_file():
        return True
    path = folder / "tokenizer.json"
    if not path.is_file():
        return False
    try:
        added = parse_json(path.read_bytes(), str(path))["added_tokens"]
        names = {token["content"] for token in added}
    except (ValueError, TypeError, KeyError):
        return False  # damaged: whoever loads it says how
    return not names.issuperset(SPECIAL_TOKENS)


def expected_memory(config: RunConfig) -> str:
    """What a run with a chat model will need, in a line; "" for a tiny policy.

    Raises ValueError where the model has no config to be had.
    """
    folder = find_checkpoint(config.policy)
    if not is_chat(folder):
        return ""
    try:
        size = model_size(read_model_config(config.policy))
    except ValueError as error:
        if "cannot be loaded" in str(error):
            raise
        return f"memory: not estimated ({error})"
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    needed = estimate_memory(
        size, config, ranks=ranks, has_own_engine=not config.vllm.servers
    )
    parts = [
        f"{name.replace('_', ' ')} {gib(value)}"
        for name, value in dataclasses.asdict(needed).items()
        if value >= 2**20
    ]
    return (
        f"memory: about {gib(needed.total)} of tensors a process ({', '.join(parts)})"
    )


def open_policy(config: RunConfig) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The policy that a run starts from, to be trained.

    Raises ValueError, in one sentence, for what cannot be loaded or trained so.
    """
    folder, optim = find_checkpoint(config.policy), config.optim
    if is_chat(folder):
        return load_chat_policy(
            config.policy,
            dtype=config.dtype,
            gradient_checkpointing=optim.gradient_checkpointing,
            lora_rank=optim.lora_rank,
            seed=config.seed,
        )
    if optim.lora_rank or optim.gradient_checkpointing or config.dtype != "float32":
        raise ValueError(
            "dtype bfloat16, optim.lora_rank and optim.gradient_checkpointing are for "
            "chat models: the tiny policy trains whole, in float32"
        )
    return load_policy(folder)


def open_dialect(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> Dialect:
    """The language of the policy. Raises ValueError where it has none for the tools."""
    if isinstance(policy, ChatPolicy):
        return ChatDialect(tokenizer, tools=config.rollout.tools)
    if config.rollout.tools == "bash":
        raise ValueError(
            "rollout.tools is 'bash', but the tiny policy's compact dialect has no "
            "word for a shell command: use 'edit'"
        )
    return CompactDialect(tokenizer)


def open_engine(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    *,
    max_rows: int,
) -> Engine:
    """Who samples for a run, `max_rows` conversations at once."""
    context = config.rollout.max_context_tokens
    if config.engine == "vllm":
        return open_vllm_engine(policy, tokenizer, config, max_rows=max_rows)
    if isinstance(policy, TinyPolicy):
        return TorchEngine(policy, max_rows=max_rows, max_context=context)
    model = policy.empty_model(getattr(torch, config.dtype))
    model.to(policy.causal_model.device)
    copy_weights(policy, model)  # the engine tries itself out on what it is to hold
    return open_chat_engine(model, tokenizer, max_rows=max_rows, max_context=context)


def open_vllm_engine(
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    config: RunConfig,
    *,
    max_rows: int,
) -> Engine:
    """vLLM in this process, or at those of the config's servers that are this rank's.

    Raises ValueError without vLLM or a server.
    """
    rank = int(os.environ.get("RANK", "0"))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    servers = own_servers(config.vllm.servers, rank, num_ranks)

    def write_folder(policy: Policy, folder: Path) -> None:
        save_whole_policy(policy, tokenizer, folder)

    context = config.rollout.max_context_tokens
    if servers:
        exchange = Path(config.vllm.exchange or tempfile.mkdtemp()).resolve()
        return VllmServerEngine(
            servers,
            policy.num_tokens,
            num_logits(policy),
            write_folder=write_folder,
            exchange=exchange / f"rank-{rank}",
            max_context=context,
        )
    options = VllmOptions(
        dtype=config.dtype,
        max_rows=max_rows,
        max_context=context,
        memory_share=config.vllm.memory_share,
        write_folder=write_folder,
    )
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(policy, ChatPolicy):
            save_model_config(policy, folder)
        else:
            save_policy(policy, tokenizer, folder)
        return VllmEngine(folder, policy.num_tokens, options, policy=policy)


def own_servers(addresses: str, rank: int, num_ranks: int) -> list[str]:
    """Every `num_ranks`-th server, from the one numbered `rank`: what two ranks pushed
    to one server would be two versions of the weights.

    None are vLLM in every process. Raises ValueError for fewer servers than ranks.
    """
    own = addresses.split()[rank::num_ranks]
    if addresses and not own:
        raise ValueError(
            f"the engine vllm in a run of {num_ranks} processes needs a server for "
            f"each: vllm.servers has {len(addresses.split())}"
        )
    return own


def num_logits(policy: Policy) -> int:
    if isinstance(policy, ChatPolicy):
        return policy.causal_model.config.get_text_config().vocab_size
    return policy.config.vocab_size


def save_model_config(policy: ChatPolicy, folder: str) -> None:
    model = policy.causal_model
    written = copy.deepcopy(model.config)
    written.architectures = [type(model).__name__]
    written.save_pretrained(folder)


def save_whole_policy(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a Hugging Face folder of a whole model, adapters merged into it."""
    if isinstance(policy, ChatPolicy):
        weights = policy.export_weights()
        policy.causal_model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    else:
        save_policy(policy, tokenizer, folder)


def save_any_policy(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a Hugging Face folder."""
    save = save_chat_policy if isinstance(policy, ChatPolicy) else save_policy
    save(policy, tokenizer, folder)


def read_weights(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """The weights of a folder that `save_any_policy` wrote, as a state of `policy`."""
    if isinstance(policy, ChatPolicy):
        return read_chat_weights(policy, folder)
    return load_policy(folder)[0].state_dict()
