"""Micro-repositories: small modules of pure functions with one or two known faults.

`build` makes every file of a level from a seed. Each task is drawn from its own seed
and checked by running it; a draw that breaks a promise is dropped for the next.
Combinations of faults are split by a hash, so none of an evaluation task occurs in
training.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gagar_mini.types import HiddenTest, Target, Task, seed_for
from gagar_mini.world.tasks.faults import (
    NUM_CASES,
    Hang,
    faults_of,
    processor_limit,
)
from gagar_mini.world.tasks.formats import encode_tasks, write_tasks
from gagar_mini.world.tasks.repository import (
    Damage,
    Modules,
    Placed,
    line_in_file,
    render_modules,
    unified_patch,
)
from gagar_mini.world.tasks.templates import Template
from gagar_mini.world.tasks.templates_core import CORE_TEMPLATES
from gagar_mini.world.tasks.templates_full import FULL_TEMPLATES
from gagar_mini.world.tasks.validation import flaw
from gagar_mini.world.tasks.visible import (
    CHECK_PATH,
    Example,
    draw_examples,
    long_statement,
    render_check,
    short_statement,
)

VERSION = 3
"""Version of the generator, raised by a change that moves any byte of a data file."""
COUNTS = {"train": 2048, "eval": 256, "eval_unseen": 128}
EVAL_SHARE = 8
"""One in so many combinations of faults is kept for evaluation."""
TASK_S = 0.5
"""Processor seconds of one draw with its checks (it needs .01)."""
MAX_DRAWS = 500
"""Draws for one task, after which the level counts as too small for its splits."""

Statement = Callable[[Sequence[Damage], Sequence[Example]], str]


@dataclass(frozen=True)
class Level:
    """How the repositories of a level look; `(low, high)` are inclusive."""

    name: str
    templates: tuple[Template, ...]
    file_names: Mapping[str, tuple[str, ...]]
    num_modules: tuple[int, int]
    num_functions: tuple[int, int]
    num_faults: tuple[int, ...]
    missing_share: float
    faults_per_template: int
    max_example_chars: int
    statement: Statement
    header: str

    def pool(self, is_held_out: bool, topic: str | None = None) -> list[Template]:
        return [
            template
            for template in self.templates
            if template.is_held_out == is_held_out and topic in (None, template.topic)
        ]


CORE = Level(
    name="core",
    templates=CORE_TEMPLATES,
    file_names={
        "nums": ("nums.py", "ints.py"),
        "lists": ("lists.py", "seqs.py"),
        "stats": ("stats.py", "counts.py"),
        "text": ("text.py", "words.py"),
    },
    num_modules=(2, 2),
    num_functions=(2, 2),
    num_faults=(1, 1, 2),
    missing_share=0.0,
    faults_per_template=10,
    max_example_chars=44,
    statement=short_statement,
    header="",
)
FULL = Level(
    name="full",
    templates=(*CORE_TEMPLATES, *FULL_TEMPLATES),
    file_names={
        **CORE.file_names,
        "parsing": ("parsing.py", "readers.py"),
        "tables": ("tables.py", "records.py"),
        "times": ("times.py", "slots.py"),
        "layout": ("layout.py", "wording.py"),
        "amounts": ("amounts.py", "units.py"),
        "grids": ("grids.py", "boards.py"),
    },
    num_modules=(3, 4),
    num_functions=(2, 3),
    num_faults=(1, 2),
    missing_share=0.1,
    faults_per_template=12,
    max_example_chars=130,
    statement=long_statement,
    header='"""Small pure helpers ({path})."""\n\n\n',
)
LEVELS = {level.name: level for level in (CORE, FULL)}


# --- drawing a task -------------------------------------------------------------------


def draw_targets(
    level: Level, rng: random.Random, is_held_out: bool, is_together: bool
) -> list[Template]:
    """The templates to damage: in one module if `is_together`, else in one module
    each."""
    num_faults = rng.choice(level.num_faults)
    topics: dict[str, list[Template]] = {}
    for template in level.pool(is_held_out):
        topics.setdefault(template.topic, []).append(template)
    if is_together or num_faults == 1:
        fitting = [group for group in topics.values() if len(group) >= num_faults]
        return rng.sample(rng.choice(fitting), num_faults)
    return [
        rng.choice(topics[topic]) for topic in rng.sample(sorted(topics), num_faults)
    ]


def arrange(level: Level, rng: random.Random, targets: Sequence[Template]) -> Modules:
    """Modules around the targets, filled with functions of templates that are not
    held out."""
    topics = list(dict.fromkeys(template.topic for template in targets))
    others = sorted(set(level.file_names) - set(topics))
    num_modules = max(rng.randint(*level.num_modules), len(topics))
    topics += rng.sample(others, num_modules - len(topics))
    modules = {}
    for topic in topics:
        chosen = [template for template in targets if template.topic == topic]
        size = max(rng.randint(*level.num_functions), len(chosen))
        spare = [t for t in level.pool(False, topic) if t not in chosen]
        chosen += rng.sample(spare, size - len(chosen))
        rng.shuffle(chosen)
        path = rng.choice(level.file_names[topic])
        modules[path] = [Placed(t, path, rng.choice(t.variants)) for t in chosen]
    return dict(sorted(modules.items()))


def draw_damage(level: Level, rng: random.Random, function: Placed) -> Damage:
    faults = faults_of(function.template, level.faults_per_template)
    is_missing = rng.random() < level.missing_share
    return Damage(function, None if is_missing else rng.choice(faults))


def is_for_evaluation(modules: Modules, damages: Sequence[Damage]) -> bool:
    """Whether these faults in this arrangement belong to evaluation, by their hash."""
    keys = sorted(damage.key for damage in damages)
    return seed_for("split", *keys, arrangement_of(modules)) % EVAL_SHARE == 0


def arrangement_of(modules: Modules) -> str:
    """The modules with their functions, as metadata records it."""
    return " ".join(
        f"{path}:{','.join(function.name for function in functions)}"
        for path, functions in modules.items()
    )


def describe_damage(level: Level, damage: Damage, files: Mapping[str, bytes]) -> dict:
    """What a script of demonstrations needs to know of one fault."""
    faults = faults_of(damage.function.template, level.faults_per_template)
    return {
        "path": damage.function.path,
        "function": damage.function.name,
        "template": damage.function.template.name,
        "line": line_in_file(files, damage),
        "buggy": damage.buggy,
        "gold": damage.gold,
        "wrong": list(damage.wrong(faults)),
        "operator": damage.operator,
    }


def hidden_test(function: Placed) -> HiddenTest:
    return HiddenTest(
        id=function.test_id,
        path=function.path,
        function=function.name,
        template=function.template.name,
        num_cases=NUM_CASES,
    )


def assemble(
    level: Level,
    task_id: str,
    split: str,
    modules: Modules,
    damages: Sequence[Damage],
    examples: Sequence[tuple[Example, Example]],
) -> tuple[Task, str]:
    """The task, and which promise it breaks ("" if none)."""
    headers = {path: level.header.format(path=path) for path in modules}
    names = ", ".join(modules)
    fixed = {
        "README.md": f"# Helpers: {names}\nRun `python {CHECK_PATH}`.\n".encode(),
        CHECK_PATH: render_check(damages, examples).encode(),
    }

    def tree(present: Sequence[Damage]) -> dict[str, bytes]:
        files = fixed | render_modules(modules, present, headers)
        return dict(sorted(files.items()))

    base, gold = tree(damages), tree([])
    functions = [function for group in modules.values() for function in group]
    bugs = [describe_damage(level, damage, base) for damage in damages]
    task = Task(
        id=task_id,
        family=level.name,
        split=split,
        statement=level.statement(damages, [shown for shown, _ in examples]),
        files=base,
        visible_check=CHECK_PATH,
        targets=tuple(Target(d.function.path, d.function.name) for d in damages),
        allowed_paths=tuple(sorted({d.function.path for d in damages})),
        hidden_tests=tuple(map(hidden_test, functions)),
        gold_patch=unified_patch(base, gold),
        metadata={"bugs": json.dumps(bugs), "arrangement": arrangement_of(modules)},
    )
    partial = [(damage.function.test_id, tree([damage])) for damage in damages]
    return task, flaw(task, gold, partial)


def draw_task(level: Level, split: str, index: int, rng: random.Random) -> Task | None:
    """One draw of a task, None where it breaks a promise or belongs to another
    split."""
    is_held_out = split == "eval_unseen"
    targets = draw_targets(level, rng, is_held_out, is_together=index % 2 == 0)
    modules = arrange(level, rng, targets)
    functions = [function for group in modules.values() for function in group]
    damages = [draw_damage(level, rng, f) for f in functions if f.template in targets]
    rng.shuffle(damages)
    if not is_held_out and is_for_evaluation(modules, damages) != (split == "eval"):
        return None
    task_id = f"{level.name}-{split}-{index:05d}"
    try:
        # a fault that ends on all inputs of its trials may still hang on a new one
        with processor_limit(TASK_S):
            return finish_task(level, task_id, split, modules, damages, rng)
    except Hang:
        return None


def finish_task(
    level: Level,
    task_id: str,
    split: str,
    modules: Modules,
    damages: Sequence[Damage],
    rng: random.Random,
) -> Task | None:
    """The task with examples and check, None where it breaks a promise."""
    examples = [draw_examples(d, rng, level.max_example_chars) for d in damages]
    if None in examples:
        return None
    task, broken = assemble(level, task_id, split, modules, damages, examples)
    return None if broken else task


# --- building a level -----------------------------------------------------------------


def build_split(level: Level, split: str, count: int, seed: int) -> tuple[Task, ...]:
    """The first `count` tasks of a split; a smaller count gives a prefix of a larger
    one.

    Raises ValueError where the level is too small for so many different tasks.
    """
    tasks: list[Task] = []
    statements: set[str] = set()
    for index in range(count):
        for attempt in range(MAX_DRAWS):
            task_seed = seed_for(
                "micro", VERSION, level.name, split, seed, index, attempt
            )
            task = draw_task(level, split, index, random.Random(task_seed))
            if task and task.statement not in statements:
                break
        else:
            raise ValueError(
                f"level {level.name!r} has no {count} different tasks for {split!r}"
            )
        tasks.append(task)
        statements.add(task.statement)
    return tuple(tasks)


def build(
    level: str, out_dir: Path, seed: int = 0, counts: Mapping[str, int] = COUNTS
) -> dict[str, object]:
    """Write `<out_dir>/<level>/<split>.jsonl.gz` and the level's entry in
    manifest.json.

    The same seed gives the same bytes. Returns the entry: version, seed and, per split,
    count and sha256. Raises ValueError for an unknown level.
    """
    if level not in LEVELS:
        raise ValueError(f"level {level!r} is none of {', '.join(LEVELS)}")
    entry: dict[str, object] = {"version": VERSION, "seed": seed, "splits": {}}
    for split, count in counts.items():
        tasks = build_split(LEVELS[level], split, count, seed)
        path = out_dir / level / f"{split}.jsonl.gz"
        write_tasks(path, tasks)
        entry["splits"][split] = {
            "count": len(tasks),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "content_sha256": hashlib.sha256(encode_tasks(tasks)).hexdigest(),
        }
    manifest_path = out_dir / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    manifest[level] = entry
    text = json.dumps(dict(sorted(manifest.items())), indent=2)
    manifest_path.write_text(text + "\n")
    return entry
