"""Groups for testing graders: ladders in which length misleads.

Of the many ladder members of a task those few become a group whose pairs of known order
are balanced: in half of them the shorter patch is the better one (equal length counts
half), in each group as nearly as it goes and over all groups as nearly as possible.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gagar_mini.grader.clean_ways import CLEAN_WAYS
from gagar_mini.grader.findings import find_changes
from gagar_mini.grader.ladders import SCOPE_KINDS, T3_KINDS, is_worse
from gagar_mini.grader.measures import measure_tree
from gagar_mini.grader.rubric import score_measures, tier_of
from gagar_mini.learn.ladder_members import Member, draw_member, shows_its_kinds
from gagar_mini.types import Task, Tier
from gagar_mini.world.patches import tree_hash

NUM_TRIES = 2000
"""Random choices of members among which the best balanced one is taken."""

SIZES = (3, 3, 4, 4, 5, 6)
"""Passing members of a group, drawn from."""

Balance = tuple[int, int]
"""Pairs where the shorter patch is the better one less pairs where the longer one is:
by changed lines, by their characters."""


@dataclass(frozen=True, eq=False)
class Rung:
    """A member, and how long its patch is in changed lines and their characters."""

    member: Member
    num_lines: int
    num_chars: int


def draw_rungs(
    rng: random.Random, task: Task, kinds: Sequence[str], num_sets: int
) -> list[Rung]:
    """Distinct clean members, and spoiled ones with up to three of `kinds`, each kind
    drawn once for the task, so that sets of kinds are nested in text, too."""
    ways = ["gold", *CLEAN_WAYS]
    ways += ["+".join(pair) for pair in itertools.combinations(CLEAN_WAYS, 2)]
    seed = rng.random()
    drawn = [draw_member(rng, task, (), way) for way in ways]
    clean = [member for member in drawn if member and shows_its_kinds(task, member)]
    bases = ["gold", *(member.way for member in clean)]
    for chosen in draw_sets(rng, kinds, num_sets):
        for way in {"gold": 0, **dict.fromkeys(rng.sample(bases, min(len(bases), 3)))}:
            drawn.append(draw_member(rng, task, chosen, way, seed=seed))
    members = {tree_hash(m.files): m for m in drawn if m and is_ranked(task, m)}
    return [measured(task, member) for member in members.values()]


def is_ranked(task: Task, member: Member) -> bool:
    """Whether a member shows its kinds and is a T3 only if one of them can make it one.

    A long repair copied into a duplicated block grows into a rewrite, and then a subset
    of degradations would be worse than the whole.
    """
    is_t3 = tier_of(*score_measures(measure_tree(task, member.files))) is Tier.T3
    may_be_t3 = not {*T3_KINDS, *SCOPE_KINDS}.isdisjoint(member.kinds)
    return shows_its_kinds(task, member) and (may_be_t3 or not is_t3)


def draw_sets(
    rng: random.Random, kinds: Sequence[str], num_sets: int
) -> list[tuple[str, ...]]:
    """Sets of one to three kinds, closed downwards as far as `num_sets` allows: those
    of a few kinds together rather than many of any."""
    few = rng.sample(kinds, min(len(kinds), 4))
    sets = [s for n in (1, 2, 3) for s in itertools.combinations(few, n)]
    return rng.sample(sets, min(len(sets), num_sets))


def measured(task: Task, member: Member) -> Rung:
    lines = [
        source.lines[number - 1]
        for change in find_changes(task, member.files)
        for source, numbers in (
            (change.before, change.removed),
            (change.after, change.added),
        )
        for number in sorted(numbers)
    ]
    return Rung(member, len(lines), sum(map(len, lines)))


def known_pairs(rungs: Sequence[Rung]) -> dict[tuple[int, int], Balance]:
    """Places (better, worse) in `rungs` -> what the pair adds to the balance."""
    return {
        (i, j): (
            sign(worse.num_lines - better.num_lines),
            sign(worse.num_chars - better.num_chars),
        )
        for (i, better), (j, worse) in itertools.permutations(enumerate(rungs), 2)
        if is_worse(worse.member.kinds, better.member.kinds)
    }


def sign(number: int) -> int:
    return (number > 0) - (number < 0)


def choose_rungs(
    rng: random.Random, rungs: Sequence[Rung], owed: Balance
) -> tuple[list[Rung], Balance]:
    """Three to six rungs, clean and spoiled ones among them, that are balanced and
    bring the balance of all groups, `owed` so far, nearest to zero: by lines first,
    then by characters. With it the new balance; no rungs where there is no choice."""
    pairs, size = known_pairs(rungs), min(len(rungs), rng.choice(SIZES))
    best: tuple[list[int], Balance] = [], owed
    best_key = None
    for _ in range(NUM_TRIES if len(rungs) > 1 else 0):
        chosen = rng.sample(range(len(rungs)), size)
        num_clean = sum(not rungs[i].member.kinds for i in chosen)
        if not 1 <= num_clean < len(chosen):
            continue
        found = [pairs[p] for p in itertools.permutations(chosen, 2) if p in pairs]
        lines, chars = (sum(column) for column in zip(*found, strict=True))
        debt = owed[0] + lines, owed[1] + chars
        # a group may be out of balance where it pays for those before it
        key = (
            4 * abs(debt[0]) + 2 * abs(lines) + abs(debt[1]) + abs(chars),
            num_clean == 1,
            -len(found),
        )
        if best_key is None or key < best_key:
            best, best_key = (chosen, debt), key
    return [rungs[i] for i in best[0]], best[1]
