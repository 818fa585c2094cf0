"""The tiny policy as an engine needs it: fused weights and a key-value cache of rows.

The same function as `policy.TinyPolicy`, rearranged for speed: one matrix for queries,
keys and values, one for gate and up, norm gains and the score scale folded into the
matrices behind them, rotary pairs made neighbours so that a rotation is one complex
product.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from gagar_mini.model.policy import TinyPolicy, rotary_table

LENGTH_STEP = 32  # attended lengths are multiples of it: aligned, with little waste

Attend = Callable[[Tensor, Tensor], Tensor]
"""(a layer's cache, queries [token, head, head_dim]) -> mixed values [token, hidden]"""


class CachedModel:
    """Weights of one policy, and the keys and values of up to `max_rows` contexts.

    The cache is [layer, 2, row, key-value head, max_context, head_dim], where the 2 are
    keys and values. New tokens are packed: those of all rows stand in one line [token],
    without padding.
    """

    def __init__(
        self, policy: TinyPolicy, max_rows: int, max_context: int, device: str
    ):
        self.config, self.device = policy.config, device
        self.max_rows, self.max_context = max_rows, max_context
        self.cache: Tensor | None = None
        cos, sin = rotary_table(self.config, max_context, device)
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
            shape = (2, self.max_rows, heads, self.max_context, width)
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
        lengths = [len(new) for new in ids]
        places = [
            torch.arange(start, start + length, device=self.device)
            for start, length in zip(starts, lengths, strict=True)
        ]
        masks = [self.mask(positions, int(positions[-1]) + 1) for positions in places]

        def attend(cache: Tensor, queries: Tensor) -> Tensor:
            pieces = zip(rows, masks, queries.split(lengths), strict=True)
            return torch.cat([attend_row(cache[:, i], q, m) for i, m, q in pieces])

        hidden = self.forward(
            self.tensor(np.concatenate(ids)),
            self.tensor(np.repeat(rows, lengths)),
            torch.cat(places),
            attend,
        )
        return self.logits(hidden[self.tensor(np.cumsum(lengths) - 1)])

    def decode(
        self, ids: Sequence[int], positions: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Append a token to each of the rows 0, 1, ...; the logits of what follows."""
        position = self.tensor(positions)
        mask = self.mask(position, max(positions) + 1)

        def attend(cache: Tensor, queries: Tensor) -> Tensor:
            return attend_all(cache[:, : len(ids)], queries, mask)

        rows = torch.arange(len(ids), device=self.device)
        return self.logits(self.forward(self.tensor(ids), rows, position, attend))

    def forward(
        self,
        ids: Int[Tensor, " token"],
        rows: Int[Tensor, " token"],
        positions: Int[Tensor, " token"],
        attend: Attend,
    ) -> Float[Tensor, "token hidden"]:
        """Hidden states of new tokens, whose keys and values are kept on the way."""
        config = self.config
        num_queries = config.num_attention_heads
        num_rotated = num_queries + config.num_key_value_heads
        rotations = self.rotations[positions][:, None]
        x = self.embedding[ids]
        for cache, weights in zip(self.cache, self.layers, strict=True):
            qkv, output, gate_up, down = weights
            heads = (self.norm(x) @ qkv).unflatten(-1, (-1, config.head_dim))
            pairs = torch.view_as_complex(heads[:, :num_rotated].unflatten(-1, (-1, 2)))
            heads[:, :num_rotated] = torch.view_as_real(pairs * rotations).flatten(-2)
            cache[:, rows, :, positions] = heads[:, num_queries:].unflatten(1, (2, -1))
            x = x + attend(cache, heads[:, :num_queries]) @ output
            gate, up = (self.norm(x) @ gate_up).chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ down
        return x

    def logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        return self.norm(hidden) @ self.head

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.config.rms_norm_eps)

    def mask(
        self, positions: Int[Tensor, " query"], length: int
    ) -> Float[Tensor, "query position"]:
        """0 where a query at its position may look, -inf after it, `length` or more."""
        length = min(-(-length // LENGTH_STEP) * LENGTH_STEP, self.max_context)
        columns = torch.arange(length, device=self.device)
        mask = torch.zeros(len(positions), length, device=self.device)
        return mask.masked_fill_(columns > positions[:, None], -torch.inf)

    def tensor(self, values: Sequence[int] | np.ndarray) -> Int[Tensor, " n"]:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)


def attend_row(
    cache: Float[Tensor, "2 kv_head max_context head_dim"],
    queries: Float[Tensor, "query head head_dim"],
    mask: Float[Tensor, "query position"],
) -> Float[Tensor, "query hidden"]:
    """Several queries of one row over its own cache."""
    keys, values = cache[:, None, :, : mask.shape[1]]
    mixed = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        scale=1.0,
        enable_gqa=True,
    )
    return mixed[0].transpose(0, 1).flatten(1)


def attend_all(
    cache: Float[Tensor, "2 row kv_head max_context head_dim"],
    queries: Float[Tensor, "row head head_dim"],
    mask: Float[Tensor, "row position"],
) -> Float[Tensor, "row hidden"]:
    """One query for each row. The cache is read where it lies, without a copy.

    Query heads that share a key head are the rows of one small product.
    """
    keys, values = cache[:, :, :, : mask.shape[1]]
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    scores = grouped @ keys.transpose(-1, -2)
    scores += mask[:, None, None]
    return (scores.softmax(-1) @ values).flatten(1)
