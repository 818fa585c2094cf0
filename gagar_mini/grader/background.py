"""A grader in a thread and an event loop of its own, so that nothing it does can hold
up training: not even code that blocks its thread and never looks at a deadline.

The one who waits for a grade has a deadline and goes on without it. What the grader
costs in processor time is counted here, too: its loop runs nothing else.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from gagar_mini.cpu_meter import METER, CpuMeter, MeteredExecutor
from gagar_mini.grader.agentic import AgenticGrader, GradingRecord
from gagar_mini.types import Candidate, Grader, GroupGrade, Task

CLOSE_S = 2.0
"""Seconds that a grader has to end when it is closed; a hung one is left behind."""

MAX_WORKERS = 4


@dataclass(frozen=True)
class GraderCosts:
    """What a grader used since the last time: processor seconds of its threads (None
    where nobody counts; programs in a sandbox do not count), records of gradings."""

    cpu_s: float | None
    records: tuple[GradingRecord, ...]


class BackgroundGrader:
    """Implements `types.Grader` by another grader; close it, or use it in a `with`.

    Grades are the other's, to the bit. Cancelling `grade` cancels the grading, as soon
    as the grader lets go of its thread.
    """

    def __init__(self, grader: Grader):
        self.grader = grader
        self._meter = CpuMeter()
        self._is_ready = threading.Event()
        # a daemon: a grader that hangs must not keep the process from ending
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="grader", daemon=True
        )
        self._thread.start()
        self._is_ready.wait()

    def __enter__(self) -> "BackgroundGrader":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        """Raises what the grader raises."""
        grading = self._grade(task, candidates, seed)
        future = asyncio.run_coroutine_threadsafe(grading, self._loop)
        return await asyncio.wrap_future(future)

    def take_cpu_s(self) -> float:
        """Processor seconds of the grader since the last time."""
        return self._meter.take()

    def close(self) -> None:
        """End the thread; waits `CLOSE_S` at most."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._must_stop.set)
            self._thread.join(CLOSE_S)

    async def _grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        # tasks copy the context of their creator: what follows is on the meter
        METER.set(self._meter)
        return await self.grader.grade(task, candidates, seed)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._must_stop = asyncio.Event()
        workers = MeteredExecutor(MAX_WORKERS, thread_name_prefix="grader")
        self._loop.set_default_executor(workers)
        self._loop.set_task_factory(self._metered_task)
        self._is_ready.set()
        await self._must_stop.wait()

    def _metered_task(
        self,
        loop: asyncio.AbstractEventLoop,
        coroutine: Coroutine[object, object, object],
        **named: object,
    ) -> asyncio.Task:
        return asyncio.Task(self._meter.follow(coroutine), loop=loop, **named)


def ranks_trees(grader: Grader) -> bool:
    """Whether the grader has nothing to rank where all passes have one tree.

    So it is with the agentic grader, and with the controls that deal out its grades.
    The rubric can tell even equal trees apart, by wasted calls: it is always asked.
    """
    if isinstance(grader, BackgroundGrader):
        return ranks_trees(grader.grader)
    judge = getattr(grader, "reference", grader)
    return isinstance(judge, AgenticGrader) and judge.min_trees > 1


def take_costs(grader: Grader | None) -> GraderCosts:
    """What the grader used since the last time; its records are taken out of it."""
    if isinstance(grader, BackgroundGrader):
        return GraderCosts(grader.take_cpu_s(), take_costs(grader.grader).records)
    judge = getattr(grader, "reference", grader)
    records = []
    while isinstance(judge, AgenticGrader) and judge.records:
        records.append(judge.records.popleft())
    return GraderCosts(None, tuple(records))
