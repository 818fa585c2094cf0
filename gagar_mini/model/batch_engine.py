"""Many conversations of any causal language model at once, in rounds of rows.

The model's own code runs, on a cache of rows like that of the tiny policy: each context
has a row, each new token is written at its own position, and a mask shows each query
the positions up to its own. So rows of all lengths are decoded together, and a turn
costs its new tokens only. Left out, and sampled one after the other instead
(`hf_engine`): architectures that attend in another way (windows, states) and attention
kernels that take no mask.

What a row samples differs from what it would alone by rounding only.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from gagar_mini.model.cached_model import LENGTH_STEP
from gagar_mini.model.hf_engine import HuggingFaceEngine, copy_weights
from gagar_mini.model.torch_engine import RowEngine, checked_context
from gagar_mini.types import Engine

PREFILL_TOKENS = 512  # of one row in one pass: bounds the memory of the mask
GROUPED = "gagar_mini_grouped"
MASKED_KERNELS = ("sdpa", "eager", GROUPED)
MOST_GROUPED = 8  # new tokens of a row; with more, the library's kernel is faster
MAX_TRIAL_ERRORS = {torch.float32: 0.01}
MAX_LOW_TRIAL_ERROR = 0.3
"""Of the logits on average, against their spread. Of bf16's rounding alone SmolLM2-135M
gets .1, of an architecture that attends in another way above 1."""


def open_chat_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_rows: int = 16,
    max_context: int | None = None,
) -> Engine:
    """The fastest engine that is right for `model`, which it owns from now on: rows
    where a trial gives what the model itself gives, else one after the other, with a
    warning that says why."""
    rows = ChatRows(model, tokenizer, max_rows, max_context)
    obstacle = obstacle_to(rows)
    if not obstacle:
        return RowEngine(rows)
    warnings.warn(
        f"conversations are sampled one after the other, since {obstacle}", stacklevel=2
    )
    return HuggingFaceEngine(model, tokenizer, max_context=max_context)


class ChatRows:
    """A model of transformers as rows (protocol: `torch_engine.RowModel`).

    The cache of a layer is keys and values, [row, key-value head, max_context, width]
    each, made with the first token. Ids that the tokenizer does not have are never
    sampled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        max_rows: int,
        max_context: int | None = None,
    ):
        longest = model.config.get_text_config().max_position_embeddings
        self.model, self.device = model.eval(), model.device
        self.max_rows = max_rows
        self.max_context = checked_context(max_context, longest)
        self.num_tokens = max(tokenizer.get_vocab().values()) + 1
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        if self.device.type == "cpu" and model.config._attn_implementation == "sdpa":
            use_grouped_attention(model)
        # the name of this argument differs between versions of transformers
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._keeps_some = "logits_to_keep" in accepted

    def load(self, policy: nn.Module) -> None:
        copy_weights(policy, self.model)

    def allocate(self) -> None:
        self.model.to(self.device)

    def free(self) -> None:
        """The weights leave a GPU, too."""
        self.layers.clear()
        self.model.to("cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def copy_row(self, source: int, targets: Sequence[int], length: int) -> None:
        for cache in self.layers.values():
            for kept in cache:
                for target in targets:
                    kept[target, :, :length] = kept[source, :, :length]

    def prefill(
        self, rows: Sequence[int], ids: Sequence[np.ndarray], starts: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Rows of similar length are read together, padded on the right."""
        found: dict[int, Tensor] = {}
        for part, begin in prefill_parts([len(new) for new in ids]):
            pieces = [ids[i][begin : begin + PREFILL_TOKENS] for i in part]
            logits = self.append(
                [rows[i] for i in part], pieces, [starts[i] + begin for i in part]
            )
            found |= dict(zip(part, logits, strict=True))
        return torch.stack([found[i] for i in range(len(ids))])

    def decode(
        self, ids: Sequence[int], positions: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        return self.append(range(len(ids)), [np.array([i]) for i in ids], positions)

    @torch.inference_mode()
    def append(
        self, rows: Sequence[int], ids: Sequence[np.ndarray], starts: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Write new tokens of some rows; the logits of what follows each, in fp32."""
        lengths = self.tensor([len(new) for new in ids])
        padded = np.zeros((len(ids), max(map(len, ids))), dtype=np.int64)
        for line, new in zip(padded, ids, strict=True):
            line[: len(new)] = new
        steps = torch.arange(padded.shape[1], device=self.device)
        positions = self.tensor(starts)[:, None] + steps
        cache = RowsCache(self, rows, positions, steps < lengths[:, None])
        last, which = torch.unique(lengths - 1, return_inverse=True)
        output = self.model(
            input_ids=self.tensor(padded),
            position_ids=positions.clamp(max=self.max_context - 1),
            attention_mask=cache.mask(self.model.dtype),
            use_cache=True,
            **{self._cache_name: cache},
            **({"logits_to_keep": last} if self._keeps_some else {}),
        )
        every = torch.arange(len(ids), device=self.device)
        logits = output.logits[every, which if self._keeps_some else lengths - 1]
        logits = logits.float()
        logits[:, self.num_tokens :] = -torch.inf
        return logits

    def tensor(self, values: Sequence[int] | np.ndarray) -> Int[Tensor, "..."]:
        return torch.as_tensor(values, dtype=torch.long, device=self.device)


def use_grouped_attention(model: PreTrainedModel) -> None:
    """Read keys and values where they lie: on a CPU the library would first repeat them
    for every query head, which takes most of the time of a decoded token."""
    AttentionInterface.register(GROUPED, grouped_attention)
    AttentionMaskInterface.register(GROUPED, sdpa_mask)
    model.set_attn_implementation(GROUPED)


def grouped_attention(
    module: nn.Module,
    query: Float[Tensor, "row head token width"],
    key: Float[Tensor, "row kv_head position width"],
    value: Float[Tensor, "row kv_head position width"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **others: object,
) -> tuple[Float[Tensor, "row token head width"], None]:
    """Attention of groups of query heads that share keys and values, for few tokens
    and a mask that is added; the library's otherwise."""
    is_added = attention_mask is not None and attention_mask.is_floating_point()
    if not is_added or query.shape[2] > MOST_GROUPED:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    num_rows, num_heads, num_tokens, width = query.shape
    shared = query.reshape(num_rows, key.shape[1], -1, width)  # group and token in one
    scores = shared @ key.transpose(2, 3) * (scaling or width**-0.5)
    by_head = scores.view(num_rows, num_heads, num_tokens, -1) + attention_mask
    weights = by_head.softmax(-1, dtype=torch.float32).to(value.dtype)
    mixed = weights.view(scores.shape) @ value
    return mixed.view(query.shape).transpose(1, 2), None


class RowsCache:
    """What one pass of the model takes for its cache: some rows, and where the new
    tokens go. `is_real` [row, token] is False for padding, which is written nowhere."""

    def __init__(
        self,
        owner: ChatRows,
        rows: Sequence[int],
        positions: Int[Tensor, "row token"],
        is_real: Tensor,
    ):
        self.owner, self.positions, self.is_real = owner, positions, is_real
        # rows that lie side by side are read where they lie, others are copied
        is_slice = list(rows) == list(range(len(rows)))
        self.rows = slice(len(rows)) if is_slice else owner.tensor(rows)
        line, _ = torch.nonzero(is_real, as_tuple=True)
        self.places = (owner.tensor(rows)[line], positions[is_real])
        length = int(positions[is_real].max()) + 1
        self.length = min(-(-length // LENGTH_STEP) * LENGTH_STEP, owner.max_context)

    def mask(self, dtype: torch.dtype) -> Float[Tensor, "row 1 token position"]:
        """0 where a query may look, -inf behind its own position."""
        columns = torch.arange(self.length, device=self.positions.device)
        hidden = columns > self.positions[:, None, :, None]
        return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *others: object
    ) -> tuple[Tensor, Tensor]:
        """Keep the new keys and values [row, head, token, width]; all of these rows."""
        if layer_idx not in self.owner.layers:
            self.owner.layers[layer_idx] = (self.empty(keys), self.empty(values))
        cache = self.owner.layers[layer_idx]
        rows, positions = self.places
        for kept, new in zip(cache, (keys, values), strict=True):
            kept[rows, :, positions] = new.transpose(1, 2)[self.is_real]
        return tuple(kept[self.rows, :, : self.length] for kept in cache)

    def empty(self, new: Tensor) -> Tensor:
        """Zeros, since a masked NaN stays NaN."""
        owner, (_, num_heads, _, width) = self.owner, new.shape
        return new.new_zeros(owner.max_rows, num_heads, owner.max_context, width)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def prefill_parts(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Which rows are read together, and from which of their new tokens on.

    In a part no row is more than twice as long as another, so that less than half of
    what is read is padding, unless all are short.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    while order:
        limit = max(2 * lengths[order[0]], LENGTH_STEP)
        part = [i for i in order if lengths[i] <= limit]
        order = order[len(part) :]
        for begin in range(0, lengths[part[-1]], PREFILL_TOKENS):
            yield [i for i in part if lengths[i] > begin], begin


def obstacle_to(rows: ChatRows) -> str:
    """Why rows would not give what the model gives alone, by its config or in a trial;
    "" where they do."""
    config = rows.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if set(kinds) != {"full_attention"} if kinds else window is not None:
        return "the model does not attend to all that went before"
    kernel = rows.model.config._attn_implementation
    if kernel not in MASKED_KERNELS:
        return f"the attention {kernel} takes no mask"
    try:
        error = trial_error(rows)
    except Exception as problem:  # code that wants another cache fails in any way
        return f"a trial failed: {' '.join(str(problem).split())[:200]}"
    finally:
        rows.layers.clear()
    tolerance = MAX_TRIAL_ERRORS.get(rows.model.dtype, MAX_LOW_TRIAL_ERROR)
    return "" if error < tolerance else f"logits of a trial are {error:.2g} off"


@torch.inference_mode()
def trial_error(rows: ChatRows) -> float:
    """How far logits of two ragged rows are from those of the model alone, on average
    at the worst position, against their spread."""
    ids = (300 + 997 * np.arange(12)) % rows.num_tokens
    steps = {
        (3, 8): rows.prefill([0, 1], [ids[:3], ids[:8]], [0, 0]),
        (4, 9): rows.decode([int(ids[3]), int(ids[8])], [3, 8]),
        (4, 12): rows.prefill([0, 1], [ids[3:4], ids[9:12]], [3, 9]),
    }
    errors = []
    for lengths, found in steps.items():
        for length, logits in zip(lengths, found, strict=True):
            alone = rows.model(input_ids=rows.tensor(ids[None, :length]))
            expected = alone.logits[0, -1, : rows.num_tokens].float()
            difference = (logits[: rows.num_tokens] - expected).abs().mean()
            errors.append(difference / expected.std())
    return float(torch.stack(errors).max())  # NaN where one is
