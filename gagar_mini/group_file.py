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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gagar_mini.config import CreditConfig, GraderConfig
from gagar_mini.credit import is_gradable
from gagar_mini.grader.controls import grade_or_fallback, make_grader
from gagar_mini.learn.sharing import share_credit
from gagar_mini.records import parse_json
from gagar_mini.types import (
    CandidateGrade,
    Flag,
    GroupGrade,
    Outcome,
    RolloutGroup,
    Status,
    StopReason,
    Task,
    Tier,
    Trajectory,
    seed_for,
)
from gagar_mini.view.tables import text_table
from gagar_mini.world.patches import PatchError, apply_patch
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.tasks import find_task
from gagar_mini.world.verifier import verify

MAX_FILE_BYTES = 64 << 20
MAX_ID_CHARS = 200
MAX_ORDER = 1_000_000
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
    credit_scale: float
    is_cap_hit: bool
    members: tuple[MemberRow, ...]
    note: str


def grade_file(
    path: Path, grader: GraderConfig, credit: CreditConfig, *, seed: int, sandbox: str
) -> GradedGroup:
    """Read, verify where asked, grade, and share the credit as the trainer does."""
    group = read_group(path, seed=seed, sandbox=sandbox)
    judge = make_grader(grader)
    if judge is None:
        note = "" if group.grade else "no grader was asked for"
        return graded_group(group, credit, note)
    if group.grade is not None:
        raise ValueError(
            f"{path} holds a grade and --grader {grader.name} makes another: give "
            "--grader none, or take the grade out of the file"
        )
    if not is_gradable(group.rewards, group.valid):
        note = "not gradable, which takes two passes and one failure"
        return graded_group(group, credit, note)
    grade, why = asyncio.run(
        grade_or_fallback(
            judge,
            group.task,
            group.candidates,
            seed_for(seed, "grade"),
            grader.timeout_s,
        )
    )
    note = why and f"the grade is unusable: {why}"
    return graded_group(replace(group, grade=grade), credit, note)


def graded_group(group: RolloutGroup, credit: CreditConfig, note: str) -> GradedGroup:
    shared = share_credit(group, credit)
    grades = group.grade.grades if group.grade else {}
    hacks = group.grade.confirmed_hacks if group.grade else ()
    rows = []
    for index, candidate in enumerate(group.candidates):
        name, grade = candidate.id, grades.get(candidate.id)
        rows.append(
            MemberRow(
                id=name,
                status="hack" if name in hacks else candidate.outcome.status.value,
                tier=grade.tier.value if grade else None,
                order=grade.order if grade else None,
                factor=float(shared.factors[index]),
                advantage=float(shared.before[index]),
                redistributed=float(shared.after[index]),
                flags=tuple(flag_text(flag) for flag in grade.flags) if grade else (),
            )
        )
    return GradedGroup(
        group.task.id, credit.rule, shared.scale, shared.is_cap_hit, tuple(rows), note
    )


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
    lines.append(
        f"credit scale {graded.credit_scale:.4f}"
        + (", above the cap" if graded.is_cap_hit else "")
    )
    if graded.note:
        lines.append(f"nothing moved: {graded.note}")
    for member in ordered:
        lines += [f"  {member.id}: {flag}" for flag in member.flags]
    return "\n".join(lines)


def read_group(path: Path, *, seed: int, sandbox: str) -> RolloutGroup:
    """The group of a file, verified where it says null, graded if it says so."""
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    document = parse_json(content, str(path))
    if not isinstance(document, dict) or not {"task_id", "candidates"} <= {*document}:
        raise ValueError(f'{path} must be an object with "task_id" and "candidates"')
    task = find_task(str(document["task_id"]))
    members = read_members(path, document["candidates"])
    patches = [bytes_of(member["patch"], member["id"]) for member in members]
    for member, patch in zip(members, patches, strict=True):
        apply_or_explain(task, patch, f"the patch of candidate {member['id']!r}")
    told = [member["passed"] for member in members]
    outcomes = outcomes_of(task, patches, told, seed=seed, sandbox=sandbox)
    trajectories = tuple(
        bare_trajectory(member["id"], task, patch)
        for member, patch in zip(members, patches, strict=True)
    )
    group = RolloutGroup(path.name, task, trajectories, tuple(outcomes))
    if document.get("grade") is None:
        return group
    passing = [c.id for c in group.candidates if c.outcome.status is Status.PASS]
    return replace(group, grade=read_grade(document["grade"], passing))


def bytes_of(patch: str, name: str) -> bytes:
    """The bytes of a patch; one that is no UTF-8 stands in the text as a surrogate."""
    try:
        return patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the patch of candidate {name!r} is no text: character {error.start} is a "
            "lone surrogate"
        ) from None


def bare_trajectory(name: str, task: Task, patch: bytes) -> Trajectory:
    """A patch of which nobody knows how it came about: no token, no turn."""
    return Trajectory(
        id=name,
        task_id=task.id,
        ids=np.zeros(0, np.int64),
        action_mask=np.zeros(0, bool),
        behaviour_logprobs=np.zeros(0, np.float32),
        turns=(),
        patch=patch,
        stop_reason=StopReason.SUBMITTED,
    )


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
        check_id(path, name)
        if name in seen:
            raise ValueError(f"{path}: candidate id {name!r} is used twice")
        seen.add(name)
        if not isinstance(member["patch"], str):
            raise ValueError(f"{path}: the patch of candidate {name!r} must be text")
        if not isinstance(member["passed"], bool | None):
            raise ValueError(
                f'{path}: "passed" of candidate {name!r} is {member["passed"]!r}: '
                "it must be true, false or null"
            )
    return listed


def check_id(path: Path, name: object) -> None:
    """Raise ValueError for an id that could not stand in a table or on a terminal."""
    is_plain = isinstance(name, str) and name.isprintable() and name == name.strip()
    if not is_plain or not 0 < len(name) <= MAX_ID_CHARS:
        raise ValueError(
            f"{path}: candidate id {str(name)[:40]!r} must be text of 1 to "
            f"{MAX_ID_CHARS} printable characters, without blanks around it"
        )


def outcomes_of(
    task: Task,
    patches: Sequence[bytes],
    told: Sequence[bool | None],
    *,
    seed: int,
    sandbox: str,
) -> list[Outcome]:
    """Outcomes as told; hidden tests run, on the same inputs, where nothing is told."""
    hidden = seed_for(seed, "hidden")
    with contextlib.ExitStack() as stack:
        box = None
        if None in told:
            box = stack.enter_context(contextlib.closing(open_sandbox(sandbox)))
        return [
            verify(task, patch, box, seed=hidden)
            if passed is None
            else Outcome(Status.PASS if passed else Status.FAIL)
            for patch, passed in zip(patches, told, strict=True)
        ]


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
    if type(order) is not int or not 0 <= order <= MAX_ORDER:
        raise ValueError(
            f'the "order" of {name!r} is {str(order)[:40]}: it must be an integer from '
            f"0 to {MAX_ORDER}"
        )
    return CandidateGrade(UNSCORED, Tier(given["tier"]), order)
