"""One rollout group: G trajectories of the same task, each with its outcome."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gagar_mini.agent.dialect import Dialect
from gagar_mini.agent.loop import run_agent
from gagar_mini.config import RolloutConfig
from gagar_mini.types import (
    Engine,
    Outcome,
    RolloutGroup,
    SandboxUnavailable,
    Status,
    StopReason,
    Task,
    Trajectory,
    seed_for,
)
from gagar_mini.world.sandbox.base import Sandbox
from gagar_mini.world.verifier import verify_or_infra


@dataclass(frozen=True)
class Harness:
    """What a rollout needs: who samples, how tokens are written, where code runs."""

    engine: Engine
    dialect: Dialect
    sandbox: Sandbox


async def rollout_group(
    harness: Harness,
    task: Task,
    limits: RolloutConfig,
    *,
    group_id: str,
    seed: int,
    group_size: int | None = None,
) -> RolloutGroup:
    """Sample and verify a group: `group_size` trajectories (the config's by default).

    Members differ in their seeds alone. All of them are graded on the same hidden
    inputs, drawn afresh for the group, so that luck with the inputs is no difference
    between them. A trajectory whose harness failed is sampled once more, then masked
    (`Status.INFRA`).
    """
    size = limits.group_size if group_size is None else group_size

    async def member(index: int) -> tuple[Trajectory, Outcome]:
        trajectory = await _sample(
            harness,
            task,
            limits,
            f"{group_id}/{index}",
            seed_for(seed, "member", index),
        )
        if trajectory.stop_reason is StopReason.INFRA:
            return trajectory, Outcome(Status.INFRA, reason="the sandbox failed twice")
        outcome = await asyncio.to_thread(
            verify_or_infra,
            task,
            trajectory.patch,
            harness.sandbox,
            seed=seed_for(seed, "hidden"),
        )
        return trajectory, outcome

    members = await asyncio.gather(*(member(index) for index in range(size)))
    trajectories, outcomes = zip(*members, strict=True)
    return RolloutGroup(group_id, task, tuple(trajectories), tuple(outcomes))


async def _sample(
    harness: Harness, task: Task, limits: RolloutConfig, trajectory_id: str, seed: int
) -> Trajectory:
    for attempt in range(2):
        try:
            return await run_agent(
                task,
                harness.engine,
                harness.dialect,
                harness.sandbox,
                limits,
                trajectory_id=trajectory_id,
                seed=seed_for(seed, "attempt", attempt),
            )
        except SandboxUnavailable:
            continue
    empty = np.zeros(0)
    return Trajectory(
        id=trajectory_id,
        task_id=task.id,
        ids=empty.astype(np.int64),
        action_mask=empty.astype(bool),
        behaviour_logprobs=empty.astype(np.float32),
        turns=(),
        patch=b"",
        stop_reason=StopReason.INFRA,
        weight_version=harness.engine.weight_version,
    )


async def evaluate(
    harness: Harness,
    tasks: Sequence[Task],
    limits: RolloutConfig,
    *,
    samples_per_task: int,
    seed: int,
    tasks_at_once: int = 16,
    on_group: Callable[[RolloutGroup], None] = lambda group: None,
) -> list[RolloutGroup]:
    """Roll out every task, `tasks_at_once` at a time; nothing is filtered or
    updated."""
    groups: list[RolloutGroup] = []
    limits = replace(limits, group_size=samples_per_task)
    for start in range(0, len(tasks), tasks_at_once):
        batch = await asyncio.gather(
            *(
                rollout_group(
                    harness,
                    task,
                    limits,
                    group_id=f"eval/{task.id}",
                    seed=seed_for(seed, "eval", task.id),
                )
                for task in tasks[start : start + tasks_at_once]
            )
        )
        for group in batch:
            on_group(group)
        groups += batch
    return groups
