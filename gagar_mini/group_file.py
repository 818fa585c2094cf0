"""One group of candidates from a JSON file: verified, graded, its credit shared.

The form for a group that comes from elsewhere, with or without a grade of its own:

    {"task_id": "...",
     "candidates": [{"id": "a", "patch": "diff --git ...", "passed": true}, ...],
     "grade": {"a": {"tier": "T1", "order": 0}, ...}}

`passed` may be null: hidden tests decide. `grade` is optional and names every passing
id once. Every slip in the file is a ValueError in one sentence.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gagar_mini.config import RunConfig
from gagar_mini.credit import (
    CREDIT_RULES,
    group_advantages,
    is_gradable,
    quality_factors,
    revoke_confirmed_hacks,
)
from gagar_mini.types import (
    Candidate,
    CandidateGrade,
    Flag,
    GroupGrade,
    Outcome,
    Status,
    Task,
    Tier,
    seed_for,
)
from gagar_mini.view.tables import text_table
from gagar_mini.world.patches import PatchError, apply_patch
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.tasks import find_task
from gagar_mini.world.verifier import verify

UNSCORED = (3, 3, 3, 3, 3)
"""Scores of a grade that gives tiers only; tiers and order alone make the factor."""


@dataclass(frozen=True)
class MemberRow:
    """One member: outcome, grade, and its advantage before and after redistribution."""

    id: str
    status: str
    tier: str | None
    order: int | None
    factor: float
    advantage: float
    redistributed: float
    flags: tuple[str, ...]


@dataclass(frozen=True)
class GradedGroup:
    """The group as the trainer would see it; `note` says why nothing moved, if so."""

    task_id: str
    rule: str
    members: tuple[MemberRow, ...]
    note: str


def grade_file(
    path: Path, config: RunConfig, *, rule: str, seed: int, sandbox: str
) -> GradedGroup:
    """Read, verify where asked, grade with the config's grader, share the credit."""
    if rule not in CREDIT_RULES:
        choices = ", ".join(CREDIT_RULES)
        raise ValueError(f"there is no credit rule {rule!r}: use one of {choices}")
    task, candidates, given = read_group(path, seed=seed, sandbox=sandbox)
    grade, note = given, "" if given else "no grader was asked for"
    rewards = [candidate.outcome.reward or 0.0 for candidate in candidates]
    valid = [candidate.outcome.reward is not None for candidate in candidates]
    if config.grader.name != "none":
        if given:
            raise ValueError(
                f"{path} holds a grade and --grader {config.grader.name} makes another:"
                " give --grader none, or take the grade out of the file"
            )
        note = "not gradable: that takes two passes and one failure"
        if is_gradable(rewards, valid):
            grade, note = ask_grader(config, task, candidates, seed), ""
    return share_credit(task.id, candidates, grade, config, rule=rule, note=note)


def ask_grader(
    config: RunConfig, task: Task, candidates: Sequence[Candidate], seed: int
) -> GroupGrade:
    from gagar_mini.grader.controls import make_grader

    grader = make_grader(config.grader)
    assert grader is not None
    return asyncio.run(grader.grade(task, candidates, seed_for(seed, "grade")))


def share_credit(
    task_id: str,
    candidates: Sequence[Candidate],
    grade: GroupGrade | None,
    config: RunConfig,
    *,
    rule: str,
    note: str,
) -> GradedGroup:
    """Hacks revoked, then the group's mean, then the factors, then the rule."""
    grades = grade.grades if grade else {}
    hacks = grade.confirmed_hacks if grade else ()
    ids = [candidate.id for candidate in candidates]
    rewards = torch.tensor([c.outcome.reward or 0.0 for c in candidates]).double()
    valid = torch.tensor([c.outcome.reward is not None for c in candidates])
    rewards = revoke_confirmed_hacks(rewards, [i in hacks for i in ids])
    advantages = group_advantages(rewards, valid=valid)
    factors = quality_factors(
        [grades[i].tier.value if i in grades else None for i in ids],
        [grades[i].order if i in grades else 0 for i in ids],
    )
    shared = advantages
    if grade is not None:
        shared = CREDIT_RULES[rule](
            advantages,
            rewards > 0,
            factors,
            valid=valid,
            max_scale=config.credit.max_scale,
        )
    rows = [
        MemberRow(
            id=candidate.id,
            status="hack" if candidate.id in hacks else candidate.outcome.status.value,
            tier=grades[candidate.id].tier.value if candidate.id in grades else None,
            order=grades[candidate.id].order if candidate.id in grades else None,
            factor=float(factors[index]),
            advantage=float(advantages[index]),
            redistributed=float(shared[index]),
            flags=tuple(flag_text(f) for f in flags_of(grades, candidate.id)),
        )
        for index, candidate in enumerate(candidates)
    ]
    return GradedGroup(task_id, rule, tuple(rows), note)


def flags_of(
    grades: Mapping[str, CandidateGrade], candidate_id: str
) -> tuple[Flag, ...]:
    return grades[candidate_id].flags if candidate_id in grades else ()


def flag_text(flag: Flag) -> str:
    return f"{flag.code} at {flag.evidence}: {flag.message}"


def table(graded: GradedGroup) -> str:
    """Members, the best passes first, and the sums that a rule may conserve."""
    ordered = sorted(
        graded.members,
        key=lambda m: (m.status != "pass", m.tier or "", m.order or 0, m.id),
    )
    rows = [
        {
            "id": member.id,
            "outcome": member.status,
            "tier": member.tier,
            "order": member.order,
            "factor": member.factor,
            "advantage": member.advantage,
            f"after {graded.rule}": member.redistributed,
        }
        for member in ordered
    ]
    passes = [member for member in ordered if member.status == "pass"]
    before = sum(member.advantage for member in passes)
    after = sum(member.redistributed for member in passes)
    lines = [f"task {graded.task_id}", text_table(rows)]
    lines.append(f"sum over passes: {before:.4f} before, {after:.4f} after")
    total = sum(member.redistributed for member in ordered)
    lines.append(f"sum over the group after: {total:.4f}")
    if graded.note:
        lines.append(f"nothing moved: {graded.note}")
    for member in ordered:
        lines += [f"  {member.id}: {flag}" for flag in member.flags]
    return "\n".join(lines)


def read_group(
    path: Path, *, seed: int, sandbox: str
) -> tuple[Task, list[Candidate], GroupGrade | None]:
    """The task, its candidates with outcomes, and the grade if the file has one."""
    try:
        document = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(document, dict) or not {"task_id", "candidates"} <= {*document}:
        raise ValueError(f'{path} must be an object with "task_id" and "candidates"')
    task = find_task(str(document["task_id"]))
    members = read_members(path, document["candidates"])
    for member in members:
        apply_or_explain(
            task,
            member["patch"].encode("utf-8", "surrogateescape"),
            f"candidate {member['id']!r}",
        )
    candidates = verify_members(task, members, seed=seed, sandbox=sandbox)
    given = document.get("grade")
    passing = [c.id for c in candidates if c.outcome.status is Status.PASS]
    return task, candidates, None if given is None else read_grade(given, passing)


def read_members(path: Path, listed: object) -> list[dict]:
    """The candidates as they stand in the file, checked one by one."""
    if not isinstance(listed, list) or len(listed) < 2:
        raise ValueError(
            f'{path}: "candidates" must list at least 2 candidates, since an advantage '
            "compares a candidate with its group"
        )
    seen = set()
    for number, member in enumerate(listed):
        if not isinstance(member, dict) or not {"id", "patch", "passed"} <= {*member}:
            raise ValueError(
                f'{path}: candidate number {number} needs "id", "patch" and "passed"'
            )
        name = member["id"]
        if not isinstance(name, str) or name in seen:
            raise ValueError(
                f"{path}: candidate id {name!r} is used twice or is no text"
            )
        seen.add(name)
        if not isinstance(member["patch"], str):
            raise ValueError(f"{path}: the patch of candidate {name!r} must be text")
        if member["passed"] not in (True, False, None):
            raise ValueError(
                f'{path}: "passed" of candidate {name!r} is {member["passed"]!r}: '
                "it must be true, false or null"
            )
    return listed


def verify_members(
    task: Task, members: Sequence[Mapping], *, seed: int, sandbox: str
) -> list[Candidate]:
    """Outcomes as told by the file; hidden tests run where it says null."""
    with contextlib.ExitStack() as stack:
        box = None
        if any(member["passed"] is None for member in members):
            box = stack.enter_context(contextlib.closing(open_sandbox(sandbox)))
        candidates = []
        for member in members:
            patch = member["patch"].encode("utf-8", "surrogateescape")
            if member["passed"] is None:
                outcome = verify(task, patch, box, seed=seed_for(seed, "hidden"))
            else:
                outcome = Outcome(Status.PASS if member["passed"] else Status.FAIL)
            candidates.append(Candidate(member["id"], patch, outcome))
        return candidates


def apply_or_explain(task: Task, patch: bytes, name: str) -> None:
    """Raise a ValueError that names the patch where it does not apply to the task."""
    try:
        apply_patch(task.files, patch)
    except PatchError as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{name} does not apply to task {task.id}: {why}") from None


def read_grade(given: object, passing: Sequence[str]) -> GroupGrade:
    """A grade from the file: every passing id exactly once, and nobody else."""
    if not isinstance(given, dict):
        raise ValueError('"grade" must map each passing id to its tier and order')
    missing, unknown = {*passing} - {*given}, {*given} - {*passing}
    if missing or unknown:
        told = [f"lacks {sorted(missing)}"] * bool(missing)
        told += [f"names {sorted(unknown)}, who did not pass"] * bool(unknown)
        raise ValueError(
            f"the grade {' and '.join(told)}: it must name every passing candidate once"
        )
    return GroupGrade({name: read_one(name, given[name]) for name in passing})


def read_one(name: str, given: object) -> CandidateGrade:
    tiers = [tier.value for tier in Tier]
    if not isinstance(given, dict) or given.get("tier") not in tiers:
        raise ValueError(f'the grade of {name!r} needs a "tier" out of {tiers}')
    order = given.get("order", 0)
    if type(order) is not int:
        raise ValueError(f'the "order" of {name!r} is {order!r}: it must be an integer')
    return CandidateGrade(UNSCORED, Tier(given["tier"]), order)
