"""Any causal language model of transformers as the policy that trains.

Weights are fp32 and the optimiser's; passes run in bf16 where the config says so, as an
update of 1e-5 is lost in a bf16 weight. With a LoRA rank only adapters train (peft),
and a checkpoint is the adapter alone. Left out: dropout, which would make the trained
distribution another one than the sampled one.
"""

import copy
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gagar_mini.config import DType
from gagar_mini.model.hf_engine import (
    ADAPTER,
    ADAPTER_WEIGHTS,
    load_adapters,
    load_chat_model,
    require,
)
from gagar_mini.paths import find_checkpoint
from gagar_mini.types import seed_for


class ChatPolicy(nn.Module):
    """A chat model with the two methods that training calls (see `TinyPolicy`):
    `model` is a PreTrainedModel, or a PeftModel around one.

    Sequences are padded on the right, where the causal mask keeps padding from every
    real token. Logits end with the last id that the tokenizer has: the ids behind it
    are never sampled, so they have no probability.
    """

    def __init__(
        self,
        model: nn.Module,
        num_tokens: int,
        *,
        dtype: DType = "float32",
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        self.network = model
        self.num_tokens, self.dtype = num_tokens, getattr(torch, dtype)
        self.gradient_checkpointing = gradient_checkpointing
        without_dropout(self)
        if gradient_checkpointing:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()  # else nothing flows to adapters

    @property
    def causal_model(self) -> PreTrainedModel:
        """The model itself, adapters in place."""
        return self.network.get_base_model() if self.has_adapter else self.network

    @property
    def has_adapter(self) -> bool:
        return not isinstance(self.network, PreTrainedModel)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.causal_model.get_decoder().layers

    def forward_hidden(
        self,
        ids: Int[Tensor, "traj token"],
        samples: Int[Tensor, "traj token"] | None = None,
    ) -> Float[Tensor, "traj token hidden"]:
        """The last hidden states; index the few that are needed, then `logits`.

        `samples` tells packed samples of a row apart: none sees another.
        """
        packing = {} if samples is None else packed_arguments(samples.to(ids.device))
        with self.precision(ids.device):
            decoder = self.causal_model.get_decoder()
            output = decoder(input_ids=ids, use_cache=False, **packing)
        return output.last_hidden_state

    def logits(
        self, hidden: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch vocab"]:
        with self.precision(hidden.device):
            head = self.causal_model.get_output_embeddings()
            return head(hidden)[..., : self.num_tokens]

    def forward(
        self, ids: Int[Tensor, "traj token"]
    ) -> Float[Tensor, "traj token vocab"]:
        """Logits of the token *after* each position."""
        return self.logits(self.forward_hidden(ids))

    def precision(self, device: torch.device) -> torch.autocast:
        is_low = self.dtype != torch.float32
        return torch.autocast(device.type, dtype=self.dtype, enabled=is_low)

    @torch.no_grad()
    def export_weights(self) -> dict[str, Tensor]:
        """The weights by the names of the model itself, adapters merged into them."""
        weights = {}
        for name, weight in self.causal_model.state_dict().items():
            if ".lora_" not in name:
                weights[name.replace(".base_layer.", ".")] = weight
        for name, module in self.causal_model.named_modules():
            if hasattr(module, "base_layer"):
                merged = module.base_layer.weight + module.get_delta_weight("default")
                weights[f"{name}.weight"] = merged
        return weights

    def empty_copy(self) -> "ChatPolicy":
        """A policy of the same shape, to be filled with weights."""
        return ChatPolicy(self.empty_model(torch.float32), self.num_tokens)

    def empty_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A model of the same shape. To cast one would round its rotary angles, too."""
        config = copy.deepcopy(self.causal_model.config)  # an engine changes its own
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def packed_arguments(samples: Int[Tensor, "row token"]) -> dict[str, Tensor]:
    """Positions from 0 in each sample, and who sees whom [row, 1, query, key]."""
    same = samples.unsqueeze(2) == samples.unsqueeze(1)
    is_seen = same.tril()
    return {
        "position_ids": is_seen.sum(-1) - 1,
        "attention_mask": is_seen.unsqueeze(1),
    }


def without_dropout(policy: nn.Module) -> None:
    policy.eval()
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def load_chat_policy(
    name: str,
    *,
    dtype: DType = "float32",
    gradient_checkpointing: bool = False,
    lora_rank: int = 0,
    device: str = "",
    seed: int = 0,
) -> tuple[ChatPolicy, PreTrainedTokenizerBase]:
    """A policy by the folder, id or short name of its model, to be trained.

    `lora_rank` above 0 trains adapters of this rank on every linear layer but the head;
    those of an adapter's folder are trained on, new ones drawn by `seed`. Raises
    ValueError for what cannot be loaded or trained, or where peft is missing.
    """
    if lora_rank:
        model, tokenizer = open_adapters(name, lora_rank, device, seed)
    else:
        model, tokenizer = load_chat_model(name, device=device, dtype=torch.float32)
    policy = ChatPolicy(
        model,
        max(tokenizer.get_vocab().values()) + 1,
        dtype=dtype,
        gradient_checkpointing=gradient_checkpointing,
    )
    check_head(policy)
    return policy, tokenizer


def open_adapters(
    name: str, rank: int, device: str, seed: int
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model with adapters to train: new ones, or those of a folder, which go on."""
    require("peft", "LoRA")
    from peft import LoraConfig, get_peft_model

    folder = find_checkpoint(name)
    if (folder / ADAPTER).is_file():
        model, tokenizer = load_adapters(folder, device, is_trainable=True)
        found = model.peft_config["default"].r
        if found != rank:
            raise ValueError(
                f"the adapter {name!r} has rank {found} and not {rank}: train it on "
                "with that rank, or all weights with rank 0"
            )
        return model, tokenizer
    model, tokenizer = load_chat_model(name, device=device, dtype=torch.float32)
    model.name_or_path = name  # as given: what the adapter will ask for
    settings = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed_for(seed, "adapters"))
        return get_peft_model(model, settings), tokenizer


@torch.no_grad()
def check_head(policy: ChatPolicy) -> None:
    """Raise ValueError for a model that changes logits behind its head (a softcap, a
    scale): the head is read alone here, at few positions."""
    ids = torch.arange(8, device=policy.causal_model.device).unsqueeze(0)
    with policy.precision(ids.device):
        expected = policy.causal_model(input_ids=ids).logits[..., : policy.num_tokens]
    if not torch.allclose(policy(ids).float(), expected.float(), rtol=0.1, atol=0.1):
        kind = policy.causal_model.config.model_type
        raise ValueError(
            f"models of the kind {kind!r} change logits behind their head, which is "
            "read alone in training: use another model"
        )


def save_chat_policy(
    policy: ChatPolicy, tokenizer: PreTrainedTokenizerBase, folder: str | Path
) -> None:
    """Write a Hugging Face folder: the model, or its adapter alone in peft's layout."""
    if policy.has_adapter:
        # the head is not adapted; unasked, peft looks on the hub whether it has grown
        policy.network.save_pretrained(folder, save_embedding_layers=False)
        (Path(folder) / "README.md").unlink()  # a form to fill in
        return
    policy.network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_chat_weights(policy: ChatPolicy, folder: Path) -> dict[str, Tensor]:
    """What `save_chat_policy` wrote, as a state of `policy`."""
    if (folder / ADAPTER).is_file():
        from peft import get_peft_model_state_dict

        saved, state = load_file(folder / ADAPTER_WEIGHTS), policy.state_dict()
        expected = get_peft_model_state_dict(policy.network)
        assert set(saved) == set(expected), "an adapter of another shape"
        for name, weight in saved.items():
            state[f"network.{name.replace('.weight', '.default.weight')}"] = weight
        return state
    model, _ = load_chat_model(str(folder), device="cpu", dtype=torch.float32)
    return ChatPolicy(model, policy.num_tokens).state_dict()
