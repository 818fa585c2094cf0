"""Measuring a policy under one or several budgets, from a checkpoint or a run."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from gagar_mini.agent.chat_dialect import ChatDialect
from gagar_mini.agent.dialect import CompactDialect, Dialect
from gagar_mini.agent.rollouts import Harness, evaluate
from gagar_mini.config import PRESETS, RolloutConfig, RunConfig
from gagar_mini.learn.evaluation import habits_table, summarise
from gagar_mini.learn.opening import is_chat
from gagar_mini.model.batch_engine import open_chat_engine
from gagar_mini.model.hf_engine import ADAPTER, load_chat_model
from gagar_mini.model.policy import load_policy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.paths import find_checkpoint
from gagar_mini.records import latest_checkpoint, read_config
from gagar_mini.types import Engine, RolloutGroup, Task
from gagar_mini.view.tables import text_table
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.tasks import load_tasks

Row = dict[str, float | int | str | list | None]
"""What one evaluation says, and of what."""


CHAT_ROLLOUT = RolloutConfig(
    max_turns=9, max_action_tokens=640, max_new_tokens=256, max_context_tokens=2048
)
"""Limits for a chat model: JSON and a general tokenizer need more tokens."""


@dataclass(frozen=True)
class Subject:
    """What is evaluated: the folder of its weights, and the run that they belong to."""

    checkpoint: Path
    config: RunConfig
    run_dir: Path | None
    step: int | None
    dtype: torch.dtype | None = None
    """In what a chat model computes; None is the default of the machine."""


def open_subject(path: Path, preset: str | None = None) -> Subject:
    """The newest checkpoint of a run folder, or a checkpoint itself, in the settings of
    `preset` where it is named.

    Raises ValueError, in one sentence, where the folder holds neither, for an unknown
    preset, and for one beside a run, which has settings of its own.
    """
    folder, config = find_checkpoint(str(path)), PRESETS["tiny"]()
    is_checkpoint = any((folder / n).is_file() for n in ("config.json", ADAPTER))
    if preset is not None:
        if preset not in PRESETS or not is_checkpoint:
            raise ValueError(
                f"--preset {preset} is for the folder of a checkpoint, and one of "
                f"{', '.join(PRESETS)}"
            )
        config = PRESETS[preset]()
        return Subject(folder, config, None, None, getattr(torch, config.dtype))
    if is_checkpoint:
        if is_chat(folder):
            config = replace(config, rollout=CHAT_ROLLOUT)
        return Subject(folder, config, run_dir=None, step=None)
    config, checkpoint = read_config(path), latest_checkpoint(path)
    if checkpoint is None:
        raise ValueError(f"the run {path} has no checkpoint yet: train it first")
    return Subject(
        checkpoint.folder,
        config,
        run_dir=path,
        step=checkpoint.step,
        dtype=getattr(torch, config.dtype),
    )


def open_policy(
    folder: Path, limits: RolloutConfig, dtype: torch.dtype | None = None
) -> tuple[Engine, Dialect]:
    """Who samples from a checkpoint, and the language that it speaks.

    Raises ValueError, in one sentence, for what cannot be loaded or has no shell.
    """
    if is_chat(folder):
        model, tokenizer = load_chat_model(str(folder), dtype=dtype)
        dialect = ChatDialect(tokenizer, tools=limits.tools)
        longest = model.config.get_text_config().max_position_embeddings
        context = min(limits.max_context_tokens, longest)
        return open_chat_engine(model, tokenizer, max_context=context), dialect
    if limits.tools == "bash":
        raise ValueError(
            "--tools is bash, but the tiny policy's compact dialect has no word for a "
            "shell command: use edit"
        )
    policy, tokenizer = load_policy(folder)
    return TorchEngine(policy), CompactDialect(tokenizer)


def budgets(
    max_turns: Sequence[int], max_tokens: Sequence[int], limits: RolloutConfig
) -> list[RolloutConfig]:
    """Limits of each evaluation: values paired in order, a single one kept for all."""
    turns = list(max_turns) or [limits.max_turns]
    tokens = list(max_tokens) or [limits.max_action_tokens]
    size = max(len(turns), len(tokens))
    for name, values in {"--max-turns": turns, "--max-tokens": tokens}.items():
        if len(values) not in (1, size):
            raise ValueError(
                f"{name} has {len(values)} values and the other budget {size}: give as "
                "many of both, or one that holds for all"
            )
        if min(values) < 1:
            raise ValueError(f"{name} is {min(values)}: it must be at least 1")
    turns, tokens = turns * (size // len(turns)), tokens * (size // len(tokens))
    return [
        replace(limits, max_turns=turn, max_action_tokens=token)
        for turn, token in zip(turns, tokens, strict=True)
    ]


def evaluate_budgets(
    subject: Subject,
    tasks: Sequence[Task],
    all_limits: Sequence[RolloutConfig],
    *,
    samples: int,
    seed: int,
    with_habits: bool = False,
) -> list[Row]:
    """The figures of each budget. A run's own are added to its eval.jsonl, too."""
    config = subject.config
    engine, dialect = open_policy(subject.checkpoint, all_limits[0], subject.dtype)
    rows = []
    box = open_sandbox(config.sandbox, config.sandbox_image)
    with contextlib.closing(box) as sandbox:
        harness = Harness(engine, dialect, sandbox)
        for limits in all_limits:
            groups = evaluate_once(harness, tasks, limits, samples=samples, seed=seed)
            row = {
                "checkpoint": str(subject.checkpoint),
                "step": subject.step,
                "family": tasks[0].family,
                "split": tasks[0].split,
                "max_turns": limits.max_turns,
                "max_tokens": limits.max_action_tokens,
                "temperature": limits.temperature,
                "samples": samples,
                "seed": seed,
                **dataclasses.asdict(summarise(groups)),
            }
            if with_habits:
                row["habits"] = [dataclasses.asdict(h) for h in habits_table(groups)]
            rows.append(row)
            if subject.run_dir is not None:
                append_line(subject.run_dir / "eval.jsonl", row)
    return rows


def evaluate_once(
    harness: Harness,
    tasks: Sequence[Task],
    limits: RolloutConfig,
    *,
    samples: int,
    seed: int,
) -> list[RolloutGroup]:
    what = f"{limits.max_turns} turns, {limits.max_action_tokens} tokens"
    with tqdm(total=len(tasks), desc=what, unit="task") as progress:
        return asyncio.run(
            evaluate(
                harness,
                tasks,
                limits,
                samples_per_task=samples,
                seed=seed,
                on_group=lambda group: progress.update(),
            )
        )


def choose_tasks(family: str, split: str, max_tasks: int) -> tuple[Task, ...]:
    tasks = load_tasks(family, split)
    return tasks[:max_tasks] if max_tasks else tasks


def append_line(path: Path, row: dict) -> None:
    from gagar_mini.view.tables import without_nan

    with open(path, "a") as file:
        file.write(json.dumps(without_nan(row)) + "\n")


def table(rows: Sequence[Row]) -> str:
    """One line a budget; the interval of the pass rate resamples tasks. Then, where
    asked for, one line a habit."""
    parts = [
        text_table(
            [
                {
                    "turns<=": row["max_turns"],
                    "tokens<=": row["max_tokens"],
                    "tasks": row["num_tasks"],
                    "pass": row["pass_rate"],
                    "95 %": "{:.3f} to {:.3f}".format(*row["pass_interval"]),
                    "clean": row["clean_share"],
                    "noise lines": row["noise_lines"],
                    "mixed": row["mixed_share"],
                    "turns": row["turns"],
                    "tokens": row["action_tokens"],
                    "truncated": row["truncated_share"],
                    "malformed": row["malformed_rate"],
                    "entropy": row["entropy"],
                }
                for row in rows
            ]
        )
    ]
    for row in rows:
        if "habits" in row:
            title = f"habits, up to {row['max_turns']} turns: pass rate with, without"
            parts += ["", title, habits_text(row["habits"])]
    return "\n".join(parts)


def habits_text(habits: Sequence[dict]) -> str:
    return text_table(
        [
            {
                "habit": row["habit"],
                "share": row["share"],
                "with": row["pass_rate_with"],
                "without": row["pass_rate_without"],
                "95 % of the difference": "{:+.3f} to {:+.3f}".format(
                    *row["difference_interval"]
                ),
            }
            for row in habits
        ]
    )
