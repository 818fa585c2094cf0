"""The tiny policy as an engine needs it: fused weights and a key-value cache of rows.

The same function as `policy.TinyPolicy`, rearranged for speed: one matrix for queries,
keys and values, one for gate and up, norm gains and the score scale folded into the
matrices behind them, rotary pairs made neighbours so that a rotation is one complex
product.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from gagar_mini.model.policy import TinyPolicy, rotary_table

LENGTH_STEP = 32  # attended lengths are multiples of it: aligned, with little waste


class CachedModel:
    """Weights of one policy, and the keys and values of up to `max_rows` contexts.

    The cache is [layer, 2, row, key-value head, max_context + 1, head_dim], where the 2
    are keys and values; column `max_context` swallows what padding writes.
    """

    def __init__(
        self, policy: TinyPolicy, max_rows: int, max_context: int, device: str
    ):
        self.config, self.device = policy.config, device
        self.max_rows, self.max_context = max_rows, max_context
        self.cache: Tensor | None = None
        cos, sin = rotary_table(self.config, max_context + 1, device)
        half = self.config.head_dim // 2
        self.rotations = torch.complex(cos[:, :half].contiguous(), sin[:, :half])
        self.load(policy)

    def load(self, policy: TinyPolicy) -> None:
        """Copy and fuse the weights of `policy`, whose config must be this one."""
        if policy.config != self.config:
            raise ValueError(f"weights of {policy.config} do not fit {self.config}")
        weights = {
            name.removeprefix("model."): weight.detach().to(self.device, torch.float32)
            for name, weight in policy.state_dict().items()
        }
        for name, weight in weights.items():
            if not weight.isfinite().all():
                raise ValueError(f"weight {name} is not finite: nothing to sample from")
        self.embedding = weights["embed_tokens.weight"].clone()
        self.head = (self.embedding * weights["norm.weight"]).T.contiguous()
        self.layers = [
            self.fuse_layer(weights, f"layers.{layer}.")
            for layer in range(self.config.num_hidden_layers)
        ]

    def fuse_layer(self, weights: dict[str, Tensor], prefix: str) -> tuple[Tensor, ...]:
        """The matrices [in, out] of one block: qkv, output, gate and up, down."""

        def get(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        scale = self.config.head_dim**-0.5
        queries = self.pair_neighbours(get("self_attn.q_proj")) * scale
        keys = self.pair_neighbours(get("self_attn.k_proj"))
        qkv = torch.cat([queries, keys, get("self_attn.v_proj")])
        gate_up = torch.cat([get("mlp.gate_proj"), get("mlp.up_proj")])
        fused = (
            qkv * get("input_layernorm"),
            get("self_attn.o_proj"),
            gate_up * get("post_attention_layernorm"),
            get("mlp.down_proj"),
        )
        return tuple(matrix.T.contiguous() for matrix in fused)

    def pair_neighbours(self, weight: Tensor) -> Tensor:
        """Move outputs j and j + head_dim / 2 of each head side by side."""
        half = self.config.head_dim // 2
        return weight.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2)

    def allocate(self) -> None:
        """Make the cache unless it is there: zeros, since a masked NaN stays NaN."""
        if self.cache is None:
            config = self.config
            heads, width = config.num_key_value_heads, config.head_dim
            shape = (2, self.max_rows, heads, self.max_context + 1, width)
            self.cache = torch.zeros(
                config.num_hidden_layers, *shape, device=self.device
            )

    def free(self) -> None:
        self.cache = None

    def copy_row(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of one row to others."""
        for target in targets:
            self.cache[:, :, target, :, :length] = self.cache[:, :, source, :, :length]

    def prefill(
        self, rows: Sequence[int], ids: Sequence[np.ndarray], starts: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Append `ids[i]` to row `rows[i]`, which holds `starts[i]` tokens, for each i.

        Returns the logits of what follows each row's last token.
        """
        lengths = torch.tensor([len(new) for new in ids], device=self.device)
        padded = torch.zeros(len(ids), int(lengths.max()), dtype=torch.long)
        for i, new in enumerate(ids):
            padded[i, : len(new)] = torch.as_tensor(new)
        padded = padded.to(self.device)
        offsets = torch.arange(padded.shape[1], device=self.device)
        positions = torch.tensor(starts, device=self.device)[:, None] + offsets
        positions[offsets >= lengths[:, None]] = self.max_context
        length = max(start + len(new) for start, new in zip(starts, ids, strict=True))
        index = torch.tensor(rows, device=self.device)
        hidden = self.forward(padded, positions, index, length)
        return self.logits(hidden[torch.arange(len(ids)), lengths - 1])

    def decode(
        self, ids: Sequence[int], positions: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Append a token to each of the rows 0, 1, ...; the logits of what follows."""
        index = torch.arange(len(ids), device=self.device)
        token = torch.tensor(ids, device=self.device)[:, None]
        position = torch.tensor(positions, device=self.device)[:, None]
        hidden = self.forward(token, position, index, max(positions) + 1)
        return self.logits(hidden[:, 0])

    def logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        return self.norm(hidden) @ self.head

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps)

    def forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, length: int
    ) -> Float[Tensor, "row token hidden"]:
        """Hidden states of the tokens `ids` [n, T] at `positions` [n, T] of `rows` [n].

        They attend to the row's first `length` positions, up to their own; their keys
        and values are kept.
        """
        length = min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.max_context)
        columns = torch.arange(length, device=self.device)
        mask = torch.zeros(*positions.shape, length, device=self.device)
        mask.masked_fill_(columns > positions[..., None], -torch.inf)
        rotations = self.rotations[positions][:, :, None]
        x = self.embedding[ids]
        for layer, (qkv, output, gate_up, down) in enumerate(self.layers):
            projected = (self.norm(x) @ qkv).unflatten(-1, (-1, self.config.head_dim))
            queries = self.write_cache(layer, projected, positions, rows, rotations)
            x = x + self.attend(layer, queries, rows, mask) @ output
            gate, up = (self.norm(x) @ gate_up).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ down
        return x

    def write_cache(
        self,
        layer: int,
        projected: Tensor,
        positions: Tensor,
        rows: Tensor,
        turn: Tensor,
    ) -> Tensor:
        """Rotate queries and keys, keep keys and values, return the queries.

        `projected` is [n, T, heads of queries, keys and values, head_dim].
        """
        config = self.config
        num_rotated = config.num_attention_heads + config.num_key_value_heads
        pairs = torch.view_as_complex(
            projected[:, :, :num_rotated].unflatten(-1, (-1, 2))
        )
        projected[:, :, :num_rotated] = torch.view_as_real(pairs * turn).flatten(-2)
        queries = projected[:, :, : config.num_attention_heads]
        fresh = projected[:, :, config.num_attention_heads :]
        self.cache[layer][:, rows[:, None], :, positions] = fresh.unflatten(2, (2, -1))
        return queries

    def attend(
        self, layer: int, queries: Tensor, rows: Tensor, mask: Tensor
    ) -> Float[Tensor, "row token hidden"]:
        num_rows, num_tokens, _, width = queries.shape
        heads, length = self.config.num_key_value_heads, mask.shape[-1]
        cache = self.cache[layer, :, :, :, :length]
        if num_tokens > 1:
            keys, values = cache[:, rows]
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                keys,
                values,
                attn_mask=mask[:, None],
                scale=1.0,
                enable_gqa=True,
            )
            return mixed.transpose(1, 2).flatten(2)
        # one token per row: the rows are 0, 1, ..., so the cache is read where it lies,
        # and the query heads that share a key head become the rows of one product
        keys, values = cache[:, :num_rows]
        grouped = queries.reshape(num_rows, heads, -1, width)
        scores = grouped @ keys.transpose(-1, -2)
        scores += mask[:, :, None]
        return (scores.softmax(-1) @ values).reshape(num_rows, 1, -1)
