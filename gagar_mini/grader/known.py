"""Groups whose order is known without asking a grader: what a grader is held against.

Two sources. *Ladders* are built: the gold patch, other clean ways to write it, and
spoiled versions of both, so that what is worse than what follows from construction.
*Rollouts* are sampled from a policy and ordered by the oracle, which knows the gold
patch.
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gagar_mini.grader.controls import OracleGrader
from gagar_mini.types import Candidate, Status, Task, Tier

Pair = tuple[str, str]


@dataclass(frozen=True, eq=False)
class KnownGroup:
    """One group with what is known about its passing members.

    `better` holds pairs of ids, the better one first. Pairs named in neither `better`
    nor `equal` are not comparable, and nobody is asked about them. `tiers` may be
    partial. `kinds` are the degradations of a member, () for a clean one.
    """

    id: str
    task: Task
    candidates: tuple[Candidate, ...]
    better: tuple[Pair, ...]
    equal: tuple[Pair, ...] = ()
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def known_by_oracle(
    id_: str, task: Task, candidates: Sequence[Candidate]
) -> KnownGroup:
    """The group with the order and the tiers of `OracleGrader`. Blocking."""
    grade = asyncio.run(OracleGrader().grade(task, candidates, seed=0))
    keys = {c: (found.tier, found.order) for c, found in grade.grades.items()}
    better, equal = [], []
    for a, b in itertools.combinations(sorted(keys), 2):
        if keys[a] == keys[b]:
            equal.append((a, b))
        else:
            better.append((a, b) if keys[a] < keys[b] else (b, a))
    return KnownGroup(
        id_,
        task,
        tuple(candidates),
        tuple(better),
        tuple(equal),
        {c: found.tier for c, found in grade.grades.items()},
    )


def is_rankable(candidates: Sequence[Candidate]) -> bool:
    """Whether there is something to rank: at least two distinct passing trees and one
    failure. Differs from `credit.is_gradable`, which does not look at trees. Where
    nobody hashed the tree, the patch stands for it."""
    statuses = [c.outcome.status for c in candidates]
    passing = [c for c in candidates if c.outcome.status is Status.PASS]
    trees = {c.outcome.tree_hash or c.patch for c in passing}
    has_failure = any(s in (Status.FAIL, Status.TAMPERED) for s in statuses)
    return has_failure and len(trees) > 1
