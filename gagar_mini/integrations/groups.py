"""What GAGAR in another trainer needs, whichever trainer it is: candidates made of its
rows, and grades of many groups from code that is not async.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gagar_mini.grader.background import BackgroundGrader
from gagar_mini.grader.controls import grade_or_fallback
from gagar_mini.types import (
    Candidate,
    Grader,
    GroupGrade,
    Outcome,
    Status,
    Task,
    Turn,
)

MAX_PARALLEL = 8
"""Groups graded at once; the deadline of one runs from its own start."""


@dataclass(frozen=True)
class GradingJob:
    """One group to grade: `key` names it to the caller."""

    key: str
    task: Task
    candidates: tuple[Candidate, ...]
    seed: int


@dataclass(frozen=True)
class GradingResult:
    """A valid grade, or None and the reason why the group falls back to GRPO."""

    key: str
    grade: GroupGrade | None
    fallback_reason: str = ""


def as_candidate(
    id_: str, patch: bytes, reward: float | None, turns: tuple[Turn, ...] = ()
) -> Candidate:
    """A member as a grader sees it: a positive reward is a pass, None is a harness that
    failed."""
    if reward is None:
        status = Status.INFRA
    else:
        status = Status.PASS if reward > 0 else Status.FAIL
    return Candidate(id_, patch, Outcome(status), turns)


def task_of_text(statement: str, id_: str = "") -> Task:
    """A task that is a statement only, for graders that look at nothing else."""
    return Task(
        id=id_,
        family="text",
        split="train",
        statement=statement,
        files={},
        visible_check="",
        targets=(),
        allowed_paths=(),
        hidden_tests=(),
        gold_patch=b"",
    )


def text_of(content: object) -> str:
    """The text of a prompt or completion: a string, or a list of chat messages."""
    if isinstance(content, str):
        return content
    return "\n".join(str(message.get("content") or "") for message in content)


def grade_all(
    grader: Grader, jobs: Sequence[GradingJob], timeout_s: float
) -> list[GradingResult]:
    """The result of each job, in order; never an exception of the grader.

    Returns after `worst_case_s` at the latest, also where the grader blocks its thread,
    and also where an event loop already runs (a notebook).
    """
    if not jobs:
        return []
    with BackgroundGrader(grader) as background, ThreadPoolExecutor(1) as caller:
        return caller.submit(asyncio.run, _grade(background, jobs, timeout_s)).result()


def worst_case_s(num_jobs: int, timeout_s: float) -> float:
    """Seconds that `grade_all` may take if every grading meets its deadline."""
    return -(-num_jobs // MAX_PARALLEL) * timeout_s


async def _grade(
    grader: Grader, jobs: Sequence[GradingJob], timeout_s: float
) -> list[GradingResult]:
    slots = asyncio.Semaphore(MAX_PARALLEL)

    async def one(job: GradingJob) -> GradingResult:
        async with slots:
            grade, reason = await grade_or_fallback(
                grader, job.task, job.candidates, job.seed, timeout_s
            )
        return GradingResult(job.key, grade, reason)

    return list(await asyncio.gather(*map(one, jobs)))
