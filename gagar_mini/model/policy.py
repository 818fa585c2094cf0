"""The tiny policy: a plain Llama-shaped transformer, and its Hugging Face folder.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings. Parameter
names and config are those of transformers' LlamaForCausalLM, so what `save_policy`
writes loads in transformers and vLLM. Left out: biases, dropout, scaled rotary
positions, and a cache, which the engine keeps.
"""

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from gagar_mini.model.tokenizer import load_tokenizer
from gagar_mini.records import parse_json

MAX_SIZE = 1 << 24
"""Above every size in a config, so that a damaged one is told from a policy."""
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class PolicyConfig:
    """Sizes of the policy, named as in transformers' LlamaConfig."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class TinyPolicy(nn.Module):
    """Next-token logits of a batch of sequences.

    Sequences are padded on the right: the causal mask keeps padding from every real
    token, so neither a mask nor lengths are needed.
    """

    dtype = torch.float32  # of its passes

    def __init__(self, config: PolicyConfig, *, seed: int = 0):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        initialise(self, seed=seed)

    @property
    def num_tokens(self) -> int:
        return self.config.vocab_size

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    def empty_copy(self) -> "TinyPolicy":
        """A policy of the same shape, to be filled with weights."""
        return TinyPolicy(self.config)

    def forward(
        self, ids: Int[Tensor, "traj token"]
    ) -> Float[Tensor, "traj token vocab"]:
        """Logits of the token *after* each position."""
        return self.logits(self.forward_hidden(ids))

    def forward_hidden(
        self, ids: Int[Tensor, "traj token"]
    ) -> Float[Tensor, "traj token hidden"]:
        """The last hidden states; few tokens are actions, so index, then `logits`."""
        return self.model(ids)

    def logits(
        self, hidden: Float[Tensor, "*rows hidden"]
    ) -> Float[Tensor, "*rows vocab"]:
        return hidden @ self.model.embed_tokens.weight.T


class Decoder(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, ids: Int[Tensor, "traj token"]
    ) -> Float[Tensor, "traj token hidden"]:
        longest = self.config.max_position_embeddings
        if ids.shape[1] > longest:
            raise ValueError(
                f"a sequence of {ids.shape[1]} tokens does not fit into the policy's "
                f"context of {longest}"
            )
        cos, sin = rotary_table(self.config, ids.shape[1], ids.device)
        hidden = self.embed_tokens(ids)
        for block in self.layers:
            hidden = block(hidden, cos, sin)
        return self.norm(hidden)


class Block(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps
        )
        self.mlp = MLP(config)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = (
            config.hidden_size,
            config.num_key_value_heads * config.head_dim,
        )
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        queries = rotate(self.heads(self.q_proj(x)), cos, sin)
        keys = rotate(self.heads(self.k_proj(x)), cos, sin)
        values = self.heads(self.v_proj(x))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(x.shape))

    def heads(self, x: Tensor) -> Tensor:
        """[N, T, heads * head_dim] -> [N, heads, T, head_dim]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: PolicyConfig):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_table(
    config: PolicyConfig, num_positions: int, device: torch.device | str = "cpu"
) -> tuple[Float[Tensor, "token head_dim"], Float[Tensor, "token head_dim"]]:
    """Cosine and sine of the angles, whose frequency j is theta^(-2j / head_dim)."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-half / config.head_dim)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn coordinate pairs (j, j + head_dim / 2) by their position's angle (RoPE)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def initialise(policy: TinyPolicy, *, seed: int) -> None:
    """Draw the weights: std 1/sqrt(fan_in), and less where a layer adds to the residual
    stream, so that its size does not grow with depth."""
    generator = torch.Generator().manual_seed(seed)
    depth = math.sqrt(2 * policy.config.num_hidden_layers)
    for name, parameter in policy.named_parameters():
        if "norm" in name:
            nn.init.ones_(parameter)
            continue
        std = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
        if "o_proj" in name or "down_proj" in name:
            std /= depth
        nn.init.normal_(parameter, std=std, generator=generator)


def save_policy(
    policy: TinyPolicy, tokenizer: PreTrainedTokenizerFast, folder: str | Path
) -> None:
    """Write config.json, model.safetensors and the tokenizer for transformers."""
    if policy.config.vocab_size != len(tokenizer):
        raise ValueError(
            f"the policy has {policy.config.vocab_size} tokens and the tokenizer "
            f"{len(tokenizer)}: an id without a token could be sampled"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    weights = {name: w.detach().contiguous() for name, w in policy.state_dict().items()}
    save_file(weights, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    os.replace(folder / "model.safetensors.tmp", folder / "model.safetensors")
    config = dataclasses.asdict(policy.config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": policy.config.head_dim,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": policy.config.rope_theta,
        },
        "dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text)


def load_policy(folder: str | Path) -> tuple[TinyPolicy, PreTrainedTokenizerFast]:
    """The policy and the tokenizer of a folder that `save_policy` wrote.

    Raises ValueError for a file that is missing or damaged, or for weights of another
    shape.
    """
    folder = Path(folder)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no policy in {str(folder)!r}: {name} is missing")
    config = read_policy_config(folder / "config.json")
    try:
        weights = load_file(folder / "model.safetensors")
        # before memory is set aside for what a damaged config asks for
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes.get(EMBEDDING) != (config.vocab_size, config.hidden_size):
            raise ValueError(f"{EMBEDDING} has the shape {shapes.get(EMBEDDING)}")
        policy = TinyPolicy(config)
        policy.load_state_dict(weights)
    except (SafetensorError, RuntimeError, ValueError) as error:
        told = str(error).split(". ")[0]
        raise ValueError(f"weights in {str(folder)!r} do not fit: {told}") from error
    return policy, load_tokenizer(folder)


def read_policy_config(path: Path) -> PolicyConfig:
    """The sizes in a config.json. Raises ValueError for what is no tiny policy's."""
    written = parse_json(path.read_bytes(), str(path))
    if not isinstance(written, dict) or written.get("model_type") != "llama":
        raise ValueError(f"{str(path)!r} is not a tiny policy's config")
    sizes = {}
    for field in dataclasses.fields(PolicyConfig):
        value = written.get(field.name)
        wanted = (int,) if field.type is int else (int, float)
        if type(value) not in wanted or not 0 < value < MAX_SIZE:
            raise ValueError(
                f"{str(path)!r} is not a tiny policy's config: {field.name} is "
                f"{str(value)[:40]}"
            )
        sizes[field.name] = value
    config = PolicyConfig(**sizes)
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.hidden_size % num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"{str(path)!r} is not a tiny policy's config: {config.hidden_size} "
            f"channels, {num_heads} heads and {num_kv_heads} of keys do not divide"
        )
    return config
