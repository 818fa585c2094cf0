"""What an evaluation says of a policy: success, quality, cost, and habits.

Everything is computed from rollout groups after the fact; the grader plays no part, so
a policy is measured by hidden tests and by the patch alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gagar_mini.credit import is_gradable, is_informative
from gagar_mini.grader.measures import is_clean, measure
from gagar_mini.learn.demonstrations import bugs_of
from gagar_mini.metrics import bootstrap_interval
from gagar_mini.types import RolloutGroup, Status, StopReason, Task, Trajectory


@dataclass(frozen=True)
class Evaluation:
    """Figures over all valid trajectories; `interval` bounds are 95 %, by task.

    Entropy is the mean of -log mu over sampled tokens, an unbiased estimate in nats.
    `clean_share`, `noise_lines` are over passes (NaN without one).
    """

    num_tasks: int
    num_trajectories: int
    pass_rate: float
    pass_interval: tuple[float, float]
    clean_share: float
    noise_lines: float
    mixed_share: float
    gradable_share: float
    turns: float
    action_tokens: float
    total_tokens: float
    entropy: float
    truncated_share: float
    malformed_rate: float


def summarise(groups: Sequence[RolloutGroup]) -> Evaluation:
    """The figures of `groups`. Raises ValueError where no trajectory is valid."""
    members = [
        (group.task, trajectory, outcome)
        for group in groups
        for trajectory, outcome in zip(group.trajectories, group.outcomes, strict=True)
        if outcome.status is not Status.INFRA
    ]
    if not members:
        raise ValueError("no valid trajectory to summarise")
    trajectories = [trajectory for _, trajectory, _ in members]
    passed = np.array([outcome.status is Status.PASS for _, _, outcome in members])
    measured = [
        measure(task, trajectory.patch, trajectory.turns)
        for (task, trajectory, _), has_passed in zip(members, passed, strict=True)
        if has_passed
    ]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    logprobs = np.concatenate(
        [t.behaviour_logprobs[t.action_mask] for t in trajectories]
    )
    return Evaluation(
        num_tasks=len(groups),
        num_trajectories=len(members),
        pass_rate=float(passed.mean()),
        pass_interval=bootstrap_interval(
            passed.astype(float), groups=[task.id for task, _, _ in members], seed=0
        ),
        clean_share=mean([is_clean(m) for m in measured]),
        noise_lines=mean([m.noise_lines for m in measured]),
        mixed_share=mean([bool(is_informative(g.rewards, g.valid)) for g in groups]),
        gradable_share=mean([bool(is_gradable(g.rewards, g.valid)) for g in groups]),
        turns=mean([len(t.turns) for t in trajectories]),
        action_tokens=mean([t.num_action_tokens for t in trajectories]),
        total_tokens=mean([len(t.ids) for t in trajectories]),
        entropy=float(-logprobs.mean()),
        truncated_share=mean(
            [t.stop_reason is not StopReason.SUBMITTED for t in trajectories]
        ),
        malformed_rate=mean([turn.action is None for turn in turns]),
    )


def mean(values: Sequence[bool | int | float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def habits_of(task: Task, trajectory: Trajectory) -> dict[str, bool]:
    """Which of the demonstrator's habits a trajectory shows (demonstrations.Habits)."""
    faulty = {bug.path for bug in bugs_of(task)}
    calls = [turn.action for turn in trajectory.turns if turn.action is not None]
    edits = [call for call in calls if call.name == "edit"]
    first_edit = next((i for i, c in enumerate(calls) if c.name == "edit"), len(calls))
    views = [(i, c.arguments["path"]) for i, c in enumerate(calls) if c.name == "view"]
    created = [c.arguments["path"] for c in calls if c.name == "create"]
    return {
        "other view": any(i < first_edit and path not in faulty for i, path in views),
        "repro script": any(path.endswith(".py") for path in created),
        "debug print": any("print(" in call.arguments["new"] for call in edits),
        "comment": any(
            call.arguments["new"].count("#") > call.arguments["old"].count("#")
            for call in edits
        ),
        "review": any(i > first_edit and path in faulty for i, path in views),
        "check run": any(call.name == "run_check" for call in calls),
        "notes": any(path.endswith(".md") for path in created),
    }


@dataclass(frozen=True)
class HabitRow:
    """How a habit goes along with passing, over all valid trajectories."""

    habit: str
    share: float
    pass_rate_with: float
    pass_rate_without: float
    difference_interval: tuple[float, float]


def habits_table(groups: Sequence[RolloutGroup]) -> list[HabitRow]:
    """P(pass | habit) against P(pass | no habit), per habit, with a 95 % interval of
    the difference (bootstrap by task): without a difference, binary reward has nothing
    to amplify."""
    shown, passed, task_ids = [], [], []
    for group in groups:
        for trajectory, outcome in zip(group.trajectories, group.outcomes, strict=True):
            if outcome.status is not Status.INFRA:
                shown.append(habits_of(group.task, trajectory))
                passed.append(outcome.status is Status.PASS)
                task_ids.append(group.task.id)
    has_passed = np.array(passed, dtype=float)
    rows = []
    for habit in shown[0]:
        has_habit = np.array([habits[habit] for habits in shown])
        with_it, without = has_passed[has_habit], has_passed[~has_habit]
        rows.append(
            HabitRow(
                habit,
                share=float(has_habit.mean()),
                pass_rate_with=mean(with_it),
                pass_rate_without=mean(without),
                difference_interval=difference_interval(
                    has_passed, has_habit, task_ids
                ),
            )
        )
    return rows


def difference_interval(
    passed: np.ndarray,
    has_habit: np.ndarray,
    task_ids: Sequence[str],
    draws: int = 1000,
) -> tuple[float, float]:
    """95 % interval of mean(passed | habit) - mean(passed | no habit), tasks
    resampled."""
    rng = np.random.default_rng(0)
    _, task_index = np.unique(task_ids, return_inverse=True)
    num_tasks = task_index.max() + 1

    def per_task(values: np.ndarray) -> np.ndarray:
        return np.bincount(task_index, weights=values, minlength=num_tasks)

    sums = np.stack(
        [
            per_task(passed * has_habit),
            per_task(has_habit),
            per_task(passed * ~has_habit),
            per_task(~has_habit),
        ]
    )
    counts = rng.multinomial(num_tasks, np.full(num_tasks, 1 / num_tasks), size=draws)
    drawn = counts @ sums.T  # [draws, 4]
    with np.errstate(invalid="ignore", divide="ignore"):
        differences = drawn[:, 0] / drawn[:, 1] - drawn[:, 2] / drawn[:, 3]
    low, high = np.nanpercentile(differences, [2.5, 97.5])
    return float(low), float(high)
