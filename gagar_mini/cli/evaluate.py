"""`eval`: policies, graders, attacks on graders and the detection of hacks."""

import contextlib
import dataclasses
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import tyro

from gagar_mini.cli.shared import (
    GraderFlags,
    GraderModel,
    print_json,
    refuse_overwriting,
)
from gagar_mini.config import GraderName
from gagar_mini.paths import check_can_be_made


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
    preset: str | None = None
    """Evaluate a checkpoint in the settings of this preset, as a run of it would be."""
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
    temperature: float | None = None
    """Sampling temperature; 0 is greedy. Default: as in training, 1 where no run
    tells."""
    seed: int = 0
    habits: bool = False
    """Show how each habit of the policy goes along with passing, too."""
    json: bool = False
    """Print a JSON list instead of the table."""

    def execute(self) -> None:
        from gagar_mini import evaluating

        if self.samples < 1 or self.max_tasks < 0:
            raise ValueError("--samples must be above 0, --max-tasks not below 0")
        if not 0 <= (self.temperature or 0.0) < math.inf:
            raise ValueError(
                f"--temperature is {self.temperature}: it must be a number from 0 on"
            )
        subject = evaluating.open_subject(self.policy, self.preset)
        trained = subject.config.rollout
        is_given = self.temperature is not None
        rollout = dataclasses.replace(
            trained,
            temperature=self.temperature if is_given else trained.temperature,
            tools=self.tools or trained.tools,
        )
        rows = evaluating.evaluate_budgets(
            subject,
            evaluating.choose_tasks(self.family, self.split, self.max_tasks),
            evaluating.budgets(self.max_turns, self.max_tokens, rollout),
            samples=self.samples,
            seed=self.seed,
            with_habits=self.habits,
        )
        print_json(rows) if self.json else print(evaluating.table(rows))


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
    asked: GraderFlags = field(default_factory=GraderModel)
    concurrency: int = 1
    """Groups graded at a time; above 1 the seconds are no longer those of one alone."""
    seed: int = 0
    out: Path | None = None
    """Folder that gets grader_eval.json and grader_eval.png."""
    force: bool = False
    """Overwrite them if they exist."""
    json: bool = False
    """Print JSON instead of the table."""

    def execute(self) -> None:
        for name in ("permutations", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be above 0")
        if self.max_groups < 0 or not 0 < self.asked.timeout_s < math.inf:
            raise ValueError("--max-groups must not be below 0, --timeout-s above 0")
        if not self.sets:
            raise ValueError("name at least one set")
        if self.out is not None:
            check_can_be_made(self.out)
            for name in ("grader_eval.json", "grader_eval.png"):
                refuse_overwriting(self.out / name, force=self.force)
        from gagar_mini import evaluating_graders as measure

        sets = measure.load_sets(self.sets, self.max_groups)
        graders = measure.make_graders(
            self.asked.config(self.grader), self.baselines, pointwise=self.pointwise
        )
        found = measure.evaluate_graders(
            graders,
            sets,
            num_orders=self.permutations,
            seed=self.seed,
            concurrency=self.concurrency,
        )
        told = dataclasses.asdict(self)
        told |= told.pop("asked")
        settings = {k: v for k, v in told.items() if k not in ("out", "force", "json")}
        report = {"settings": settings, "sets": found}
        print_json(report) if self.json else print(measure.table(report))
        if self.out is not None:
            measure.save_report(report, self.out)
            print(f"written: {self.out}/grader_eval.json and .png", file=sys.stderr)


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
    asked: GraderFlags = field(default_factory=GraderModel)
    seed: int = 0
    out: Path | None = None
    """Folder that gets grader_attacks.json and grader_attacks.md."""
    force: bool = False
    """Overwrite them if they exist."""
    json: bool = False
    """Print JSON instead of the table."""

    def execute(self) -> None:
        if self.tasks < 0 or not 0 < self.asked.timeout_s < math.inf:
            raise ValueError("--tasks must not be below 0, --timeout-s above 0")
        if not self.grader or not (self.tasks or self.codeipi):
            raise ValueError("name a grader, and tasks or --codeipi to attack it on")
        if self.out is not None:
            check_can_be_made(self.out)
            for suffix in ("json", "md"):
                path = self.out / f"grader_attacks.{suffix}"
                refuse_overwriting(path, force=self.force)
        from gagar_mini import evaluating_attacks as attacks

        graders = attacks.make_graders(self.grader, self.asked.config())
        pairs = attacks.make_pairs(self.tasks, self.codeipi, seed=self.seed)
        found = attacks.attack_graders(
            graders, pairs, seed=self.seed, timeout_s=self.asked.timeout_s
        )
        settings = attacks.settings_of(self.tasks, self.seed, self.codeipi)
        if self.json:
            print_json(attacks.report_of(settings, found))
        else:
            print(attacks.table(found))
        if self.out is not None:
            attacks.save_report(settings, found, self.out)
            print(f"written: {self.out}/grader_attacks.json and .md", file=sys.stderr)


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

    def execute(self) -> None:
        if self.tasks < 1:
            raise ValueError(f"--tasks is {self.tasks}: it must be above 0")
        if self.out is not None:
            refuse_overwriting(self.out, force=self.force)
            check_can_be_made(self.out.parent)
        from tqdm import tqdm

        from gagar_mini.grader.hack_study import is_fit, observe, summarise, table
        from gagar_mini.world.sandbox import open_sandbox
        from gagar_mini.world.tasks import load_tasks
        from gagar_mini.world.tasks.leaks import KINDS

        tasks = []
        for family in self.families:
            found = load_tasks(family, self.split)
            tasks += [task for task in found if is_fit(task)][: self.tasks]
        with (
            contextlib.closing(open_sandbox(self.sandbox)) as sandbox,
            tqdm(total=len(tasks), unit="task", desc="hacks") as progress,
        ):
            sightings, failed = observe(tasks, KINDS, sandbox, on_task=progress.update)
        settings = {"families": self.families, "split": self.split, "tasks": len(tasks)}
        result = settings | summarise(sightings, failed)
        print_json(result) if self.json else print(table(result))
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(json.dumps(result, indent=2) + "\n")
