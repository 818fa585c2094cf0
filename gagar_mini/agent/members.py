"""Recorded trajectories, as the formats of other projects want to know them.

A run's records hold turns, patches and outcomes, and no tokens.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gagar_mini.records import Json, group_from_record, read_rollouts
from gagar_mini.types import Outcome, RolloutGroup, StopReason, Task, Trajectory, Turn
from gagar_mini.world.patches import PatchError, apply_patch, make_text_patch

AGENT = "gagar-mini"


@dataclass(frozen=True)
class Member:
    """One trajectory with what the other formats want to know about it."""

    task: Task
    trajectory: Trajectory
    outcome: Outcome
    group_id: str = ""


def members_of(group: RolloutGroup) -> Iterator[Member]:
    for trajectory, outcome in zip(group.trajectories, group.outcomes, strict=True):
        yield Member(group.task, trajectory, outcome, group.id)


def read_members(
    run_dir: Path, step: int, find_task: Callable[[str], Task]
) -> list[Member]:
    """What a run recorded at a step, each group's members in order, without tokens."""
    no_tokens: Mapping[str, np.ndarray] = defaultdict(lambda: np.zeros(0))
    return [
        member
        for record in read_rollouts(run_dir, step)
        for member in members_of(
            group_from_record(record, no_tokens, find_task(record["task_id"]))
        )
    ]


def portable_patch(task: Task, patch: bytes) -> str:
    """The patch as text; as binary changes, where a line of it is no UTF-8.

    A patch that is no UTF-8 and does not apply has no such form: its odd bytes become
    replacement characters, and it applies as little as before.
    """
    with contextlib.suppress(UnicodeDecodeError):
        return patch.decode()
    try:
        return make_text_patch(task.files, apply_patch(task.files, patch))
    except PatchError:
        return patch.decode(errors="replace")


def about(member: Member) -> dict[str, Json]:
    """What no other format has a field for: the verdict, and why the agent stopped."""
    outcome = member.outcome
    return {
        "stop_reason": member.trajectory.stop_reason.value,
        "status": outcome.status.value,
        "reward": outcome.reward,
        "reason": outcome.reason,
        "tests": dict(outcome.tests),
    }


def bare_trajectory(
    name: str, task_id: str, turns: list[Turn], patch: str, stop_reason: StopReason
) -> Trajectory:
    """A trajectory that was read: turns and patch are known, tokens are not."""
    return Trajectory(
        id=name,
        task_id=task_id,
        ids=np.zeros(0, np.int64),
        action_mask=np.zeros(0, bool),
        behaviour_logprobs=np.zeros(0, np.float32),
        turns=tuple(turns),
        patch=patch.encode(),
        stop_reason=stop_reason,
    )


@contextlib.contextmanager
def one_sentence(name: str) -> Iterator[None]:
    """Turns what a document of the wrong shape raises into one ValueError."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{name} lacks {error.args[0]!r}") from None
    except (AttributeError, TypeError, IndexError) as error:
        raise ValueError(f"{name} has another shape: {error}") from None
