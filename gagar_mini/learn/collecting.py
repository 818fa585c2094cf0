"""Dynamic sampling: roll out rounds of tasks until enough groups can teach something.

Groups run concurrently and each is graded as soon as it is verified, so that grading
one overlaps the rollouts of the others. Each rank of a run samples its share of a round
and hears of the rest, so that all decide the same on the same groups. A group is kept
when the *raw* outcomes of its valid members differ (DAPO, arXiv 2503.14476). Rounds are
bounded: a step trains on what it has. What is left over goes first into the next step,
with the log-probs that it was sampled with; what is left over twice is dropped: no
group is staler than one step.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gagar_mini.config import RunConfig
from gagar_mini.credit import is_gradable, is_informative
from gagar_mini.grader.agentic import GradingRecord
from gagar_mini.grader.background import GraderCosts, ranks_trees, take_costs
from gagar_mini.grader.controls import grade_or_fallback
from gagar_mini.grader.known import is_rankable
from gagar_mini.learn.parallel import ALONE, Ranks, interleave
from gagar_mini.records import group_arrays, group_from_record, group_record
from gagar_mini.types import (
    Grader,
    RolloutGroup,
    Task,
    seed_for,
)

Span = tuple[float, float]
"""When something began and when it ended, in seconds of `time.monotonic`."""

SampleGroup = Callable[[Task, str, int], Awaitable[RolloutGroup]]
"""(task, group id, seed) -> a group that is sampled and verified."""

MIN_VALID = 2
"""A group with fewer valid members compares nothing and is dropped."""


@dataclass
class TaskSampler:
    """An endless walk through the tasks, every pass in a new seeded order.

    Its whole state is how many tasks it has drawn.
    """

    tasks: Sequence[Task]
    seed: int
    num_drawn: int = 0

    def draw(self, count: int) -> list[tuple[int, Task]]:
        """The next tasks, each with its number in the walk."""
        numbers = range(self.num_drawn, self.num_drawn + count)
        self.num_drawn += count
        return [(number, self._at(number)) for number in numbers]

    def _at(self, number: int) -> Task:
        epoch, index = divmod(number, len(self.tasks))
        rng = np.random.default_rng(seed_for(self.seed, "epoch", epoch))
        return self.tasks[rng.permutation(len(self.tasks))[index]]


@dataclass
class Collection:
    """What one step sampled, and what became of each group.

    `use` maps a group id to "trained", "surplus" (kept for the next step), "stale"
    (left over twice), "uninformative" or "infra". `sampled` are this step's groups;
    `carried` came from the step before. `rollout_s` is wall time; within it lie
    `sample_spans` (sampling and hidden tests) and `grade_spans`, one for each group,
    which overlap. `num_not_rankable` groups had nothing for the grader to rank.
    `grade_cpu_s` are processor seconds of grading, None where nobody counts.
    """

    carried: list[RolloutGroup] = field(default_factory=list)
    sampled: list[RolloutGroup] = field(default_factory=list)
    use: dict[str, str] = field(default_factory=dict)
    num_rounds: int = 0
    rollout_s: float = 0.0
    sample_spans: list[Span] = field(default_factory=list)
    grade_spans: list[Span] = field(default_factory=list)
    num_not_rankable: int = 0
    gradings: tuple[GradingRecord, ...] = ()
    grade_cpu_s: float | None = None


async def collect(
    config: RunConfig,
    step: int,
    *,
    surplus: Sequence[RolloutGroup],
    sampler: TaskSampler,
    sample_group: SampleGroup,
    grader: Grader | None,
    ranks: Ranks = ALONE,
) -> tuple[list[RolloutGroup], list[RolloutGroup], Collection]:
    """(groups to train on, new surplus, what happened), the same on every rank. At
    least one round is sampled, so that every step measures the policy."""
    wanted = config.sampling.groups_per_step
    collection = Collection(carried=list(surplus))
    ready = list(surplus)
    while collection.num_rounds < config.sampling.max_rounds:
        started = time.monotonic()
        part = Collection()
        drawn = sampler.draw(config.sampling.tasks_per_round)
        part.sampled = await gather_or_cancel(
            [
                _produce(config, step, number, task, sample_group, grader, part)
                for number, task in ranks.own(drawn)
            ]
        )
        parts = exchange(part, started, sampler.tasks, ranks)
        groups = interleave([part.sampled for part in parts])
        collection.rollout_s += time.monotonic() - started
        collection.num_rounds += 1
        collection.sampled += groups
        for part in parts:
            collection.sample_spans += part.sample_spans
            collection.grade_spans += part.grade_spans
            collection.num_not_rankable += part.num_not_rankable
        collection.use |= {group.id: _unused_because(group) for group in groups}
        ready += [group for group in groups if not collection.use[group.id]]
        if len(ready) >= wanted:
            break
    _add_costs(collection, ranks.gather(take_costs(grader)))
    chosen, rest = ready[:wanted], ready[wanted:]
    carried_ids = {group.id for group in collection.carried}
    fresh = [group for group in rest if group.id not in carried_ids]
    collection.use |= {group.id: "trained" for group in chosen}
    collection.use |= {group.id: "stale" for group in rest}
    collection.use |= {group.id: "surplus" for group in fresh}
    return chosen, fresh, collection


def exchange(
    part: Collection, started: float, tasks: Sequence[Task], ranks: Ranks
) -> list[Collection]:
    """What each rank did in a round that began at `started` on this rank's clock.

    Groups travel as records, without their tasks, which every rank has; spans travel
    from the beginning of the round, as another machine has another clock.
    """
    if ranks.size == 1:
        return [part]

    def shifted(spans: Sequence[Span], by: float) -> list[Span]:
        return [(begin + by, end + by) for begin, end in spans]

    packed = [(group_record(group), group_arrays(group)) for group in part.sampled]
    told = replace(
        part,
        sampled=[],
        sample_spans=shifted(part.sample_spans, -started),
        grade_spans=shifted(part.grade_spans, -started),
    )
    by_id = {task.id: task for task in tasks}
    return [
        replace(
            heard,
            sampled=[
                group_from_record(record, arrays, by_id[record["task_id"]])
                for record, arrays in packed
            ],
            sample_spans=shifted(heard.sample_spans, started),
            grade_spans=shifted(heard.grade_spans, started),
        )
        for heard, packed in ranks.gather((told, packed))
    ]


async def gather_or_cancel(coroutines: Sequence[Coroutine]) -> list[RolloutGroup]:
    """All results in order. The first failure cancels the rest and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _produce(
    config: RunConfig,
    step: int,
    number: int,
    task: Task,
    sample_group: SampleGroup,
    grader: Grader | None,
    collection: Collection,
) -> RolloutGroup:
    """Sample, verify, and grade where a grade can move credit."""
    seed = seed_for(config.seed, "rollout", step, number, task.id)
    started = time.monotonic()
    group = await sample_group(task, f"s{step:05d}-t{number:06d}", seed)
    collection.sample_spans.append((started, time.monotonic()))
    if grader is None or not is_gradable(group.rewards, group.valid):
        return group
    if ranks_trees(grader) and not is_rankable(group.candidates):
        collection.num_not_rankable += 1
        return group
    started = time.monotonic()
    grade, reason = await grade_or_fallback(
        grader,
        task,
        group.candidates,
        seed_for(config.seed, "grade", step, number, task.id),
        config.grader.timeout_s,
    )
    collection.grade_spans.append((started, time.monotonic()))
    if reason == "one_tree":  # the grader saw more than the hashes: nothing to rank
        collection.num_not_rankable += 1
        reason = ""
    return replace(group, grade=grade, fallback_reason=reason)


def _add_costs(collection: Collection, costs: Sequence[GraderCosts]) -> None:
    collection.gradings = tuple(record for cost in costs for record in cost.records)
    seconds = [cost.cpu_s for cost in costs if cost.cpu_s is not None]
    collection.grade_cpu_s = sum(seconds) if seconds else None


def _unused_because(group: RolloutGroup) -> str:
    """Why a group cannot train, "" when it can."""
    if group.valid.sum() < MIN_VALID:
        return "infra"
    return "" if is_informative(group.rewards, group.valid) else "uninformative"
