"""Every knob of a run, as frozen dataclasses, and the presets that set them together.

A preset is a function that returns a full `RunConfig`. Overrides are dotted names
(`rollout.group_size`); a name that does not exist, a value of another type or an impossible
combination is a `ValueError` in one sentence.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

CreditRule = Literal["binary", "downweight", "gagar", "gagar-exact"]
GraderName = Literal["none", "rubric", "oracle", "random", "reversed", "shortest"]
Aggregation = Literal["token-mean", "prompt-mean", "sequence-mean"]


@dataclass(frozen=True)
class TaskConfig:
    family: str = "core"
    """Task set: "core" (small enough for the tiny policy) or "full"."""
    split: str = "train"
    """Split that training draws from."""


@dataclass(frozen=True)
class RolloutConfig:
    group_size: int = 8
    """Trajectories per task (G)."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at the same one. Above 0 in training."""
    max_turns: int = 10
    """Turns of one trajectory, the submitting one included."""
    max_action_tokens: int = 320
    """Sampled tokens of one trajectory."""
    max_new_tokens: int = 96
    """Sampled tokens of one turn."""
    max_context_tokens: int = 1024
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


@dataclass(frozen=True)
class CreditConfig:
    rule: CreditRule = "binary"
    """How the group's credit is shared: "gagar" is the paper's bounded training form."""
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
    """Band of the importance ratio outside which a token is masked (masked-importance)."""
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
    """Optimiser updates per step, each on whole groups. With 1 the clip is never active."""
    micro_batch_tokens: int = 8192
    """Padded tokens of one forward and backward pass; changes memory, not the result."""


@dataclass(frozen=True)
class RunConfig:
    preset: str = "tiny"
    """Name of the preset that these settings started from."""
    seed: int = 0
    steps: int = 80
    """Optimisation steps."""
    policy: str = "data/policy/tiny"
    """Folder of the start checkpoint (Hugging Face layout)."""
    engine: Literal["torch"] = "torch"
    """Who samples: "torch" is the engine of this package."""
    sandbox: Literal["bubblewrap", "unsafe-local"] = "bubblewrap"
    """Where untrusted code runs. "unsafe-local" isolates nothing and must be asked for."""
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

    def __post_init__(self) -> None:
        check(self)


def tiny() -> RunConfig:
    """About 1M parameters on micro-repositories: two CPU cores, minutes."""
    return RunConfig()


PRESETS = {"tiny": tiny}


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
            f"rollout.temperature is {rollout.temperature}: training needs a temperature "
            "above 0, since greedy rollouts are not samples of a policy"
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
        "sampling.groups_per_step": sampling.groups_per_step,
        "sampling.tasks_per_round": sampling.tasks_per_round,
        "sampling.max_rounds": sampling.max_rounds,
        "optim.lr": config.optim.lr,
        "optim.num_minibatches": config.optim.num_minibatches,
        "optim.micro_batch_tokens": config.optim.micro_batch_tokens,
    }
    for name, value in positive.items():
        if value <= 0:
            raise ValueError(f"{name} is {value}: it must be above 0")
    if config.credit.max_scale < 1:
        raise ValueError(
            f"credit.max_scale is {config.credit.max_scale}: a cap below 1 would shrink "
            "even a group whose factors are all 1"
        )
    if config.credit.rule != "binary" and config.grader.name == "none":
        raise ValueError(
            f"credit.rule {config.credit.rule!r} shares credit by grades, so it needs a "
            "grader: --grader.name rubric (or oracle, random, reversed, shortest)"
        )
