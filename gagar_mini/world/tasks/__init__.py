"""The task sets: read from the data folder, found by id, and their hidden inputs."""

import functools
import random

from gagar_mini.paths import find_data
from gagar_mini.types import HiddenTest, Task, seed_for
from gagar_mini.world.tasks.formats import read_tasks
from gagar_mini.world.tasks.templates import Template, call_reference, draw_inputs
from gagar_mini.world.tasks.templates_core import CORE_TEMPLATES
from gagar_mini.world.tasks.templates_full import FULL_TEMPLATES

FAMILIES = ("core", "full")
"""The micro-repositories, which are data alone."""
PACKAGE_FAMILIES = ("repo",)
"""Made of real packages, which must be at hand (`packages`)."""
ALL_FAMILIES = FAMILIES + PACKAGE_FAMILIES
SPLITS = ("train", "eval", "eval_unseen")
TEMPLATES = {template.name: template for template in (*CORE_TEMPLATES, *FULL_TEMPLATES)}


@functools.cache
def load_tasks(family: str, split: str) -> tuple[Task, ...]:
    """The tasks of a family ("core", "full", "repo") and a split, in the order of their
    ids.

    Raises ValueError for a name that does not exist, FileNotFoundError without the data
    or without the packages that the tasks are made of.
    """
    if family not in ALL_FAMILIES:
        raise ValueError(f"task family {family!r} is none of {', '.join(ALL_FAMILIES)}")
    if split not in SPLITS:
        raise ValueError(f"split {split!r} is none of {', '.join(SPLITS)}")
    if family in PACKAGE_FAMILIES:
        from gagar_mini.world.tasks import repo

        return repo.load(split)
    return read_tasks(find_data(f"tasks/{family}/{split}.jsonl.gz"))


def find_task(task_id: str) -> Task:
    """The task with this id, such as "core-train-00017". Raises ValueError if none
    has."""
    family, _, rest = task_id.partition("-")
    split = rest.rpartition("-")[0]
    if family in ALL_FAMILIES and split in SPLITS:
        for task in load_tasks(family, split):
            if task.id == task_id:
                return task
    raise ValueError(f"no task has the id {task_id!r}; ids look like core-train-00017")


def find_template(name: str) -> Template:
    """The function template of this name. Raises ValueError if there is none."""
    if name not in TEMPLATES:
        raise ValueError(f"no function template is called {name!r}")
    return TEMPLATES[name]


def draw_cases(test: HiddenTest, seed: int) -> tuple[tuple[tuple, object], ...]:
    """(arguments, expected) of a hidden test: literal, or drawn afresh for this seed.

    The reference runs here, in the judge's process. Only `world.verifier` may call
    this.
    """
    if not test.template:
        return test.cases
    template = find_template(test.template)
    rng = random.Random(seed_for("hidden", seed, test.id))
    return tuple(
        (arguments, call_reference(template, arguments))
        for arguments in draw_inputs(template, rng, test.num_cases)
    )
