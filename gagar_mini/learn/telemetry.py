"""What a step reports: the metrics with their meanings, and the rows of its groups.

Means are sums over the whole step divided by counts over the whole step; a mean over
nothing is None, never 0. The pass rate is over *all* rollouts, not over the informative
groups that dynamic sampling keeps, whose pass rate hardly moves.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from gagar_mini.credit import is_gradable, is_informative
from gagar_mini.grader.known import is_rankable
from gagar_mini.grader.measures import is_clean, measure
from gagar_mini.learn.collecting import Collection, Span
from gagar_mini.learn.sharing import GroupCredit
from gagar_mini.records import Json, group_record
from gagar_mini.types import RolloutGroup, Status, StopReason, Tier, Trajectory

METRICS = {
    "reward/pass_rate": "share of passes over all valid rollouts of the step",
    "reward/std_within_groups": "mean standard deviation of rewards inside a group",
    "groups/sampled": "groups rolled out in this step",
    "groups/informative": "of these, with a pass and a failure",
    "groups/gradable": "of these, with two passes or more and a failure",
    "groups/rankable": "of these, with two distinct passing trees or more",
    "groups/graded": "gradable groups with a grade that was used",
    "groups/trained": "groups in the update, carried ones included",
    "groups/carried": "groups kept from the step before",
    "groups/surplus": "groups kept for the next step",
    "groups/stale": "groups left over twice and dropped",
    "groups/dropped_infra": "groups with fewer than two valid trajectories, dropped",
    "rollout/turns": "turns of a trajectory, mean",
    "rollout/action_tokens": "sampled tokens of a trajectory, mean",
    "rollout/total_tokens": "tokens of a trajectory with prompt and observations, mean",
    "rollout/truncated_share": "share of trajectories that ended without a submission",
    "rollout/malformed_rate": "share of turns that were no tool call",
    "rollout/tampered_share": "share of valid trajectories that attacked the tests",
    "rollout/infra_share": "share of trajectories that the harness broke (masked)",
    "policy/loss": "loss, mean over the updates; near 0 on-policy, so see grad_norm",
    "policy/grad_norm": "norm of the gradient before clipping, mean over the updates",
    "policy/entropy": "entropy of the policy at its actions, nats",
    "policy/clip_fraction": "share of action tokens without gradient (clip or band)",
    "policy/sampler_drift": "mean |log pi - log mu| before any update, on-policy, nats",
    "policy/approx_kl": "mean (r - 1 - log r), an estimate of KL(mu || pi), nats",
    "policy/mean_ratio": "importance ratio pi / mu, mean over action tokens",
    "policy/mean_abs_advantage": "|advantage|, mean over action tokens",
    "policy/lr": "learning rate of the last update",
    "policy/updates": "optimiser updates of this step",
    "credit/scale_mean": "uncapped credit scale lambda, mean over graded groups",
    "credit/cap_hit_rate": "share of graded groups whose lambda exceeds the cap",
    "credit/mean_factor": "quality factor, mean over graded passes",
    "credit/share_T1": "share of graded passes in tier 1",
    "credit/share_T2": "share of graded passes in tier 2",
    "credit/share_T3": "share of graded passes in tier 3",
    "credit/share_hack": "share of graded passes that are confirmed hacks",
    "credit/sum_before": "sum of the advantages of passes, mean per group, before",
    "credit/sum_after": "the same after the credit rule",
    "credit/token_mass_before": "sum over passes of action tokens * advantage, before",
    "credit/token_mass_after": "the same after the rule: not conserved by Eq. 2",
    "credit/factor_length_correlation": "of factor and length over graded passes",
    "grader/fallback_rate": "share of gradings whose grade could not be used",
    "grader/not_rankable": "gradable groups of one passing tree, which nobody ranked",
    "grader/retries": "gradings by an agent that took its second try",
    "grader/tokens": "tokens that the grading agent read and wrote",
    "patch/clean_share": "share of passes whose patch has no noise",
    "patch/noise_lines": "lines that the repair did not need, mean over passes",
    "time/rollout_s": "wall time of sampling, hidden tests and grading",
    "time/verify_s": "seconds of hidden tests, summed over trajectories",
    "time/grade_s": "seconds of grading, summed over groups; overlaps rollouts",
    "time/grade_wall_s": "seconds in which some group was being graded",
    "time/grade_wait_s": "of these, seconds in which no rollout was under way",
    "time/grade_wall_share": "share of the step's wall time with a grading under way",
    "time/grade_cpu_s": "processor seconds of grading, programs that it ran left out",
    "time/grade_cpu_share": "the same as a share of time/cpu_s",
    "time/credit_s": "wall time of turning outcomes and grades into advantages",
    "time/update_s": "wall time of the update",
    "time/sync_s": "wall time of handing the weights to the engine",
    "time/step_s": "wall time of the step",
    "time/cpu_s": "processor seconds of the step, the sandbox included",
    "memory/peak_mb": "most memory that the process has held so far",
}
"""Every metric and its meaning; `grader/fallback/REASON` counts groups by reason."""

Metrics = Mapping[str, int | float | None]


@dataclass(frozen=True, eq=False)
class StepRecord:
    """What one step did. `shares` belong to `groups`, those that trained; `update` and
    `times` are the "policy/" and "time/" metrics."""

    step: int
    collection: Collection
    groups: Sequence[RolloutGroup]
    shares: Sequence[GroupCredit]
    update: Metrics
    times: Metrics = field(default_factory=dict)


def step_metrics(record: StepRecord) -> Metrics:
    """All metrics of a step in the order of `METRICS`; None where there is nothing."""
    found = {
        **reward_metrics(record.collection.sampled),
        **group_metrics(record.collection),
        **rollout_metrics(record.collection.sampled),
        **credit_metrics(record.groups, record.shares),
        **grader_metrics(record.collection),
        **grading_times(record.collection, record.times),
        **patch_metrics(record.collection.sampled),
        **record.update,
        **record.times,
        "memory/peak_mb": peak_memory_mb(),
    }
    return dict.fromkeys(METRICS) | found


def reward_metrics(sampled: Sequence[RolloutGroup]) -> Metrics:
    spreads = [
        group.rewards[group.valid].std() for group in sampled if any(group.valid)
    ]
    return {
        "reward/pass_rate": mean([r for g in sampled for r in g.rewards[g.valid]]),
        "reward/std_within_groups": mean(spreads),
    }


def group_metrics(collection: Collection) -> Metrics:
    sampled, uses = collection.sampled, Counter(collection.use.values())
    return {
        "groups/sampled": len(sampled),
        "groups/informative": sum(is_informative(g.rewards, g.valid) for g in sampled),
        "groups/gradable": sum(is_gradable(g.rewards, g.valid) for g in sampled),
        "groups/rankable": sum(
            is_gradable(g.rewards, g.valid) and is_rankable(g.candidates)
            for g in sampled
        ),
        "groups/graded": sum(group.grade is not None for group in sampled),
        "groups/trained": uses["trained"],
        "groups/carried": len(collection.carried),
        "groups/surplus": uses["surplus"],
        "groups/stale": uses["stale"],
        "groups/dropped_infra": uses["infra"],
        "time/verify_s": sum(o.duration_s for g in sampled for o in g.outcomes),
    }


def rollout_metrics(sampled: Sequence[RolloutGroup]) -> Metrics:
    outcomes = [outcome for group in sampled for outcome in group.outcomes]
    trajectories = [
        trajectory
        for group in sampled
        for trajectory, is_valid in zip(group.trajectories, group.valid, strict=True)
        if is_valid
    ]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    valid = [outcome for outcome in outcomes if outcome.status is not Status.INFRA]
    return {
        "rollout/turns": mean([len(t.turns) for t in trajectories]),
        "rollout/action_tokens": mean([t.num_action_tokens for t in trajectories]),
        "rollout/total_tokens": mean([len(t.ids) for t in trajectories]),
        "rollout/truncated_share": mean(
            [t.stop_reason is not StopReason.SUBMITTED for t in trajectories]
        ),
        "rollout/malformed_rate": mean([turn.action is None for turn in turns]),
        "rollout/tampered_share": mean([o.status is Status.TAMPERED for o in valid]),
        "rollout/infra_share": mean([o.status is Status.INFRA for o in outcomes]),
    }


def credit_metrics(
    groups: Sequence[RolloutGroup], shares: Sequence[GroupCredit]
) -> Metrics:
    graded = [
        (g, c) for g, c in zip(groups, shares, strict=True) if g.grade is not None
    ]
    factors = [f for _, c in graded for f in c.factors[c.passed].tolist()]
    lengths = [
        n for g, c in graded for n in action_lengths(g)[c.passed.numpy()].tolist()
    ]
    return {
        "credit/scale_mean": mean([c.scale for _, c in graded]),
        "credit/cap_hit_rate": mean([c.is_cap_hit for _, c in graded]),
        "credit/mean_factor": mean(factors),
        **_tier_shares([g for g, _ in graded]),
        "credit/sum_before": mean([float(c.before[c.passed].sum()) for c in shares]),
        "credit/sum_after": mean([float(c.after[c.passed].sum()) for c in shares]),
        "credit/token_mass_before": mean(
            [_token_mass(g, c, c.before) for g, c in zip(groups, shares, strict=True)]
        ),
        "credit/token_mass_after": mean(
            [_token_mass(g, c, c.after) for g, c in zip(groups, shares, strict=True)]
        ),
        "credit/factor_length_correlation": correlation(factors, lengths),
    }


def grader_metrics(collection: Collection) -> Metrics:
    sampled, gradings = collection.sampled, collection.gradings
    reasons = Counter(group.fallback_reason for group in sampled)
    del reasons[""]
    num_asked = reasons.total() + sum(group.grade is not None for group in sampled)
    rate = reasons.total() / num_asked if num_asked else None
    counts = {f"grader/fallback/{reason}": n for reason, n in sorted(reasons.items())}
    return {
        "grader/fallback_rate": rate,
        **counts,
        "grader/not_rankable": collection.num_not_rankable,
        "grader/retries": sum(record.retried_for != "" for record in gradings),
        "grader/tokens": sum(record.num_tokens for record in gradings),
    }


def grading_times(collection: Collection, times: Metrics) -> Metrics:
    """What grading cost, in seconds and as shares of the step."""
    graded, sampled = collection.grade_spans, collection.sample_spans
    wall_s, cpu_s = covered_s(graded), collection.grade_cpu_s
    return {
        "time/grade_s": sum(end - begin for begin, end in graded),
        "time/grade_wall_s": wall_s,
        "time/grade_wait_s": covered_s([*graded, *sampled]) - covered_s(sampled),
        "time/grade_wall_share": share_of(wall_s, times.get("time/step_s")),
        "time/grade_cpu_s": cpu_s,
        "time/grade_cpu_share": share_of(cpu_s, times.get("time/cpu_s")),
    }


def covered_s(spans: Sequence[Span]) -> float:
    """Seconds that lie in at least one of the spans."""
    total, reached = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def share_of(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def patch_metrics(sampled: Sequence[RolloutGroup]) -> Metrics:
    found = [
        measure(group.task, trajectory.patch, trajectory.turns)
        for group in sampled
        for trajectory in passing(group)
    ]
    return {
        "patch/clean_share": mean([is_clean(measures) for measures in found]),
        "patch/noise_lines": mean([measures.noise_lines for measures in found]),
    }


def group_rows(record: StepRecord) -> list[dict[str, Json]]:
    """A row for every group of the step, sampled now or carried over, whatever its use.

    What `records.group_record` gives, and how the group was used; groups that trained
    have their credit, one entry per trajectory.
    """
    shares = {
        group.id: credit
        for group, credit in zip(record.groups, record.shares, strict=True)
    }
    return [
        {
            **group_record(group),
            "use": record.collection.use[group.id],
            "credit": _credit_row(shares.get(group.id)),
        }
        for group in (*record.collection.carried, *record.collection.sampled)
    ]


def passing(group: RolloutGroup) -> list[Trajectory]:
    return [
        trajectory
        for trajectory, outcome in zip(group.trajectories, group.outcomes, strict=True)
        if outcome.status is Status.PASS
    ]


def action_lengths(group: RolloutGroup) -> np.ndarray:
    """[G] sampled tokens of each trajectory."""
    return np.array([t.num_action_tokens for t in group.trajectories])


def mean(values: Sequence[int | float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def correlation(
    first: Sequence[int | float], second: Sequence[int | float]
) -> float | None:
    """Pearson's, None where either does not vary."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def peak_memory_mb() -> float | None:
    """Peak resident memory of this process in MiB; None where it is not known."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _tier_shares(graded: Sequence[RolloutGroup]) -> Metrics:
    tiers = [entry.tier for group in graded for entry in group.grade.grades.values()]
    num_hacks = sum(len(group.grade.confirmed_hacks) for group in graded)
    total = len(tiers) + num_hacks
    counts = {f"share_{tier.value}": tiers.count(tier) for tier in Tier}
    counts["share_hack"] = num_hacks
    return {
        f"credit/{name}": count / total if total else None
        for name, count in counts.items()
    }


def _token_mass(group: RolloutGroup, credit: GroupCredit, advantages: Tensor) -> float:
    passed = credit.passed.numpy()
    return float((action_lengths(group) * advantages.numpy())[passed].sum())


def _credit_row(credit: GroupCredit | None) -> dict[str, Json] | None:
    if credit is None:
        return None
    return {
        "advantages_before": credit.before.tolist(),
        "advantages_after": credit.after.tolist(),
        "factors": credit.factors.tolist(),
        "passed": credit.passed.tolist(),
        "scale": credit.scale,
        "is_cap_hit": credit.is_cap_hit,
    }
