"""`verify` and `grade`: one patch, one group of patches."""

import contextlib
import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from gagar_mini.cli.shared import GraderFlags, GraderModel, print_json
from gagar_mini.config import CreditConfig, CreditRule, GraderName
from gagar_mini.types import Task


@dataclass(frozen=True)
class Verify:
    """Run the hidden tests of a task on a patch, in the sandbox.

    Example: gagar-mini verify --task TASK --patch fix.diff
    Example, a whole set: gagar-mini verify --family repo --split eval

    The patch is a git diff against the task's files. Exit status 0 whatever the
    verdict: pass, fail or tampered (the patch attacked the tests; reward 0). Without a
    task, every task of a set is checked: its gold patch must pass, the empty one fail.
    """

    task: str = ""
    """Task id, as `gagar-mini tasks list` prints it."""
    patch: Path | None = None
    """File with the git diff."""
    family: str = "core"
    """Task set to check where no task is named: "core", "full" or "repo"."""
    split: str = ""
    """Its split; all of them by default."""
    max_tasks: int = 0
    """Check so many tasks of each split, evenly spread; 0 means all."""
    tasks: Path | None = None
    """File to take the task from, as `gagar-mini tasks import --tree` writes it."""
    seed: int = 0
    """Draws the hidden inputs; another seed, other inputs."""
    sandbox: str = "bubblewrap"
    """Where the patched program runs: "bubblewrap", "docker", or "unsafe-local" (no
    isolation)."""
    image: str = ""
    """Image for the sandbox docker; "" is one built from this machine's own files."""
    json: bool = False
    """Print the outcome as JSON."""

    def execute(self) -> None:
        if bool(self.task) != (self.patch is not None):
            raise ValueError(
                "give --task and --patch together, or neither to check a set"
            )
        if self.task:
            verify_patch(self)
        else:
            verify_set(self)


def verify_set(flags: Verify) -> None:
    """Print the broken promises of a set; exit status 1 where there is one."""
    from tqdm import tqdm

    from gagar_mini.world.sandbox import open_sandbox
    from gagar_mini.world.shipped import check_tasks
    from gagar_mini.world.tasks import SPLITS, load_tasks

    tasks = []
    for split in [flags.split] if flags.split else SPLITS:
        found = load_tasks(flags.family, split)
        step = -(-len(found) // flags.max_tasks) if flags.max_tasks else 1
        tasks += found[:: max(1, step)]
    with (
        contextlib.closing(open_sandbox(flags.sandbox)) as sandbox,
        tqdm(total=len(tasks), unit="task", desc=flags.family) as progress,
    ):
        checks = check_tasks(tasks, sandbox, seed=flags.seed, on_task=progress.update)
        broken = list(checks)
    for found in broken:
        print(found)
    good = len(tasks) - len({found.task_id for found in broken})
    print(f"{good} of {len(tasks)} tasks: gold patch passes, empty patch fails")
    if broken:
        sys.exit(1)


def verify_patch(flags: Verify) -> None:
    from gagar_mini.group_file import apply_or_explain
    from gagar_mini.world.patches import MAX_PATCH_BYTES
    from gagar_mini.world.sandbox import open_sandbox
    from gagar_mini.world.tasks import find_task
    from gagar_mini.world.verifier import verify

    task = find_task(flags.task) if flags.tasks is None else imported_task(flags)
    with flags.patch.open("rb") as file:
        patch = file.read(MAX_PATCH_BYTES + 1)
    apply_or_explain(task, patch, str(flags.patch))
    with contextlib.closing(open_sandbox(flags.sandbox, flags.image)) as sandbox:
        outcome = verify(task, patch, sandbox, seed=flags.seed)
    if flags.json:
        print_json(dataclasses.asdict(outcome) | {"reward": outcome.reward})
        return
    because = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.status} (reward {outcome.reward}){because}")
    for test, verdict in outcome.tests.items():
        print(f"  {verdict:<8}{test}")


def imported_task(flags: Verify) -> Task:
    from gagar_mini.world.tasks.formats import read_tasks

    for task in read_tasks(flags.tasks):
        if task.id == flags.task:
            return task
    raise ValueError(f"{flags.tasks} has no task {flags.task!r}")


@dataclass(frozen=True)
class Grade:
    """Grade the passing members of any group of candidates and share their credit.

    Example: gagar-mini grade group.json --grader rubric

    The file says {"task_id": ..., "candidates": [{"id": ..., "patch": ..., "passed":
    true | false | null}, ...]}; null has the hidden tests decide. Prints tier, order
    and quality factor of each, and the advantage before and after. A grade of your own
    can stand in the file as "grade": {"ID": {"tier": "T1", "order": 0}, ...}: every
    passing id exactly once.
    """

    file: tyro.conf.Positional[Path]
    """JSON file with one group."""
    grader: GraderName = "rubric"
    """Who orders the passing members; "none" takes the grade in the file, if any."""
    asked: GraderFlags = field(default_factory=GraderModel)
    credit: CreditRule = "gagar"
    """Credit rule: binary, downweight, gagar (bounded, Eqs 7-8) or gagar-exact (Eq.
    2)."""
    max_scale: float = 1.5
    """Cap on the credit scale in the bounded rule."""
    seed: int = 0
    """Draws hidden inputs and the order of the random grader."""
    sandbox: str = "bubblewrap"
    """Where programs run when "passed" is null."""
    json: bool = False
    """Print JSON instead of the table."""

    def execute(self) -> None:
        from gagar_mini.group_file import grade_file, table

        grader = self.asked.config(self.grader)
        credit = CreditConfig(rule=self.credit, max_scale=self.max_scale)
        if not 1 <= self.max_scale < math.inf:
            raise ValueError(f"--max-scale is {self.max_scale}: it must be at least 1")
        if not 0 < self.asked.timeout_s < math.inf:
            raise ValueError(
                f"--timeout-s is {self.asked.timeout_s}: it must be above 0"
            )
        graded = grade_file(
            self.file, grader, credit, seed=self.seed, sandbox=self.sandbox
        )
        print_json(dataclasses.asdict(graded)) if self.json else print(table(graded))
