"""What a run will need, before anything is loaded: bytes by part, seconds by part.

Arithmetic on a model's config.json and a run's config. Memory is the sum of what a rank
holds at worst, of tensors alone: not the interpreter, libraries, allocator gaps or a
CUDA context, nor the copy of the gradients that ranks without shards add up, once the
activations are gone. Seconds come from floating-point operations and bytes moved,
divided by what a device reaches; that share is an assumption until it is measured. Left
out: tools that keep a rollout waiting unless `tool_s` says so, and grading.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from gagar_mini.config import RunConfig

CHUNK_LOGITS = 2**26
"""Most logits that the update has at a time."""
SHAPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a decoder with SwiGLU, RMSNorm and grouped-query attention."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_tied_head: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def block_matrices(self) -> int:
        """Parameters of one block that a token is multiplied by."""
        attention = 2 * self.query_width + 2 * self.kv_width
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def block_parameters(self) -> int:
        norms = 2 * self.hidden_size + 2 * self.head_dim * self.has_qk_norm
        biases = (self.query_width + 2 * self.kv_width) * self.has_qkv_bias
        biases += self.hidden_size * self.has_output_bias
        return self.block_matrices + norms + biases

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks: embedding, last norm and an untied head."""
        tables = 1 if self.has_tied_head else 2
        return tables * self.embedding_parameters + self.hidden_size

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.block_parameters + self.root_parameters


def model_size(written: Mapping[str, object]) -> ModelSize:
    """The sizes in a Hugging Face config.json (Llama, Mistral, Qwen2, Qwen3 shapes).

    Raises ValueError for another shape, or for a size that is missing or no number.
    """
    kind = written.get("model_type")
    if kind not in SHAPES:
        raise ValueError(
            f"model_type is {kind!r}: the cost model knows {', '.join(SHAPES)}"
        )

    def size(name: str, default: int | None = None) -> int:
        value = written.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r} in the model's config, no size")
        return value

    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    has_bias = bool(written.get("attention_bias", False))
    return ModelSize(
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=size("intermediate_size"),
        num_layers=size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", num_heads),
        head_dim=size("head_dim", hidden_size // num_heads),
        has_tied_head=bool(written.get("tie_word_embeddings", False)),
        has_qkv_bias=has_bias or kind == "qwen2",
        has_output_bias=has_bias,
        has_qk_norm=kind == "qwen3",
    )


@dataclass(frozen=True)
class Lengths:
    """Tokens of a trajectory, mean: all, and those of them that the policy sampled."""

    total: float
    action: float


def longest(config: RunConfig) -> Lengths:
    """Trajectories as long as the config allows: an upper bound."""
    rollout = config.rollout
    action = min(rollout.max_action_tokens, rollout.max_context_tokens)
    return Lengths(float(rollout.max_context_tokens), float(action))


# --- memory ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank, all alive at once at worst."""

    master_weights: int
    """fp32 weights that the optimiser moves; this rank's share if sharded."""
    compute_weights: int
    """Copy in the precision of the passes; if sharded, the units gathered at a time."""
    gradients: int
    moments: int
    """Adam's two."""
    activations: int
    """What the backward pass of one micro-batch needs."""
    logits: int
    """At the actions of one micro-batch, with gradient and float32 chunks."""
    engine_weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        """A line for each part, and their sum."""
        rows = dataclasses.asdict(self) | {"total": self.total}
        names = [name.replace("_", " ") for name in rows]
        width = max(map(len, names))
        return "\n".join(
            f"{name:{width}}  {gib(value):>10}"
            for name, value in zip(names, rows.values(), strict=True)
        )


def gib(num_bytes: int) -> str:
    """Bytes as a reader wants them, in MiB or GiB."""
    if num_bytes < 2**30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def estimate_memory(
    size: ModelSize,
    config: RunConfig,
    *,
    ranks: int = 1,
    lengths: Lengths | None = None,
    has_own_engine: bool = True,
) -> MemoryEstimate:
    """Bytes that one of `ranks` needs at worst.

    With `optim.sharded` the ranks share weights, gradients and moments; with a LoRA
    rank only adapters have gradients and moments. `has_own_engine` is False where
    servers elsewhere sample.
    """
    lengths = lengths or longest(config)
    adapters = adapter_parameters(size, config.optim.lora_rank)
    num_parameters = size.num_parameters + adapters
    trained = adapters or num_parameters
    shards = ranks if config.optim.sharded else 1
    number = compute_bytes(config)
    compute = 0 if number == 4 else number * num_parameters
    if shards > 1:
        # the root stays gathered, and the next block comes while one computes
        units = size.root_parameters + 2 * size.block_parameters
        compute = number * min(units, num_parameters)
    rows = rows_per_rank(config, ranks) * config.rollout.max_context_tokens
    return MemoryEstimate(
        master_weights=math.ceil(4 * num_parameters / shards),
        compute_weights=compute,
        gradients=math.ceil(4 * trained / shards),
        moments=math.ceil(2 * 4 * trained / shards),
        activations=activation_bytes(size, config, ranks),
        logits=logits_bytes(size, config, ranks, lengths),
        engine_weights=number * size.num_parameters * has_own_engine,
        kv_cache=number * kv_elements(size) * rows * has_own_engine,
    )


def compute_bytes(config: RunConfig) -> int:
    """Bytes of a number in the passes, and in the engine."""
    return {"float32": 4, "bfloat16": 2}[config.dtype]


def adapter_parameters(size: ModelSize, lora_rank: int) -> int:
    """Adapters of this rank on every linear layer but the head."""
    inputs_and_outputs = (
        6 * size.hidden_size  # three of the attention, three of the MLP
        + size.hidden_size  # the fourth, back to the residual stream
        + 2 * size.query_width
        + 2 * size.kv_width
        + 3 * size.intermediate_size
    )
    return size.num_layers * lora_rank * inputs_and_outputs


def rows_per_rank(config: RunConfig, ranks: int) -> int:
    """Trajectories that one rank samples at a time: whole groups."""
    own_tasks = math.ceil(config.sampling.tasks_per_round / ranks)
    return own_tasks * config.rollout.group_size


def rows_per_update(config: RunConfig, ranks: int) -> int:
    """Most trajectories that one rank trains on in one update: whole groups."""
    num_updates = config.optim.num_minibatches
    groups = math.ceil(config.sampling.groups_per_step / num_updates)
    return math.ceil(groups / ranks) * config.rollout.group_size


def kv_elements(size: ModelSize) -> int:
    """Keys and values of one token."""
    return 2 * size.num_layers * size.kv_width


def activation_bytes(size: ModelSize, config: RunConfig, ranks: int) -> int:
    """What one micro-batch keeps for its backward pass.

    Checkpointing keeps the input of each block, and one block whole.
    """
    number, width = compute_bytes(config), size.hidden_size
    block = block_activation_bytes(size, number)
    kept = size.num_layers * block
    if config.optim.gradient_checkpointing:
        kept = size.num_layers * 4 * width + block
    last_norm = 2 * 4 * width + number * width
    return micro_tokens(config, ranks) * (kept + last_norm)


def block_activation_bytes(size: ModelSize, number: int) -> int:
    """Bytes that one token leaves in one block, with `number` bytes in a product.

    In fp32: the residual stream before both norms, and normalised, before the gain. As
    the products take it: their inputs, queries, keys, values, what attention mixed, and
    four tensors of the MLP. In bf16 each product casts its own copy of its input.
    """
    heads = size.query_width + size.kv_width
    input_copies = 2 if number == 4 else 5
    wide = 4 * size.hidden_size + 2 + size.num_heads  # and statistics
    narrow = input_copies * size.hidden_size + 2 * heads + 4 * size.intermediate_size
    if size.has_qk_norm:
        wide += heads + size.num_heads + size.num_kv_heads
        narrow += heads
    return 4 * wide + number * narrow


def micro_tokens(config: RunConfig, ranks: int) -> int:
    """Padded tokens of the largest micro-batch: a longer trajectory is one alone, and a
    rank may have fewer."""
    longest_row = config.rollout.max_context_tokens
    own_tokens = rows_per_update(config, ranks) * longest_row
    return max(min(config.optim.micro_batch_tokens, own_tokens), longest_row)


def logits_bytes(
    size: ModelSize, config: RunConfig, ranks: int, lengths: Lengths
) -> int:
    """Logits of one chunk of a micro-batch's actions with their gradient, and four
    float32 copies: scaled, their softmax, and two for the entropy."""
    num_actions = micro_tokens(config, ranks) * lengths.action / lengths.total
    logits = min(math.ceil(num_actions) * size.vocab_size, CHUNK_LOGITS)
    return (2 * compute_bytes(config) + 4 * 4) * logits


# --- time -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """What one rank computes on: peaks from a data sheet, and the share of them that
    programs reach, which is measured or assumed."""

    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""
    link_bytes_per_s: float = math.inf
    """Between ranks, the slowest link on the way."""
    compute_share: float = 0.35
    memory_share: float = 0.6
    pass_s: float = 0.0
    """Least seconds of one decoding pass: launching kernels, choosing tokens."""

    def compute_s(self, flops: float) -> float:
        return flops / (self.flops_per_s * self.compute_share)

    def read_s(self, num_bytes: float) -> float:
        return num_bytes / (self.bytes_per_s * self.memory_share)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimisation step by part, one after the other."""

    prefill: float
    decode: float
    tools: float
    update: float
    communication: float
    """Gradients or shards between ranks, and weights to the engine."""

    @property
    def total(self) -> float:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        rows = dataclasses.asdict(self) | {"total": self.total}
        return "\n".join(f"{name:13}  {value:8.2f} s" for name, value in rows.items())


def forward_flops(size: ModelSize, context: float) -> float:
    """Operations of one token in a forward pass without the head, behind `context / 2`
    others on average: two for each weight, four for each attended channel."""
    attended = 4 * size.query_width * context / 2
    return size.num_layers * (2 * size.block_matrices + attended)


def head_flops(size: ModelSize) -> int:
    """Operations of the logits of one position."""
    return 2 * size.embedding_parameters


def estimate_step_time(
    size: ModelSize,
    config: RunConfig,
    device: Device,
    *,
    ranks: int = 1,
    lengths: Lengths | None = None,
    rounds: float = 1.0,
    tool_s: float = 0.0,
) -> StepTime:
    """Seconds of a step on `ranks` such devices, the slowest rank counting.

    `rounds` of dynamic sampling; `tool_s` are seconds of tools and hidden tests for
    each trajectory divided by how many of them run at a time on a rank.
    """
    lengths = lengths or longest(config)
    rows = rows_per_rank(config, ranks)
    read = (lengths.total - lengths.action) * forward_flops(size, lengths.total)
    token_s = decode_s(size, config, device, rows, lengths)
    return StepTime(
        prefill=device.compute_s(rounds * rows * read),
        decode=rounds * lengths.action * token_s,
        tools=rounds * rows * tool_s,
        update=update_s(size, config, device, ranks, lengths),
        communication=communication_s(size, config, device, ranks, lengths),
    )


def decode_s(
    size: ModelSize, config: RunConfig, device: Device, rows: int, lengths: Lengths
) -> float:
    """One token for each row: the weights are read once, the caches half full."""
    num_numbers = size.num_parameters + rows * kv_elements(size) * lengths.total / 2
    read_s = device.read_s(compute_bytes(config) * num_numbers)
    flops = forward_flops(size, lengths.total) + head_flops(size)
    return max(read_s, device.compute_s(rows * flops), device.pass_s)


def update_s(
    size: ModelSize, config: RunConfig, device: Device, ranks: int, lengths: Lengths
) -> float:
    """Forward and backward passes: three times the forward's operations, twice where
    only adapters have gradients, once more where activations are computed again."""
    rows = rows_per_update(config, ranks) * config.optim.num_minibatches
    passes = 2 if config.optim.lora_rank else 3
    body = passes + config.optim.gradient_checkpointing
    flops = body * lengths.total * forward_flops(size, lengths.total)
    flops += passes * lengths.action * head_flops(size)
    return device.compute_s(rows * flops)


def communication_s(
    size: ModelSize, config: RunConfig, device: Device, ranks: int, lengths: Lengths
) -> float:
    """A ring moves (n - 1) / n of a tensor to gather or to reduce it, twice that for
    both. Shards are gathered in every pass, reduced after it, and gathered whole for
    the engine."""
    trained = adapter_parameters(size, config.optim.lora_rank) or size.num_parameters
    ring_s = (ranks - 1) / ranks * trained / device.link_bytes_per_s
    num_updates = config.optim.num_minibatches
    if not config.optim.sharded:
        return num_updates * 2 * 4 * ring_s
    tokens = rows_per_update(config, ranks) * lengths.total
    num_parts = math.ceil(tokens / config.optim.micro_batch_tokens)
    gathers = 3 if config.optim.gradient_checkpointing else 2
    moved = num_updates * num_parts * (gathers * compute_bytes(config) + 4) + 4
    return moved * ring_s


DATA_SHEETS = {
    "A100-80GB": Device(312e12, 2.04e12, 300e9, pass_s=0.008),
    "H100-80GB": Device(989e12, 3.35e12, 450e9, pass_s=0.006),
    "H200": Device(989e12, 4.8e12, 450e9, pass_s=0.006),
}
"""Dense bf16 peaks and NVLink, one way, of the SXM cards; the shares reached and the
seconds of a decoding pass are assumptions. Two nodes have the link of their network."""
