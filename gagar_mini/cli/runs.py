"""`train`, `experiment`, `compare` and `export`: runs and what becomes of them."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from gagar_mini.cli.shared import check_figure_name, print_json, refuse_overwriting
from gagar_mini.config import PRESETS, RunConfig, differences, to_yaml
from gagar_mini.paths import check_can_be_made


@dataclass(frozen=True)
class Train:
    """Train a policy with GRPO on hidden tests, plain or with redistributed credit.

    Example, the baseline:  gagar-mini train --credit binary --seed 0 --steps 50
    Example, the method:    gagar-mini train --credit gagar --grader rubric --seed 0
    Example, a setting:     gagar-mini train --rollout.group-size 16 --dry-run
    Example, a pretrained model on a CPU:  gagar-mini train --preset smol
    Example, on a GPU:      gagar-mini train --preset one_gpu --model \\
                            Qwen/Qwen2.5-Coder-0.5B-Instruct

    --credit and --grader are short for --credit.rule and --grader.name, --model for
    --policy. The run folder gets config.yaml, metrics.jsonl, rollouts/, checkpoints/
    and summary.json; an existing one is never overwritten: give --resume to go on with
    it. A step of the tiny preset takes 2 to 4 seconds on one core.
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

    def execute(self) -> None:
        run_dir = self.run_dir or default_run_dir(self.config)
        if self.dry_run:
            print(f"# run folder: {run_dir}\n{to_yaml(self.config)}", end="")
            return
        if not self.resume and run_dir.is_dir() and any(run_dir.iterdir()):
            raise ValueError(
                f"the folder {run_dir} is not empty: go on with the run that it holds "
                "(--resume), or choose another --run-dir"
            )
        from gagar_mini.learn.opening import expected_memory
        from gagar_mini.learn.rl import train

        memory = expected_memory(self.config)
        if memory and os.environ.get("RANK", "0") == "0":
            print(memory, flush=True)
        changed = differences(PRESETS[self.config.preset](), self.config)
        told = ", ".join(f"{name}={new}" for name, (_, new) in changed.items())
        title = f"{run_dir}: {self.config.preset} with {told or 'its defaults'}"
        resume = self.resume and run_dir.exists()
        summary = train(
            self.config,
            run_dir,
            resume=resume,
            on_begin=lambda: print(title, flush=True),
        )
        if not summary:  # one of several processes, and not the one that tells
            return
        if summary["status"] == "finished":
            print(f"done; next: gagar-mini eval {run_dir}")
        else:
            print(f"stopped; go on with: --run-dir {run_dir} --resume")


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
    names |= {"--model": "--policy"}
    return names.get(flag, flag) + equals + value


def default_run_dir(config: RunConfig) -> Path:
    arm = f"{config.credit.rule}-{config.grader.name}"
    return Path("data/runs") / f"{config.preset}-{arm}-s{config.seed}"


@dataclass(frozen=True)
class ExperimentFlags:
    """Train several arms from several seeds, evaluate them, and compare.

    Example: gagar-mini experiment --arms binary gagar --seeds 0 1 2 --steps 50 --out
    data/runs/mine
    Example, of a pretrained model (hours on a CPU): gagar-mini experiment --preset smol
    --seeds 0 --steps 20 --budgets 8x352 6x256 --samples 4 --max-tasks 32 --out
    data/runs/smol

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
    preset: str = "tiny"
    """Settings of all runs, but for one thread each."""
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

    def execute(self) -> None:
        from gagar_mini.learn.experiment import Experiment, publish, run_experiment

        experiment = Experiment(
            self.arms,
            self.seeds,
            self.steps,
            budgets=tuple(budget_of(text) for text in self.budgets),
            samples=self.samples,
            max_tasks=self.max_tasks,
            overrides=("--preset", self.preset, "--threads", "1"),
        )
        check_can_be_made(self.out)
        try:
            folders = run_experiment(experiment, self.out, jobs=self.jobs)
        except RuntimeError as error:
            sys.exit(f"gagar-mini: {error}")  # with the end of its log: status 1
        if self.publish is not None:
            from gagar_mini.view.report import write_report

            publish(folders, self.publish)
            write_report(self.publish)
        figure = self.out / "compare.png"
        Compare(tuple(folders), out=figure, force=True).execute()


def budget_of(text: str) -> tuple[int, int]:
    """ "9x96" -> 9 turns, 96 tokens."""
    turns, cross, tokens = text.partition("x")
    if not (cross and turns.isdecimal() and tokens.isdecimal()):
        raise ValueError(f"a budget is turns x tokens, such as 9x96, not {text!r}")
    return int(turns), int(tokens)


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

    def execute(self) -> None:
        from gagar_mini.view.compare import compare_runs, read_runs, table

        if not self.runs:
            raise ValueError("name at least one run folder to compare")
        if self.out is not None:
            check_figure_name(self.out)
            refuse_overwriting(self.out, force=self.force)
        runs = read_runs(self.runs)
        rows = compare_runs(runs)
        told = [dataclasses.asdict(row) for row in rows]
        print_json(told) if self.json else print(table(rows))
        if self.out is not None:
            from gagar_mini.view.plots import save_comparison

            save_comparison(runs, self.out)
            print(f"figure: {self.out}", file=sys.stderr)


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

    def execute(self) -> None:
        from gagar_mini.agent.exports import export_run
        from gagar_mini.world.tasks import find_task

        check_can_be_made(self.out)
        files = export_run(self.run, self.step, self.format, self.out, find_task)
        print(f"{len(files)} files in {self.out}")
