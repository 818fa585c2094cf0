"""Every knob of a run, as frozen dataclasses, and the presets that set them together.

A preset is a function that returns a full `RunConfig`. Overrides are dotted names
(`rollout.group_size`); a name that does not exist, a value of another type or an
impossible combination is a `ValueError` in one sentence.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args, get_origin, get_type_hints

import yaml

CreditRule = Literal["binary", "downweight", "gagar", "gagar-exact"]
GraderName = Literal[
    "none",
    "rubric",
    "agentic",
    "chat",
    "llm",
    "oracle",
    "random",
    "reversed",
    "shortest",
]
DType = Literal["float32", "bfloat16"]
Aggregation = Literal["token-mean", "prompt-mean", "sequence-mean"]


@dataclass(frozen=True)
class TaskConfig:
    family: str = "core"
    """Task set: "core" (small enough for the tiny policy) or "full"."""
    split: str = "train"
    """Split that training draws from."""
    leak_share: float = 0.0
    """Share of the tasks in which a leak is planted, in [0, 1]: a world in which
    cheating is possible, to see confirmed hacks lose their reward."""


@dataclass(frozen=True)
class RolloutConfig:
    group_size: int = 8
    """Trajectories per task (G)."""
    temperature: float = 1.0
    """Sampling temperature, also that of log-probs. Above 0 in training."""
    tools: Literal["edit", "bash"] = "edit"
    """What the agent may do: "edit" reads and edits files and runs the visible check,
    "bash" runs shell commands in the sandbox, too."""
    max_turns: int = 9
    """Turns of one trajectory, the submitting one included."""
    max_action_tokens: int = 96
    """Sampled tokens of one trajectory."""
    max_new_tokens: int = 64
    """Sampled tokens of one turn."""
    max_context_tokens: int = 768
    """Tokens of one trajectory: prompt, actions and observations."""
    max_tool_seconds: float = 20.0
    """Seconds that the tools of one trajectory may take in all."""
    max_observation_chars: int = 1200
    """Longest observation; the middle of a longer one is cut and the cut is marked."""


@dataclass(frozen=True)
class SamplingConfig:
    groups_per_step: int = 6
    """Informative groups wanted for one optimiser step."""
    tasks_per_round: int = 8
    """Tasks rolled out in one round of dynamic sampling."""
    max_rounds: int = 2
    """Rounds after which the step trains on what it has."""


@dataclass(frozen=True)
class GraderConfig:
    name: GraderName = "none"
    """Who orders the passing trajectories of a group."""
    reference: GraderName = "oracle"
    """Whose tiers the controls "random" and "reversed" permute."""
    timeout_s: float = 60.0
    """Deadline of one grading; after it the group keeps its original advantages."""
    model: str = "data/grader/tiny"
    """Folder of the checkpoint of the grader "agentic" (Hugging Face layout); for the
    grader "chat" the folder of any chat model, or its id where the hub is reached."""
    run_tool: bool = False
    """Let "agentic", "chat" and "llm" run commands on copies of the trees, in the
    sandbox."""
    endpoint: str = ""
    """Base URL of an OpenAI-compatible endpoint for "llm", such as
    http://localhost:8000/v1; "" is the client's default. The key comes from the
    environment variable OPENAI_API_KEY alone."""
    endpoint_model: str = ""
    """Name of the model at the endpoint."""


@dataclass(frozen=True)
class CreditConfig:
    rule: CreditRule = "binary"
    """How the group's credit is shared; "gagar" is the paper's bounded form."""
    max_scale: float = 1.5
    """Cap on the credit scale lambda in the bounded form (paper Eqs 7-8)."""
    scale_by_std: bool = False
    """Divide by the group's standard deviation (original GRPO; GAGAR does not)."""


@dataclass(frozen=True)
class LossConfig:
    kind: Literal["clipped", "masked-importance"] = "clipped"
    """PPO clip, or the report's Eq. 1 with its band mask."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    band_low: float = 0.2
    band_high: float = 5.0
    """Band of the ratio outside which a token is masked (masked-importance)."""
    aggregation: Aggregation = "token-mean"
    """What one optimiser step averages over."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 2e-4
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to it."""
    warmup_steps: int = 2
    """Optimiser updates over which the learning rate rises to `lr`."""
    num_minibatches: int = 2
    """Optimiser updates per step, each on whole groups. With 1 the clip is idle."""
    micro_batch_tokens: int = 8192
    """Padded tokens of one forward and backward pass: memory, not the result."""
    gradient_checkpointing: bool = False
    """Compute activations of a chat model again in the backward pass: a third more
    work, a fraction of the memory."""
    lora_rank: int = 0
    """Train adapters of this rank on a chat model (peft); 0 trains all weights."""
    sharded: bool = False
    """Spread weights, gradients and moments over the processes of a run that torchrun
    started (FSDP2): memory, not the result."""


@dataclass(frozen=True)
class VllmConfig:
    """How vLLM samples, where `engine` is "vllm"."""

    memory_share: float = 0.35
    """Of a GPU that it has together with the trainer, weights included."""
    servers: str = ""
    """Addresses of vLLM servers, with spaces between; "" samples in this process."""
    exchange: str = ""
    """Folder for new weights that the servers see by the same path; "" is a temporary
    one on this machine."""


@dataclass(frozen=True)
class RunConfig:
    preset: str = "tiny"
    """Name of the preset that these settings started from."""
    seed: int = 0
    steps: int = 50
    """Optimisation steps."""
    policy: str = "data/policy/tiny"
    """Start checkpoint: a folder (Hugging Face layout, or an adapter of peft), an id of
    the hub, or a name of `gagar-mini models fetch`."""
    dtype: DType = "float32"
    """In what a chat model computes; weights and optimiser stay float32."""
    engine: Literal["torch", "vllm"] = "torch"
    """Who samples: "torch" is the engine of this package; "vllm" needs
    gagar-mini[vllm]."""
    sandbox: Literal["bubblewrap", "docker", "unsafe-local"] = "bubblewrap"
    """Where untrusted code runs. "unsafe-local" isolates nothing."""
    sandbox_image: str = ""
    """Image of the Docker sandbox; "" is one built from this machine's own files."""
    threads: int = 1
    """Threads of torch. Results are reproducible for an equal number of threads."""
    checkpoint_every: int = 10
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept."""
    tasks: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grader: GraderConfig = field(default_factory=GraderConfig)
    credit: CreditConfig = field(default_factory=CreditConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class ChatSftConfig:
    """The warm-up of a chat model."""

    model: str = "smol"
    """Folder, id of the hub, or name of `gagar-mini models fetch`."""
    family: str = "core"
    """Task set whose training split is demonstrated."""
    habits: Literal["mixed", "careful"] = "mixed"
    """Who demonstrates: "mixed" is often wrong, less often with sloppy habits, as for
    the tiny policy; "careful" is mostly right, and sloppy a little less often."""
    num_tokens: int = 280_000
    """Tokens of demonstrations, each seen once."""
    batch_tokens: int = 2048
    """Tokens of one optimiser update, with padding."""
    micro_batch_tokens: int = 2048
    """Tokens of one forward and backward pass: memory, not the result."""
    pack_length: int = 0
    """Pack samples into rows of this many tokens: as good as free on a GPU, and dear on
    a CPU, where 0 puts samples of similar lengths side by side."""
    lr: float = 8e-4
    """Peak learning rate of AdamW, after a warm-up and before a cosine decay."""
    warmup_share: float = 0.05
    lora_rank: int = 8
    """Train adapters of this rank (then an adapter is saved); 0 trains all weights, for
    which a tenth of the learning rate is a start."""
    dtype: DType = "bfloat16"
    gradient_checkpointing: bool = False
    seed: int = 0
    threads: int = 2
    sandbox: str = "bubblewrap"

    def __post_init__(self) -> None:
        for name in ("num_tokens", "batch_tokens", "micro_batch_tokens", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be above 0")
        if not (0 < self.lr < math.inf and 0 <= self.warmup_share < 1):
            raise ValueError(
                f"lr is {self.lr} and warmup_share {self.warmup_share}: the first must "
                "be above 0, the second lie in [0, 1)"
            )
        if self.pack_length < 0 or self.lora_rank < 0:
            raise ValueError(
                f"pack_length is {self.pack_length} and lora_rank {self.lora_rank}: "
                "neither may be below 0"
            )


def tiny() -> RunConfig:
    """About 1M parameters on micro-repositories: two CPU cores, minutes."""
    return RunConfig()


def smol() -> RunConfig:
    """SmolLM2-135M, warmed up on demonstrations: a CPU and patience, or any GPU."""
    return RunConfig(
        preset="smol",
        policy="data/policy/smol",
        dtype="bfloat16",
        steps=20,
        threads=2,
        checkpoint_every=1,
        rollout=RolloutConfig(
            temperature=0.8,
            max_turns=8,
            max_action_tokens=352,
            max_new_tokens=128,
            max_context_tokens=1024,
        ),
        sampling=SamplingConfig(groups_per_step=4, tasks_per_round=4, max_rounds=1),
        optim=OptimConfig(
            lr=2e-4, lora_rank=8, num_minibatches=1, micro_batch_tokens=2048
        ),
    )


def one_gpu() -> RunConfig:
    """A chat model of .5B (24 GB) to 1.5B (80 GB) parameters, vLLM beside the
    trainer."""
    return RunConfig(
        preset="one_gpu",
        policy="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        dtype="bfloat16",
        engine="vllm",
        steps=100,
        tasks=TaskConfig(family="full"),
        rollout=RolloutConfig(
            max_turns=12,
            max_action_tokens=1536,
            max_new_tokens=384,
            max_context_tokens=4096,
            max_observation_chars=4000,
        ),
        sampling=SamplingConfig(groups_per_step=12, tasks_per_round=16, max_rounds=3),
        optim=OptimConfig(
            lr=2e-6, micro_batch_tokens=16_384, gradient_checkpointing=True
        ),
    )


PRESETS = {"tiny": tiny, "smol": smol, "one_gpu": one_gpu}


def check(config: RunConfig) -> None:
    """Raise a ValueError, in one sentence, for a combination that cannot train."""
    rollout, sampling = config.rollout, config.sampling
    if rollout.group_size < 2:
        raise ValueError(
            f"rollout.group_size is {rollout.group_size}: a group needs at least 2 "
            "trajectories, since an advantage compares a trajectory with its group"
        )
    if rollout.temperature <= 0:
        raise ValueError(
            f"rollout.temperature is {rollout.temperature}: training needs a "
            "value above 0, since greedy rollouts are not samples of a policy"
        )
    positive = {
        "steps": config.steps,
        "threads": config.threads,
        "checkpoint_every": config.checkpoint_every,
        "keep_checkpoints": config.keep_checkpoints,
        "rollout.max_turns": rollout.max_turns,
        "rollout.max_action_tokens": rollout.max_action_tokens,
        "rollout.max_new_tokens": rollout.max_new_tokens,
        "rollout.max_context_tokens": rollout.max_context_tokens,
        "rollout.max_observation_chars": rollout.max_observation_chars,
        "sampling.groups_per_step": sampling.groups_per_step,
        "sampling.tasks_per_round": sampling.tasks_per_round,
        "sampling.max_rounds": sampling.max_rounds,
        "optim.lr": config.optim.lr,
        "optim.num_minibatches": config.optim.num_minibatches,
        "optim.micro_batch_tokens": config.optim.micro_batch_tokens,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}: it must be above 0")
    if config.credit.max_scale < 1:
        raise ValueError(
            f"credit.max_scale is {config.credit.max_scale}: a cap below 1 would "
            "shrink even a group whose factors are all 1"
        )
    if config.credit.rule != "binary" and config.grader.name == "none":
        raise ValueError(
            f"credit.rule {config.credit.rule!r} shares credit by grades, so it needs "
            "a grader: --grader.name rubric (or agentic, oracle, random, reversed, "
            "shortest)"
        )
    _check_ranges(config)


def _check_ranges(config: RunConfig) -> None:
    loss, optim = config.loss, config.optim
    if config.grader.reference in ("none", "random", "reversed"):
        raise ValueError(
            f"grader.reference is {config.grader.reference!r}: a control permutes the "
            "tiers of a real grader, rubric, oracle or shortest"
        )
    _check_minds(config.grader)
    if not 0 <= config.tasks.leak_share <= 1:
        raise ValueError(
            f"tasks.leak_share is {config.tasks.leak_share}: it must lie in [0, 1]"
        )
    if not 0 < loss.clip_low < 1 or loss.clip_high <= 0:
        raise ValueError(
            f"loss.clip_low {loss.clip_low} and loss.clip_high {loss.clip_high}: the "
            "clip [1 - clip_low, 1 + clip_high] must hold 1 and only positive ratios"
        )
    if not 0 < loss.band_low < 1 < loss.band_high:
        raise ValueError(
            f"loss.band_low {loss.band_low} and loss.band_high {loss.band_high}: the "
            "band must hold the on-policy ratio 1 and only positive ratios"
        )
    if not (0 <= optim.beta1 < 1 and 0 <= optim.beta2 < 1):
        raise ValueError(
            f"optim.beta1 {optim.beta1} and optim.beta2 {optim.beta2}: both must lie "
            "in [0, 1)"
        )
    if optim.weight_decay < 0 or optim.warmup_steps < 0:
        raise ValueError(
            f"optim.weight_decay {optim.weight_decay} and optim.warmup_steps "
            f"{optim.warmup_steps}: neither may be below 0"
        )
    if not 0 < config.vllm.memory_share < 1:
        raise ValueError(
            f"vllm.memory_share is {config.vllm.memory_share}: it must lie between 0 "
            "and 1, and leave the trainer its part"
        )
    if config.vllm.servers and config.engine != "vllm":
        raise ValueError("vllm.servers are of no use to another engine: --engine vllm")
    if "@" in config.vllm.servers:
        raise ValueError(
            "vllm.servers holds a user or a key, and a run's config is stored: give "
            "plain addresses"
        )
    if optim.lora_rank < 0 or (optim.lora_rank and optim.sharded):
        raise ValueError(
            f"optim.lora_rank is {optim.lora_rank}: it must be 0 or above, and without "
            "optim.sharded, as adapters are too small to be spread"
        )
    for name, value in {
        "grader.timeout_s": config.grader.timeout_s,
        "optim.max_grad_norm": optim.max_grad_norm,
        "rollout.max_tool_seconds": config.rollout.max_tool_seconds,
    }.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}: it must be above 0")
    for name, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}: it must be a finite number")


def _check_minds(grader: GraderConfig) -> None:
    judges = {grader.name, grader.reference}
    if grader.run_tool and not judges & {"agentic", "chat", "llm"}:
        raise ValueError(
            "grader.run_tool is for graders with tools: --grader.name agentic, chat or "
            "llm"
        )
    if "chat" in judges and grader.model == GraderConfig.model:
        raise ValueError(
            "the grader chat is a chat model of yours: give its folder or id with "
            "--grader.model (`gagar-mini models fetch smol` makes a small one)"
        )
    if "llm" in (grader.name, grader.reference) and not grader.endpoint_model:
        raise ValueError(
            "the grader llm asks a model behind an endpoint: name it with "
            "--grader.endpoint-model, and its address with --grader.endpoint"
        )
    if "@" in grader.endpoint:
        raise ValueError(
            "grader.endpoint holds a user or a key, and a run's config is stored: the "
            "key belongs into the environment variable OPENAI_API_KEY"
        )


Value = int | float | str | bool
"""What one knob may hold."""


def with_overrides(config: RunConfig, overrides: Mapping[str, Value]) -> RunConfig:
    """`config` with some knobs set anew by their dotted names, checked as a whole.

    A value is of the knob's type, or a string that spells one (as on a command line);
    `group-size` and `group_size` are the same name. Raises ValueError, in one sentence,
    for an unknown name, a value of another type, an impossible combination.
    """
    values, value_types = flatten(config), knobs()
    for name, value in overrides.items():
        key = name.replace("-", "_")
        if key not in value_types:
            raise ValueError(
                f"there is no setting {name!r}{_suggest(key, value_types)}"
            )
        values[key] = _convert(key, value, value_types[key])
    config = _build(RunConfig, values, "")
    assert isinstance(config, RunConfig)
    return config


def flatten(config: RunConfig) -> dict[str, Value]:
    """Every knob by its dotted name, in the order of the classes."""
    return _flatten_mapping(to_dict(config))


def knobs() -> dict[str, object]:
    """The type of every knob by its dotted name."""
    return _knobs(RunConfig, "")


def to_dict(config: RunConfig) -> dict[str, Value | dict[str, Value]]:
    """The nested plain form, as stored in a run folder's config.yaml."""
    return dataclasses.asdict(config)


def from_dict(data: Mapping[str, Value | Mapping[str, Value]]) -> RunConfig:
    """The inverse of `to_dict`. A knob that is missing takes its default."""
    return with_overrides(RunConfig(), _flatten_mapping(data))


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML; `from_yaml` reads it back equal."""
    return yaml.safe_dump(to_dict(config), sort_keys=False)


def from_yaml(text: str) -> RunConfig:
    """The config that a YAML text describes. Raises ValueError in one sentence."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        raise ValueError(f"the config is no valid YAML: {where}") from None
    except RecursionError:
        raise ValueError("the config is nested too deeply") from None
    if not isinstance(data, dict):
        raise ValueError("the config must be a mapping of settings, such as 'seed: 0'")
    return from_dict(data)


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Value, Value]]:
    """The knobs that differ: dotted name -> (old value, new value)."""
    before, after = flatten(old), flatten(new)
    return {
        name: (before[name], after[name])
        for name in before
        if before[name] != after[name]
    }


def _knobs(config_class: type, prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value_type in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(value_type):
            found |= _knobs(value_type, f"{prefix}{name}.")
        else:
            found[prefix + name] = value_type
    return found


def _build(config_class: type, values: Mapping[str, Value], prefix: str) -> object:
    arguments = {}
    for name, value_type in get_type_hints(config_class).items():
        if dataclasses.is_dataclass(value_type):
            arguments[name] = _build(value_type, values, f"{prefix}{name}.")
        else:
            arguments[name] = values[prefix + name]
    return config_class(**arguments)


def _flatten_mapping(data: Mapping[str, object], prefix: str = "") -> dict[str, Value]:
    flat: dict[str, Value] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten_mapping(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _convert(name: str, value: Value, wanted: object) -> Value:
    """`value` as the type of the knob `name`; strings are read as that type."""
    if get_origin(wanted) is Literal:
        if value in get_args(wanted):
            return value
        choices = ", ".join(map(str, get_args(wanted)))
        raise ValueError(f"{name} is {value!r}: it must be one of {choices}")
    readers = {bool: _read_bool, int: int, float: float, str: str}
    if isinstance(value, str):
        try:
            return readers[wanted](value)
        except ValueError:
            pass
    # bool is an int in Python, but `group_size=True` is a slip and not a number
    elif type(value) is wanted or (wanted is float and type(value) is int):
        try:
            return wanted(value)
        except OverflowError:
            raise ValueError(f"{name} is too large a number") from None
    raise ValueError(f"{name} is {value!r}: it must be of type {wanted.__name__}")


def _read_bool(text: str) -> bool:
    words = {
        "true": True,
        "yes": True,
        "1": True,
        "false": False,
        "no": False,
        "0": False,
    }
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _suggest(name: str, known: Mapping[str, object]) -> str:
    """A clause naming the nearest knob, or "" when none is near."""
    leaf = name.rpartition(".")[2]
    same_leaf = [key for key in known if key.rpartition(".")[2] == leaf]
    near = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f": did you mean {near[0]!r}?" if near else ""
