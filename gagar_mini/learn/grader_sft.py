"""Supervised fine-tuning of the tiny agentic grader on scripted gradings.

The shipped pools hold candidates of known quality; groups are drawn from them anew, so
that every lesson is another group, in another order, with other ids. The grader is the
tiny architecture with a tokenizer and a dialect of its own.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from gagar_mini.grader.dialect import SPECIAL_TOKENS, GraderDialect
from gagar_mini.grader.workspace import build_workspace
from gagar_mini.learn.demonstrations import Demonstration
from gagar_mini.learn.grader_data import Pool, load_pools
from gagar_mini.learn.grader_lessons import (
    Exercise,
    demonstrate_grading,
    draw_exercise,
    made_strange,
    rollout_exercise,
)
from gagar_mini.learn.sft import FitConfig, check_can_train, fit
from gagar_mini.model.policy import PolicyConfig, TinyPolicy, save_policy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.types import seed_for


@dataclass(frozen=True)
class GraderSftConfig(FitConfig):
    """The tiny agentic grader."""

    pools: str = "train"
    """Candidates that the lessons are drawn from (data/grader)."""
    num_tokens: int = 5_000_000
    """Tokens of lessons, each seen once."""
    vocab_size: int = 768
    max_context: int = 2048
    """Longest lesson; a group of 8 rarely needs half of it."""
    context_weight: float = 0.05
    rollout_share: float = 0.3
    """Share of lessons that are whole rollout groups of the tiny policy."""
    strange_share: float = 0.3
    """Share of lessons in which one kind of finding goes by a name that means nothing,
    so that a kind never met is not taken for a clean patch."""


def train_grader(
    out_dir: Path, config: GraderSftConfig = GraderSftConfig()
) -> dict[str, float]:
    """Train the grader into `out_dir` (Hugging Face layout); its statistics.

    Raises ValueError where `out_dir` exists already: nothing is overwritten.
    """
    check_can_train(out_dir, config.num_tokens, config.threads)
    started = time.monotonic()
    pools = load_pools(config.pools)
    tokenizer = train_tokenizer(
        texts_of(pools, config),
        vocab_size=config.vocab_size,
        special_tokens=SPECIAL_TOKENS,
    )
    lessons = draw_lessons(pools, tokenizer, config)
    torch.set_num_threads(config.threads)
    sizes = PolicyConfig(
        vocab_size=len(tokenizer), max_position_embeddings=config.max_context
    )
    policy = TinyPolicy(sizes, seed=config.seed)
    final_loss = fit(policy, lessons, config)
    save_policy(policy, tokenizer, out_dir)
    statistics = {
        "num_lessons": len(lessons),
        "num_tokens": sum(len(lesson.ids) for lesson in lessons),
        "num_parameters": sum(p.numel() for p in policy.parameters()),
        "final_loss": final_loss,
        "seconds": round(time.monotonic() - started, 1),
    }
    card = {"config": asdict(config), "result": statistics}
    (out_dir / "training.json").write_text(json.dumps(card, indent=2) + "\n")
    return statistics


def texts_of(pools: Sequence[Pool], config: GraderSftConfig) -> Iterator[str]:
    """Pages that the tokenizer learns from."""
    rng = random.Random(seed_for(config.seed, "tokenizer"))
    for pool in rng.sample(list(pools), min(300, len(pools))):
        exercise = draw(pool, rng, config)
        workspace = build_workspace(pool.task, exercise.candidates, 0)
        yield from (
            text
            for path, text in workspace.files.items()
            if path.endswith(("TASK.md", "GROUP.txt", "stats.txt", "patch.diff"))
        )


def draw(pool: Pool, rng: random.Random, config: GraderSftConfig) -> Exercise:
    """One exercise of a pool: a rollout group as it was, or a group drawn anew; in some
    of them a kind of finding has a strange name."""
    found = rollout_exercise(pool) if rng.random() < config.rollout_share else None
    exercise = found or draw_exercise(pool, rng)
    is_strange = rng.random() < config.strange_share
    return made_strange(exercise, rng) if is_strange else exercise


def draw_lessons(
    pools: Sequence[Pool],
    tokenizer: PreTrainedTokenizerFast,
    config: GraderSftConfig,
) -> list[Demonstration]:
    """Lessons of about `config.num_tokens` in all, spread evenly over the pools."""
    sample = pools[:: max(1, len(pools) // 20)]
    length = sum(
        len(lesson.ids) for p in sample for lesson in _lessons(p, tokenizer, config, 2)
    ) / (2 * len(sample))
    per_pool = max(1, round(config.num_tokens / length / len(pools)))
    work = partial(_lessons, tokenizer=tokenizer, config=config, count=per_pool)
    with ProcessPoolExecutor(max_workers=config.threads) as workers:
        found = workers.map(work, pools, chunksize=4)
        progress = tqdm(found, total=len(pools), desc="lessons", unit="task")
        return [lesson for lessons in progress for lesson in lessons]


def _lessons(
    pool: Pool, tokenizer: PreTrainedTokenizerFast, config: GraderSftConfig, count: int
) -> list[Demonstration]:
    dialect = GraderDialect(tokenizer)

    def drawn() -> Iterator[Demonstration]:
        for index in range(2 * count):  # some cannot be submitted, or are too long
            seed = seed_for(config.seed, "lesson", pool.task.id, index)
            exercise = draw(pool, random.Random(seed), config)
            lesson = demonstrate_grading(exercise, dialect, seed)
            if lesson is not None and len(lesson.ids) <= config.max_context:
                yield lesson

    return list(islice(drawn(), count))
