"""Ending a run: gently after its step, or at once, from a terminal or a notebook."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from gagar_mini.records import Json


class Stopper:
    """Ends a run on Ctrl-C or a request to terminate: first gently, then at once.

    The run has an event loop of its own, in a thread of its own where this thread
    already has one (a notebook).
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._cancel: Callable[[], None] | None = None

    def run(self, coroutine: Coroutine[None, None, dict[str, Json]]) -> dict[str, Json]:
        """The result of the run; KeyboardInterrupt when it was ended at once."""
        try:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return asyncio.run(self._watched(coroutine))
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(asyncio.run, self._watched(coroutine)).result()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over, where this is the main thread, and give them back."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        names = (signal.SIGINT, signal.SIGTERM)
        former = {name: signal.signal(name, self._on_signal) for name in names}
        try:
            yield
        finally:
            for name, handler in former.items():
                signal.signal(name, handler)

    async def _watched(
        self, coroutine: Coroutine[None, None, dict[str, Json]]
    ) -> dict[str, Json]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        return await coroutine

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked and self._cancel is not None:
            self._cancel()
            return
        self.is_asked = True
        print(
            "\nstopping after this step, with a checkpoint; again to stop at once",
            file=sys.stderr,
        )
