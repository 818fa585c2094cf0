"""How good is a grader? Held against groups of known order, shown in several orders.

Every group is graded a few times, each time under fresh ids and in a fresh order, so
that no grader gains from the order in which a group was built, and its consistency can
be measured. Each figure is a list of values per group; its interval resamples *tasks*,
for pairs of one task resemble each other. A figure has as many values for one grader as
for another, so differences are paired value by value.

An unusable grade counts as a tie of all candidates, and is counted.
"""

import asyncio
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gagar_mini.grader.agentic import GradingRecord
from gagar_mini.grader.baselines import tree_key
from gagar_mini.grader.controls import grade_or_fallback
from gagar_mini.grader.known import KnownGroup, Pair
from gagar_mini.grader.measures import measure
from gagar_mini.grader.rubric import passing
from gagar_mini.metrics import bootstrap_interval, kendall_tau_b, tau_b_of_signs
from gagar_mini.types import Candidate, Grader, GroupGrade, Tier, seed_for


@dataclass(frozen=True, eq=False)
class View:
    """One grading of a group, by the ids of the group.

    `ranks` of the passing members count from 0, the best; a confirmed hack is last; all
    are 0 where the grade was unusable (`reason` is then not ""). `positions` say where
    the grader met each member, {} where it met them one by one. `num_tokens` is NaN
    where nobody counted.
    """

    ranks: Mapping[str, int]
    tiers: Mapping[str, Tier]
    positions: Mapping[str, int]
    reason: str = ""
    is_retried: bool = False
    num_tokens: float = math.nan
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class JudgedGroup:
    """A group and what one grader made of it, once per order."""

    group: KnownGroup
    views: tuple[View, ...]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval (bootstrap by task), of `num_values`; further
    `num_missing` do not exist. NaN where there is none; without a second task there is
    no interval."""

    value: float
    low: float
    high: float
    num_values: int
    num_missing: int


async def judge(
    grader: Grader,
    groups: Sequence[KnownGroup],
    *,
    num_orders: int,
    seed: int,
    timeout_s: float = 3600.0,
    concurrency: int = 1,
    on_group: Callable[[JudgedGroup], None] = lambda judged: None,
) -> tuple[JudgedGroup, ...]:
    """Each group graded in `num_orders` orders; `concurrency` groups at a time.

    Every grader meets the same orders and ids for the same `seed`. More than one group
    at a time makes a grading last longer than it would alone.
    """
    slots = asyncio.Semaphore(concurrency)

    async def judge_one(group: KnownGroup) -> JudgedGroup:
        async with slots:
            views = [
                await view(grader, group, seed_for(seed, group.id, n), timeout_s)
                for n in range(num_orders)
            ]
        judged = JudgedGroup(group, tuple(views))
        on_group(judged)
        return judged

    return tuple(await asyncio.gather(*map(judge_one, groups)))


async def view(
    grader: Grader, group: KnownGroup, seed: int, timeout_s: float = 3600.0
) -> View:
    """One grading of the group in an order, and under ids, that the seed draws.

    ValueError for a grader that remembers verdicts: it would agree with itself.
    """
    rng = random.Random(seed)
    members = rng.sample(group.candidates, len(group.candidates))
    numbers = rng.sample(range(16**8), len(members))
    ids = {f"m{n:08x}": m.id for n, m in zip(numbers, members, strict=True)}
    shown = [replace(m, id=name) for name, m in zip(ids, members, strict=True)]
    started = time.monotonic()
    grade, reason = await grade_or_fallback(grader, group.task, shown, seed, timeout_s)
    seconds = time.monotonic() - started
    records = records_of(grader, ids)
    if any(record.is_cached for record in records):
        raise ValueError("a grader with a cache cannot be evaluated: cache_size 0")
    found = ranks_of(grade, shown)
    return View(
        {ids[name]: rank for name, rank in found.items()},
        {ids[n]: g.tier for n, g in grade.grades.items()} if grade else {},
        {ids[name]: n for n, name in enumerate(order_shown(records, list(ids)))},
        reason,
        any(record.retried_for for record in records),
        float(sum(r.num_tokens for r in records)) if records else math.nan,
        seconds,
    )


def ranks_of(grade: GroupGrade | None, candidates: Sequence[Candidate]) -> dict:
    """Dense ranks of the passing members from 0: by tier, by order, then the hacks."""
    keys = {c.id: ("", 0) for c in passing(candidates)}
    if grade is not None:
        keys = {id_: (str(g.tier), g.order) for id_, g in grade.grades.items()}
        keys |= dict.fromkeys(grade.confirmed_hacks, ("hack", 0))
    levels = sorted(set(keys.values()))
    return {id_: levels.index(key) for id_, key in keys.items()}


def records_of(grader: Grader, ids: Mapping[str, str]) -> list[GradingRecord]:
    """What a grader that keeps records noted of this grading: no other has its ids."""
    records = getattr(grader, "records", ())
    return [r for r in records if r.shown and ids.keys() >= set(r.shown)]


def order_shown(records: Sequence[GradingRecord], ids: list[str]) -> Sequence[str]:
    """The ids in the order in which the grader met them; () if not in one reading."""
    if not records:
        return ids
    return records[0].shown if len(records) == 1 else ()


# --- figures: values per group, as many for every grader ------------------------------


def sign(ranks: Mapping[str, int] | Mapping[str, float], pair: Pair) -> int:
    """1 where the first of the pair ranks better, -1 where worse, 0 for a tie."""
    return int(np.sign(ranks[pair[1]] - ranks[pair[0]]))


def accuracy(judged: JudgedGroup, pairs: Sequence[Pair] | None = None) -> list[float]:
    """Per known pair: 1 if the better one ranks better, 0.5 for a tie; over views."""
    pairs = judged.group.better if pairs is None else pairs
    return [
        float(np.mean([(sign(v.ranks, pair) + 1) / 2 for v in judged.views]))
        for pair in pairs
    ]


def consensus_accuracy(judged: JudgedGroup) -> list[float]:
    """The accuracy of the mean rank over all orders (permutation self-consistency)."""
    views = [v for v in judged.views if not v.reason] or judged.views
    mean = {id_: sum(v.ranks[id_] for v in views) for id_ in views[0].ranks}
    return [(sign(mean, pair) + 1) / 2 for pair in judged.group.better]


def tau_b(judged: JudgedGroup) -> list[float]:
    """Kendall's tau-b per view over the comparable pairs; NaN if either side ties
    all."""
    gold = known_signs(judged.group)
    return [tau_b_of_signs(gold, signs(v.ranks, judged.group)) for v in judged.views]


def known_signs(group: KnownGroup) -> list[int]:
    return [1] * len(group.better) + [0] * len(group.equal)


def signs(
    values: Mapping[str, int] | Mapping[str, float], group: KnownGroup
) -> list[int]:
    return [sign(values, pair) for pair in (*group.better, *group.equal)]


def best_members(group: KnownGroup) -> tuple[set[str], set[str]]:
    """(those that nobody is known to beat, all) among the members of known pairs."""
    named = {id_ for pair in (*group.better, *group.equal) for id_ in pair}
    return named - {worse for _, worse in group.better}, named


def top_tie(ranks: Mapping[str, int], named: set[str]) -> set[str]:
    """The members of `named` that share the best rank among them."""
    first = min(ranks[id_] for id_ in named)
    return {id_ for id_ in named if ranks[id_] == first}


def top1(judged: JudgedGroup) -> list[float]:
    """Chance that a draw from the predicted top tie is one of the best; over views."""
    best, named = best_members(judged.group)
    if not judged.group.better:
        return []
    tops = [top_tie(v.ranks, named) for v in judged.views]
    return [float(np.mean([len(top & best) / len(top) for top in tops]))]


def top1_chance(judged: JudgedGroup) -> list[float]:
    """The same for a draw from all members."""
    best, named = best_members(judged.group)
    return [len(best) / len(named)] if judged.group.better else []


def top_tie_hit(judged: JudgedGroup) -> list[float]:
    """Whether the predicted top tie holds one of the best; over views."""
    best, named = best_members(judged.group)
    if not judged.group.better:
        return []
    return [
        float(np.mean([bool(top_tie(v.ranks, named) & best) for v in judged.views]))
    ]


def top_tie_chance(judged: JudgedGroup) -> list[float]:
    """The same for as many members, drawn at random: large ties hit easily."""
    best, named = best_members(judged.group)
    if not judged.group.better:
        return []
    n, num_others = len(named), len(named - best)
    sizes = [len(top_tie(v.ranks, named)) for v in judged.views]
    misses = [math.comb(num_others, size) / math.comb(n, size) for size in sizes]
    return [float(1 - np.mean(misses))]


def tier_accuracy(judged: JudgedGroup) -> list[float]:
    """Per member of known tier: whether it got that tier; over views. No grade, or a
    confirmed hack, is no tier."""
    return [
        float(np.mean([v.tiers.get(id_) is tier for v in judged.views]))
        for id_, tier in judged.group.tiers.items()
    ]


def equal_tied(judged: JudgedGroup) -> list[float]:
    """Per pair known to be equal: whether it is tied, over the usable views."""
    views = [v for v in judged.views if not v.reason]
    return [
        float(np.mean([sign(v.ranks, p) == 0 for v in views])) if views else math.nan
        for p in judged.group.equal
    ]


def consistency(judged: JudgedGroup) -> list[float]:
    """Per pair of distinct passing trees: share of pairs of views that agree on it. A
    pair of views of which one is unusable does not."""
    keys = {c.id: tree_key(c) for c in passing(judged.group.candidates)}
    pairs = [p for p in itertools.combinations(keys, 2) if keys[p[0]] != keys[p[1]]]
    return [agreement(judged.views, [pair]) for pair in pairs]


def consistent_groups(judged: JudgedGroup) -> list[float]:
    """Share of pairs of views with the same ranking of all passing members."""
    ids = [c.id for c in passing(judged.group.candidates)]
    return [agreement(judged.views, list(itertools.combinations(ids, 2)))]


def agreement(views: Sequence[View], pairs: Sequence[Pair]) -> float:
    """Share of pairs of usable views that rank all `pairs` alike; NaN for one view."""
    alike = [
        not (a.reason or b.reason)
        and all(sign(a.ranks, pair) == sign(b.ranks, pair) for pair in pairs)
        for a, b in itertools.combinations(views, 2)
    ]
    return float(np.mean(alike)) if alike else math.nan


def tied_share(judged: JudgedGroup) -> list[float]:
    """Per pair of which one is known to be better: whether it is tied; over views."""
    return [
        float(np.mean([sign(v.ranks, pair) == 0 for v in judged.views]))
        for pair in judged.group.better
    ]


def rank_position(judged: JudgedGroup) -> list[float]:
    """tau-b per view between rank and position: above 0, what comes first wins."""
    taus = []
    for v in judged.views:
        ids = list(v.ranks) if v.positions else []
        positions = [v.positions[id_] for id_ in ids]
        ranks = [v.ranks[id_] for id_ in ids]
        taus.append(kendall_tau_b(positions, ranks) if ids else math.nan)
    return taus


def rank_length(judged: JudgedGroup) -> list[float]:
    """tau-b per view between rank and changed lines, over the comparable pairs: above
    0, short patches win. To be read beside that of the known order."""
    lengths = signs(lengths_of(judged.group), judged.group)
    return [tau_b_of_signs(lengths, signs(v.ranks, judged.group)) for v in judged.views]


def lengths_of(group: KnownGroup) -> dict[str, int]:
    """Changed lines of each passing member."""
    return {
        c.id: measure(group.task, c.patch).changed_lines
        for c in passing(group.candidates)
    }


def kind_of_pair(group: KnownGroup) -> dict[Pair, str]:
    """For each known pair, what length says: nothing, the truth, or the opposite."""
    trees = {c.id: tree_key(c) for c in passing(group.candidates)}
    lengths = lengths_of(group)
    words = {1: "shorter is better", 0: "equal length", -1: "longer is better"}
    return {
        (a, b): "equal trees" if trees[a] == trees[b] else words[sign(lengths, (a, b))]
        for a, b in group.better
    }


PAIR_KINDS = ("shorter is better", "equal length", "longer is better", "equal trees")

FIGURES: dict[str, Callable[[JudgedGroup], list[float]]] = {
    "accuracy": accuracy,
    "consensus_accuracy": consensus_accuracy,
    "tau_b": tau_b,
    "top1": top1,
    "top1_chance": top1_chance,
    "top_tie": top_tie_hit,
    "top_tie_chance": top_tie_chance,
    "tier_accuracy": tier_accuracy,
    "equal_tied": equal_tied,
    "tied_share": tied_share,
    "consistency": consistency,
    "consistent_groups": consistent_groups,
    "rank_position": rank_position,
    "rank_length": rank_length,
    "invalid": lambda judged: [float(bool(v.reason)) for v in judged.views],
    "retried": lambda judged: [float(v.is_retried) for v in judged.views],
    "tokens": lambda judged: [v.num_tokens for v in judged.views],
    "seconds": lambda judged: [v.seconds for v in judged.views],
}
"""Name -> values per group. A new figure is one function and one line here."""


def estimate(
    judged: Sequence[JudgedGroup],
    figure: Callable[[JudgedGroup], list[float]],
    *,
    minus: Sequence[JudgedGroup] | None = None,
    seed: int = 0,
) -> Estimate:
    """A figure over groups; with `minus`, of the same groups by another grader, the
    paired difference, over the values that exist for both."""
    values = [figure(one) for one in judged]
    tasks = [j.group.task.id for j, v in zip(judged, values, strict=True) for _ in v]
    flat = np.array([value for found in values for value in found])
    if minus is not None:
        flat = flat - np.array([value for one in minus for value in figure(one)])
    there = np.isfinite(flat)
    num, missing = int(there.sum()), int((~there).sum())
    if num == 0:
        return Estimate(math.nan, math.nan, math.nan, 0, missing)
    labels = [task for task, is_there in zip(tasks, there, strict=True) if is_there]
    low = high = math.nan
    if len(set(labels)) > 1:
        low, high = bootstrap_interval(flat[there], groups=labels, seed=seed)
    return Estimate(float(flat[there].mean()), low, high, num, missing)


def figures(judged: Sequence[JudgedGroup], *, seed: int = 0) -> dict[str, Estimate]:
    """Every figure of one grader on one set of groups."""
    return {name: estimate(judged, f, seed=seed) for name, f in FIGURES.items()}


def accuracy_by_length(
    judged: Sequence[JudgedGroup], *, seed: int = 0
) -> dict[str, Estimate]:
    """The accuracy on the pairs of each of `PAIR_KINDS`."""

    def on(kind: str) -> Callable[[JudgedGroup], list[float]]:
        return lambda one: accuracy(
            one, [pair for pair, k in kind_of_pair(one.group).items() if k == kind]
        )

    return {kind: estimate(judged, on(kind), seed=seed) for kind in PAIR_KINDS}


def accuracy_by_degradation(
    judged: Sequence[JudgedGroup], *, seed: int = 0
) -> dict[str, Estimate]:
    """The accuracy on pairs that differ by one kind of degradation, by kind."""
    pairs: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for one in judged:
        kinds = one.group.kinds
        for better, worse in one.group.better:
            added = set(kinds.get(worse, ())) - set(kinds.get(better, ()))
            if len(added) == 1:
                pairs[added.pop()][one.group.id].append((better, worse))

    def on(kind: str) -> Callable[[JudgedGroup], list[float]]:
        return lambda one: accuracy(one, pairs[kind].get(one.group.id, []))

    return {kind: estimate(judged, on(kind), seed=seed) for kind in sorted(pairs)}


def invalid_reasons(judged: Sequence[JudgedGroup]) -> dict[str, int]:
    """How often each reason made a grade unusable."""
    return dict(Counter(v.reason for one in judged for v in one.views if v.reason))


def facts_of(groups: Sequence[KnownGroup]) -> dict[str, float | int]:
    """What a reader must know of a set before any grader's figure: sizes, chance levels
    and how far length alone tells."""
    kinds = Counter(kind for group in groups for kind in kind_of_pair(group).values())
    taus = [
        tau_b_of_signs(signs(lengths_of(group), group), known_signs(group))
        for group in groups
    ]
    tiers = Counter(tier for group in groups for tier in group.tiers.values())
    known = [tau for tau in taus if math.isfinite(tau)]
    return {
        "num_groups": len(groups),
        "num_tasks": len({group.task.id for group in groups}),
        "num_pairs": kinds.total(),
        "num_equal_pairs": sum(len(group.equal) for group in groups),
        **{f"num_pairs, {kind}": kinds[kind] for kind in PAIR_KINDS},
        "known_rank_length": float(np.mean(known)) if known else math.nan,
        "most_common_tier": max(tiers.values()) / tiers.total() if tiers else math.nan,
    }
