"""The promise of every task, checked by the verifier itself: the gold patch passes, the
empty patch fails."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gagar_mini.types import Outcome, Status, Task
from gagar_mini.world.sandbox.base import Sandbox
from gagar_mini.world.verifier import verify

EXPECTED = {"gold": Status.PASS, "empty": Status.FAIL}


@dataclass(frozen=True)
class Broken:
    """A promise that does not hold: the outcome of the "gold" or the "empty" patch."""

    task_id: str
    patch: str
    outcome: Outcome

    def __str__(self) -> str:
        because = f": {self.outcome.reason}" if self.outcome.reason else ""
        return f"{self.task_id}: {self.patch} patch: {self.outcome.status}{because}"


def broken_promises(task: Task, sandbox: Sandbox, seed: int = 0) -> list[Broken]:
    """What the verifier says against a task. Raises SandboxUnavailable."""
    patches = {"gold": task.gold_patch, "empty": b""}
    found = []
    for name, patch in patches.items():
        outcome = verify(task, patch, sandbox, seed=seed)
        if outcome.status is not EXPECTED[name]:
            found.append(Broken(task.id, name, outcome))
    return found


def check_tasks(
    tasks: Sequence[Task],
    sandbox: Sandbox,
    *,
    seed: int = 0,
    jobs: int = 2,
    on_task: Callable[[], object] = lambda: None,
) -> Iterator[Broken]:
    """Every broken promise among `tasks`, `jobs` of them side by side."""
    with ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda task: broken_promises(task, sandbox, seed), tasks):
            on_task()
            yield from found
