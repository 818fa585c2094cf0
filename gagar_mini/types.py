"""The nouns of the project, as frozen dataclasses, and the legend of shapes.

A `Task` is given to a policy, whose attempt is a `Trajectory`; hidden tests turn the
trajectory's patch into an `Outcome`; the G trajectories of one task are a
`RolloutGroup`; a grader orders its passing members in a `GroupGrade`.

Shapes (axis names in annotations, letters in comments)

| axis          | letter | meaning                                               |
|---------------|--------|-------------------------------------------------------|
| `task`        | B      | tasks in one optimisation step                        |
| `group`       | G      | trajectories of the same task                         |
| `traj`        | N      | trajectories in the batch, N = B * G                  |
| `token`       | T      | tokens of a trajectory: prompt, actions, observations |
| `turn`        | U      | turns of an agent                                     |
| `vocab`       | V      | vocabulary                                            |
| `hidden_test` | H      | hidden tests of a task                                |

All per-token arrays of a trajectory have one length T and index t means token t.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

import numpy as np

Files = Mapping[str, bytes]
"""A small repository in memory: POSIX path relative to its root -> content."""


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed from the parts alone: same parts, same seed, anywhere."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


# --- the task -------------------------------------------------------------------------


@dataclass(frozen=True)
class HiddenTest:
    """Calls of one function whose results only the verifier knows.

    Either `template` names a function template, whose input generator draws `num_cases`
    fresh inputs at each grading and whose reference gives the expected values; or
    `cases` lists `(arguments, expected)` pairs, literal.
    """

    id: str
    path: str
    function: str
    template: str = ""
    num_cases: int = 0
    cases: tuple[tuple[tuple, object], ...] = ()


@dataclass(frozen=True)
class Target:
    """A function that the statement asks to repair or write: the task's scope."""

    path: str
    function: str


@dataclass(frozen=True)
class Task:
    """One repository with a fault, a statement, and a hidden way to tell a repair.

    `files` is the tree at base. `visible_check` is the path of a script in it that the
    agent may run. `allowed_paths` is the scope that the statement grants. `gold_patch`
    and `hidden_tests` never reach an agent; hidden tests are read by `world.verifier`
    alone.
    """

    id: str
    family: str
    split: str
    statement: str
    files: Files
    visible_check: str
    targets: tuple[Target, ...]
    allowed_paths: tuple[str, ...]
    hidden_tests: tuple[HiddenTest, ...]
    gold_patch: bytes
    metadata: Mapping[str, str] = field(default_factory=dict)


# --- the trajectory -------------------------------------------------------------------


class StopReason(StrEnum):
    """Why a trajectory ended. All but `INFRA` are the policy's own and scored."""

    SUBMITTED = "submitted"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_CONTEXT = "max_context"
    MAX_TOOL_SECONDS = "max_tool_seconds"
    INFRA = "infra"


@dataclass(frozen=True)
class ToolCall:
    """A parsed action: `name` of a tool and its string arguments."""

    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Turn:
    """One completion and its observation. `action` is None if it was no call."""

    action: ToolCall | None
    observation: str
    num_action_tokens: int
    weight_version: int = 0


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What the policy did on a task, token by token.

    `ids` [T] are the prompt, the sampled completions and the encoded observations, in
    order, never re-encoded. `action_mask` [T] is True where the policy sampled the
    token, its end-of-turn token included. `behaviour_logprobs` [T] is log mu of each
    sampled token under the distribution it was drawn from (natural log, at the sampling
    temperature), 0 elsewhere. `patch` is the git diff of the final tree against the
    base.
    """

    id: str
    task_id: str
    ids: np.ndarray
    action_mask: np.ndarray
    behaviour_logprobs: np.ndarray
    turns: tuple[Turn, ...]
    patch: bytes
    stop_reason: StopReason
    weight_version: int = 0

    @property
    def num_action_tokens(self) -> int:
        return int(self.action_mask.sum())


# --- the outcome ----------------------------------------------------------------------


class Status(StrEnum):
    """What the verifier says of a patch. `INFRA`: the harness failed, nobody knows."""

    PASS = "pass"
    FAIL = "fail"
    TAMPERED = "tampered"
    INFRA = "infra"


@dataclass(frozen=True)
class Outcome:
    """The structured verdict on one patch.

    `tests` gives "pass", "fail", "error" or "missing" per hidden test id. `reason` is
    one sentence. `codes` name the kinds of tampering. `patch_hash` and `tree_hash` are
    sha256 of the patch and of the tree it makes; equal trees have equal hashes.
    """

    status: Status
    tests: Mapping[str, str] = field(default_factory=dict)
    reason: str = ""
    codes: tuple[str, ...] = ()
    patch_hash: str = ""
    tree_hash: str = ""
    duration_s: float = 0.0
    is_truncated: bool = False

    @property
    def reward(self) -> float | None:
        """1 for a pass, 0 for a failure or tampering, None where nothing is known."""
        if self.status is Status.INFRA:
            return None
        return float(self.status is Status.PASS)


# --- the group and its grade ----------------------------------------------------------


class Tier(StrEnum):
    """Quality class inside the passing set (paper, appendix A.1)."""

    T1 = "T1"
    T2 = "T2"
    T3 = "T3"


CRITERIA = ("approach", "precision", "minimality", "side_effects", "consistency")
"""The five criteria of the paper's Table 2 in order, each scored 1 (worst) to 5."""


@dataclass(frozen=True)
class Flag:
    """A finding about one candidate. `evidence` names a patch location ("path:line"), a
    trajectory event ("turn 3") or an execution result; a flag without it is no flag."""

    code: str
    message: str
    evidence: str
    is_severe: bool = False


@dataclass(frozen=True)
class CandidateGrade:
    """Five scores in the order of `CRITERIA`, the tier, and the order inside the tier.

    Smaller `order` is better; equal `order` inside a tier is a tie.
    """

    scores: tuple[int, int, int, int, int]
    tier: Tier
    order: int
    flags: tuple[Flag, ...] = ()


@dataclass(frozen=True)
class GroupGrade:
    """Grades of the passing members by candidate id, and the ids of confirmed hacks.

    Together they are exactly the valid passing ids of the group, each once.
    """

    grades: Mapping[str, CandidateGrade]
    confirmed_hacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """One member of a group as a grader sees it: no model, no reasoning, no claims."""

    id: str
    patch: bytes
    outcome: Outcome
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True)
class RolloutGroup:
    """The G trajectories of one task with their outcomes, and the grade, if any.

    `fallback_reason` says why a gradable group has no grade ("" when it has one or when
    none was asked for).
    """

    id: str
    task: Task
    trajectories: tuple[Trajectory, ...]
    outcomes: tuple[Outcome, ...]
    grade: GroupGrade | None = None
    fallback_reason: str = ""

    @property
    def rewards(self) -> np.ndarray:
        """[G] float64; 0 where the outcome is unknown, which `valid` tells apart."""
        return np.array([outcome.reward or 0.0 for outcome in self.outcomes])

    @property
    def valid(self) -> np.ndarray:
        """[G] bool: False where the harness failed."""
        return np.array([outcome.reward is not None for outcome in self.outcomes])

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The members as a grader sees them, in the order of the trajectories."""
        return tuple(
            Candidate(trajectory.id, trajectory.patch, outcome, trajectory.turns)
            for trajectory, outcome in zip(
                self.trajectories, self.outcomes, strict=True
            )
        )


# --- what the layers ask of each other ------------------------------------------------


@runtime_checkable
class Grader(Protocol):
    """Orders the passing members of a group, or raises `UnusableGrade`."""

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade: ...


class UnusableGrade(ValueError):
    """A grade that may not be used; `reason` is a short code that is counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class SandboxUnavailable(RuntimeError):
    """The harness failed, not the program: never a reward or an observation."""


@dataclass(frozen=True)
class SamplingParams:
    """How a completion is drawn: the full softmax at `temperature`, no top-p, no top-k.

    `temperature` 0 is greedy and allowed in evaluation only. A completion ends after a
    token in `stop_ids` (kept, it is an action) or after `max_new_tokens`.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Completion:
    """What an engine sampled in one turn: `ids` [n] and their `logprobs` [n] (natural
    log, of the distribution sampled from), whether a stop token ended it, and with
    which weights it was begun."""

    ids: np.ndarray
    logprobs: np.ndarray
    is_finished: bool
    weight_version: int


@runtime_checkable
class Conversation(Protocol):
    """One append-only context at an engine; used as a context manager, closed once."""

    async def complete(
        self, ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> Completion:
        """Sample what follows `ids`: the whole context, only ever appended to."""
        ...

    def __enter__(self) -> "Conversation": ...
    def __exit__(self, *exc_info: object) -> None: ...


@runtime_checkable
class Engine(Protocol):
    """Token in, token out: many conversations at once, one set of weights."""

    weight_version: int

    def conversation(self) -> Conversation: ...
    async def sync_weights(self, policy: object, version: int) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def close(self) -> None: ...
