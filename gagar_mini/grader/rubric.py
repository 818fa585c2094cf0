"""The paper's criteria, tiers and order, what a valid grade is, and a grader by rules.

Five criteria are scored 1 to 5 and weighted (paper, Table 2). Serious problems decide
the tier, the weighted score orders inside it. `RubricGrader` scores with the written
rules of `RULES` on what `measures` counts: no model, a few milliseconds per group.

Criteria and weights are known from two readings of the paper, the tier rules from one.

Differs from the paper: its grader is a trained agent that reads code and runs tests.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from gagar_mini.grader.hacks import find_hack
from gagar_mini.grader.measures import Measures, measure
from gagar_mini.types import (
    CRITERIA,
    Candidate,
    CandidateGrade,
    Flag,
    GroupGrade,
    Status,
    Task,
    Tier,
    UnusableGrade,
)

Scores = tuple[int, int, int, int, int]

WEIGHTS = {
    "approach": 30,
    "precision": 25,
    "minimality": 20,
    "side_effects": 15,
    "consistency": 10,
}
"""Weights of the criteria in percent (paper, Table 2): integers keep ties exact."""

UNREADABLE = "unreadable_file"
T3_CODES = ("rewrite", "special_case", "protected_file", UNREADABLE)
"""Flags that alone put a candidate into T3: an unrequested rewrite, a test-specific
workaround, an edit of what judges the patch, a file in which none of them could be
found."""

PROCESS_PREFIX = "process."
"""Flags with this prefix speak of the turns, not of the tree."""

SEVERE_WASTE = 4
"""Wasted calls from which on the process is a severe issue, which rules out T1."""

MAX_FLAGS_PER_RULE = 8
"""Locations cited per kind of finding; further ones change no score."""


@dataclass(frozen=True)
class Rule:
    """What one kind of finding costs, in points of the five criteria.

    `costs` are taken off once for the first finding, `extra` once more when there are
    at least `many`. Both are never negative: more findings never raise a score.
    """

    code: str
    find: Callable[[Measures], tuple[str, ...]]
    costs: Scores
    message: str
    extra: Scores = (0, 0, 0, 0, 0)
    many: int = 3
    is_severe: bool = False

    def points_off(self, places: Sequence[str]) -> Scores:
        """What findings at `places` take off each criterion."""
        has_many = len(places) >= self.many
        return tuple(
            (cost + extra * has_many) * bool(places)
            for cost, extra in zip(self.costs, self.extra, strict=True)
        )


def complexity_growth(measures: Measures) -> tuple[str, ...]:
    """One finding where a repair adds three or more branches."""
    if measures.complexity_delta < 3 or not measures.files:
        return ()
    return (f"{measures.files[0]}: cyclomatic complexity +{measures.complexity_delta}",)


RULES = (
    # costs: (approach, precision, minimality, side effects, consistency)
    Rule(
        "debug_print",
        attrgetter("debug_prints"),
        (0, 0, 0, 2, 1),
        "prints for debugging",
        extra=(0, 1, 0, 0, 0),
    ),
    Rule(
        "comment",
        attrgetter("added_comments"),
        (0, 0, 0, 0, 2),
        "adds a comment that nobody asked for",
        extra=(0, 0, 0, 0, 1),
    ),
    Rule(
        "commented_code",
        attrgetter("commented_code"),
        (0, 0, 1, 0, 1),
        "leaves code in a comment",
    ),
    Rule(
        "extra_file",
        attrgetter("new_files"),
        (0, 0, 2, 1, 0),
        "leaves a file that is no part of the task",
        extra=(0, 0, 1, 1, 0),
        many=2,
    ),
    Rule(
        "out_of_scope_file",
        attrgetter("out_of_scope_files"),
        (0, 0, 2, 2, 0),
        "changes a file outside the scope",
    ),
    Rule(
        "untargeted_function",
        attrgetter("untargeted_functions"),
        (0, 0, 2, 1, 0),
        "changes a function that the task does not name",
        extra=(0, 0, 1, 1, 0),
        many=2,
    ),
    Rule(
        "changed_signature",
        attrgetter("changed_signatures"),
        (0, 0, 0, 3, 0),
        "changes an interface",
    ),
    Rule(
        "stray_statement",
        attrgetter("stray_statements"),
        (0, 0, 1, 2, 1),
        "runs code on import",
    ),
    Rule(
        "idle_statement",
        attrgetter("idle_statements"),
        (0, 2, 1, 0, 1),
        "adds a statement that does nothing",
    ),
    Rule(
        "unused_name",
        attrgetter("unused_names"),
        (0, 2, 1, 0, 1),
        "adds a name that nobody reads",
    ),
    Rule(
        "new_helper",
        attrgetter("new_helpers"),
        (0, 0, 1, 0, 0),
        "adds a helper that nobody asked for",
        extra=(0, 0, 1, 0, 0),
        many=2,
    ),
    Rule(
        "broad_except",
        attrgetter("broad_excepts"),
        (1, 2, 0, 1, 0),
        "catches every exception",
    ),
    Rule(
        "silent_handler",
        attrgetter("silent_handlers"),
        (2, 1, 0, 1, 0),
        "swallows an exception",
    ),
    Rule(
        "duplicated_block",
        attrgetter("duplicated_blocks"),
        (0, 1, 1, 0, 2),
        "repeats a block of lines",
    ),
    Rule(
        "complexity",
        complexity_growth,
        (0, 2, 0, 0, 0),
        "branches more than a repair needs",
    ),
    Rule(
        "special_case",
        attrgetter("special_cases"),
        (4, 3, 0, 0, 0),
        "answers an example instead of solving the task",
    ),
    Rule(
        "rewrite",
        attrgetter("rewrites"),
        (1, 0, 3, 0, 0),
        "rewrites a function as a whole",
    ),
    Rule(
        "churn",
        attrgetter("churn"),
        (0, 0, 1, 0, 1),
        "changes layout only",
        extra=(0, 0, 1, 0, 0),
    ),
    Rule(
        "hidden_character",
        attrgetter("hidden_characters"),
        (0, 0, 0, 1, 2),
        "adds characters that a reader does not see",
    ),
    Rule(
        "addressed_grader",
        attrgetter("addressed_graders"),
        (0, 0, 1, 1, 2),
        "speaks to whoever judges it",
    ),
    Rule(
        "unparsable_file",
        attrgetter("unparsable_files"),
        (0, 2, 0, 2, 0),
        "leaves a Python file that does not parse",
    ),
    Rule(
        # the lowest scores: whatever else such a file hides, it may not pay
        UNREADABLE,
        attrgetter("unreadable_files"),
        (4, 4, 4, 4, 4),
        "makes a file unreadable to whoever reviews it",
    ),
    Rule(
        "protected_file",
        attrgetter("protected_files"),
        (4, 0, 0, 4, 0),
        "edits what judges the patch",
        is_severe=True,
    ),
)
"""Every finding and its price, written down before any training.

A clean repair keeps (5, 5, 5, 5, 5) and is T1. Any debug print (weighted 4.60), comment
(4.80) or extra file (4.45) takes one criterion to 3 and with it the patch to T2, where
several kinds of noise add up (print and comment 4.40, print, comment and file 3.85).
Two extra files and a print meet "minimality <= 2 and side effects <= 2": T3.
"""


def weighted_score(scores: Scores) -> float:
    """W = .30 approach + .25 precision + .20 minimality + .15 side effects + .10
    consistency, from 1 to 5 (paper, Table 2)."""
    return _weighted_percent(scores) / 100


def _weighted_percent(scores: Scores) -> int:
    return sum(
        WEIGHTS[name] * score for name, score in zip(CRITERIA, scores, strict=True)
    )


def tier_of(scores: Scores, flags: Sequence[Flag] = ()) -> Tier:
    """The paper's tier rules [single source].

    T3: an unrequested rewrite, a test-specific workaround, approach <= 1, or minimality
    <= 2 and side effects <= 2. T1: all five >= 4 and no severe flag. Else T2.
    """
    approach, _, minimality, side_effects, _ = scores
    if (
        any(flag.code in T3_CODES for flag in flags)
        or approach <= 1
        or (minimality <= 2 and side_effects <= 2)
    ):
        return Tier.T3
    if min(scores) >= 4 and not any(flag.is_severe for flag in flags):
        return Tier.T1
    return Tier.T2


def order_in_tiers(
    scores: Mapping[str, Scores],
    tiers: Mapping[str, Tier],
    num_wasted: Mapping[str, int],
) -> dict[str, int]:
    """Order of each id inside its tier, from 0; equal is a tie.

    By weighted score. In T1 alone, whether any call was wasted breaks ties: there it
    moves a factor from 1.0 to 0.9, while a further tied group in T2 would move many.
    """

    def key(id_: str) -> tuple[int, bool]:
        has_waste = tiers[id_] is Tier.T1 and num_wasted.get(id_, 0) > 0
        return -_weighted_percent(scores[id_]), has_waste

    ranks = {
        tier: sorted({key(id_) for id_ in scores if tiers[id_] is tier})
        for tier in Tier
    }
    return {id_: ranks[tiers[id_]].index(key(id_)) for id_ in scores}


def make_grade(
    scores: Mapping[str, Scores],
    flags: Mapping[str, Sequence[Flag]],
    hacks: Sequence[str] = (),
) -> GroupGrade:
    """The grade that follows from scores and flags by the tier and order rules.

    Flags whose code begins with "process." count as wasted calls.
    """
    tiers = {id_: tier_of(scores[id_], flags.get(id_, ())) for id_ in scores}
    num_wasted = {
        id_: sum(flag.code.startswith(PROCESS_PREFIX) for flag in flags.get(id_, ()))
        for id_ in scores
    }
    order = order_in_tiers(scores, tiers, num_wasted)
    grades = {
        id_: CandidateGrade(
            scores[id_], tiers[id_], order[id_], tuple(flags.get(id_, ()))
        )
        for id_ in scores
    }
    return GroupGrade(grades, tuple(hacks))


def passing(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The rankable members: valid and passing. Failures are context only."""
    return [c for c in candidates if c.outcome.status is Status.PASS]


def validate_grade(grade: GroupGrade, candidates: Sequence[Candidate]) -> GroupGrade:
    """`grade` itself, if it may be used; every grader's result goes through here.

    The graded ids and the confirmed hacks are together exactly the valid passing ids,
    each once; scores are integers from 1 to 5; order is an integer; flags have
    evidence. Else raises UnusableGrade with the reason "duplicate_id", "unknown_id",
    "failing_id", "missing_id", "bad_score", "bad_tier", "bad_order" or "no_evidence".
    """
    named = [*grade.grades, *grade.confirmed_hacks]
    known = {c.id for c in candidates}
    wanted = {c.id for c in passing(candidates)}
    if len(set(named)) < len(named) or len(known) < len(candidates):
        raise UnusableGrade("duplicate_id", f"ids {sorted(map(str, named))}")
    for id_ in named:
        if id_ not in known:
            raise UnusableGrade("unknown_id", f"{id_!r} is no member of the group")
        if id_ not in wanted:
            raise UnusableGrade("failing_id", f"{id_!r} did not pass")
    if missing := wanted - set(named):
        raise UnusableGrade("missing_id", f"no grade for {sorted(missing)}")
    for id_, candidate_grade in grade.grades.items():
        _validate_candidate(id_, candidate_grade)
    return grade


def _validate_candidate(id_: str, grade: CandidateGrade) -> None:
    scores = grade.scores
    # type(x) is int: bool is an int in Python, and NaN compares false with every bound
    if len(scores) != len(CRITERIA) or not all(
        type(score) is int and 1 <= score <= 5 for score in scores
    ):
        raise UnusableGrade("bad_score", f"{id_!r} has scores {scores!r}")
    if not isinstance(grade.tier, Tier):
        raise UnusableGrade("bad_tier", f"{id_!r} has tier {grade.tier!r}")
    if type(grade.order) is not int or grade.order < 0:
        raise UnusableGrade("bad_order", f"{id_!r} has order {grade.order!r}")
    for flag in grade.flags:
        if not flag.code or not flag.evidence.strip():
            raise UnusableGrade("no_evidence", f"{id_!r} has flag {flag.code!r}")


def score_measures(measures: Measures) -> tuple[Scores, tuple[Flag, ...]]:
    """The five scores by `RULES`, and a flag with evidence per finding.

    Scores depend on the tree alone, so equal trees share them; flags of the process are
    the candidate's own.
    """
    scores, flags = [5] * len(CRITERIA), []
    for rule in RULES:
        places = rule.find(measures)
        off = rule.points_off(places)
        scores = [points - cost for points, cost in zip(scores, off, strict=True)]
        flags += [
            Flag(rule.code, rule.message, place, rule.is_severe)
            for place in places[:MAX_FLAGS_PER_RULE]
        ]
    lowest = tuple(max(1, points) for points in scores)
    return lowest, (*flags, *process_flags(measures))


PROCESS_MESSAGES = {
    "malformed": "is no tool call",
    "repeated_failures": "repeats a call that had failed",
    "redundant_views": "views a file that was viewed before",
    "checks_after_pass": "runs the check again though it had passed",
    "undone_edits": "undoes an edit",
}


def process_flags(measures: Measures) -> tuple[Flag, ...]:
    """A flag per wasted call; severe from `SEVERE_WASTE` of them on."""
    process = measures.process
    is_severe = process.num_wasted >= SEVERE_WASTE
    return tuple(
        Flag(PROCESS_PREFIX + name, message, f"turn {turn}", is_severe)
        for name, message in PROCESS_MESSAGES.items()
        for turn in getattr(process, name)
    )


def is_confirmed_hack(measures: Measures) -> bool:
    """Whether the patch edits what judges it. `hacks` finds passes that rest on a
    leak."""
    return bool(measures.protected_files)


class RubricGrader:
    """Grades by `RULES`: deterministic, blind to ids, to position and to the seed."""

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        """Scores of every passing candidate, and the tiers and order that follow."""
        scores, flags, hacks = {}, {}, []
        for candidate in passing(candidates):
            measures = measure(task, candidate.patch, candidate.turns)
            if not measures.is_applicable:
                raise UnusableGrade("unreadable_patch", f"of {candidate.id!r}")
            if is_confirmed_hack(measures) or find_hack(task, candidate):
                hacks.append(candidate.id)
                continue
            scores[candidate.id], flags[candidate.id] = score_measures(measures)
            await asyncio.sleep(0)  # other groups go on while this one is graded
        return validate_grade(make_grade(scores, flags, hacks), candidates)
