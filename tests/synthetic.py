"""Made-up groups, for tests of what comes after the rollouts."""

from collections.abc import Sequence

import numpy as np

from gagar_mini.types import (
    CandidateGrade,
    GroupGrade,
    Outcome,
    RolloutGroup,
    Status,
    StopReason,
    Task,
    Tier,
    ToolCall,
    Trajectory,
    Turn,
)

PASS, FAIL, INFRA = Status.PASS, Status.FAIL, Status.INFRA


def make_task(task_id: str = "synthetic-0") -> Task:
    """A task with nothing to do: its outcome is made up by the test."""
    return Task(
        id=task_id,
        family="synthetic",
        split="train",
        statement="say it",
        files={"a.py": b"x = 1\n"},
        visible_check="check.py",
        targets=(),
        allowed_paths=("a.py",),
        hidden_tests=(),
        gold_patch=b"",
    )


def make_trajectory(
    trajectory_id: str,
    task: Task,
    ids: np.ndarray,
    num_prompt: int,
    logprobs: np.ndarray,
    *,
    patch: bytes = b"",
    weight_version: int = 0,
) -> Trajectory:
    """A trajectory of one turn: everything after the prompt was sampled."""
    action_mask = np.arange(len(ids)) >= num_prompt
    behaviour_logprobs = np.zeros(len(ids), dtype=np.float32)
    behaviour_logprobs[num_prompt:] = logprobs
    turn = Turn(ToolCall("submit", {}), "", len(ids) - num_prompt, weight_version)
    return Trajectory(
        id=trajectory_id,
        task_id=task.id,
        ids=ids,
        action_mask=action_mask,
        behaviour_logprobs=behaviour_logprobs,
        turns=(turn,),
        patch=patch,
        stop_reason=StopReason.SUBMITTED,
        weight_version=weight_version,
    )


def make_group(
    statuses: Sequence[Status],
    *,
    group_id: str = "g",
    lengths: Sequence[int] | None = None,
    vocab_size: int = 32,
    grade: GroupGrade | None = None,
    seed: int = 0,
) -> RolloutGroup:
    """Random tokens, two of them prompt, with the outcomes that the test asks for."""
    rng = np.random.default_rng(seed)
    task = make_task(f"task-of-{group_id}")
    lengths = lengths or [int(n) for n in rng.integers(4, 12, len(statuses))]
    trajectories = tuple(
        make_trajectory(
            f"{group_id}/{index}",
            task,
            rng.integers(0, vocab_size, length),
            2,
            -rng.random(length - 2),
            patch=b"caf\xe9 %d" % index,
        )
        for index, length in enumerate(lengths)
    )
    outcomes = tuple(Outcome(status) for status in statuses)
    return RolloutGroup(group_id, task, trajectories, outcomes, grade)


def make_grade(tiers: dict[str, str]) -> GroupGrade:
    """Tiers by candidate id, in the order from best to worst."""
    grades = {
        name: CandidateGrade((4, 4, 4, 4, 4), Tier(tier), order)
        for order, (name, tier) in enumerate(tiers.items())
    }
    return GroupGrade(grades)
