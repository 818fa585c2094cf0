"""Whose processor time it was, in a process whose threads are shared.

Wall time tells little about work that overlaps other work. Here every piece of metered
work adds the processor seconds of its own thread, whichever thread that is. Threads
that a library starts by itself (the pool of torch, with more than one thread) are seen
by `tree_cpu_s` alone.
"""

import contextvars
import os
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


class CpuMeter:
    """Adds up processor seconds, from any thread."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()

    def run(
        self, work: Callable[..., Result], *arguments: object, **named: object
    ) -> Result:
        """Call `work`, on the meter."""
        started = time.thread_time()
        try:
            return work(*arguments, **named)
        finally:
            spent = time.thread_time() - started
            with self._lock:
                self._seconds += spent

    async def follow(self, coroutine: Coroutine[object, object, Result]) -> Result:
        """Await `coroutine`, each of its steps on the meter."""
        return await _in_steps(coroutine, self.run)

    def take(self) -> float:
        """The seconds since the last time; work that still runs comes later."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds


METER: contextvars.ContextVar[CpuMeter | None] = contextvars.ContextVar(
    "METER", default=None
)
"""The meter of the work that goes on; `MeteredExecutor` takes it along."""


class MeteredExecutor(ThreadPoolExecutor):
    """Runs what is submitted under a meter on that meter, in its own threads."""

    def submit(
        self, fn: Callable[..., Result], /, *args: object, **kwargs: object
    ) -> "Future[Result]":
        meter = METER.get()
        if meter is None:
            return super().submit(fn, *args, **kwargs)
        return super().submit(meter.run, fn, *args, **kwargs)


@types.coroutine
def _in_steps(
    coroutine: Coroutine[object, object, Result], run: Callable[..., object]
) -> Generator[object, object, Result]:
    step, value = coroutine.send, None
    while True:
        try:
            request = run(step, value)
        except StopIteration as ended:
            return ended.value
        try:
            step, value = coroutine.send, (yield request)
        except BaseException as error:  # a cancellation goes to the coroutine
            step, value = coroutine.throw, error


def tree_cpu_s() -> float:
    """Processor seconds so far of this process and its children, those of a sandbox
    included; without /proc, children count when they have ended."""
    own = sum(os.times()[:4])
    try:
        return own + sum(_cpu_s_below(pid) for pid in _children(os.getpid()))
    except OSError:
        return own


def _cpu_s_below(pid: str) -> float:
    """Of a process, the children that it has waited for, and those that still live."""
    try:
        # the name of the program, in brackets, may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2]
        ticks = sum(map(int, fields.split()[11:15]))
        children = _children(pid)
    except OSError:  # it has just ended
        return 0.0
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_s_below, children))


def _children(pid: int | str) -> list[str]:
    folder = Path(f"/proc/{pid}/task")
    found = [(thread / "children").read_text().split() for thread in folder.iterdir()]
    return [child for children in found for child in children]
