"""The smallest training that uses the whole loop: say a lucky word in a few tokens.

A "task" passes when the first sampled token is an even id; a third of the ids end the
completion, and shorter ones are graded higher. Sampling, dynamic sampling,
grading, credit, update, records and checkpoints are the real ones; only the agent and
the hidden tests are replaced by that rule, since both take a sandbox.

    python tests/bandit.py RUN_DIR [--resume]     trains; prints the losses
"""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from synthetic import make_task, make_trajectory

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.learn.collecting import TaskSampler
from gagar_mini.learn.parallel import ALONE, Ranks, joined_ranks, shard
from gagar_mini.learn.rl import open_shared_run, run_to_the_end
from gagar_mini.learn.state import TrainState, make_optimizer
from gagar_mini.learn.stopping import Stopper
from gagar_mini.model.policy import PolicyConfig, TinyPolicy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.records import RunFolder, read_metrics
from gagar_mini.types import (
    Candidate,
    CandidateGrade,
    GroupGrade,
    Outcome,
    RolloutGroup,
    SamplingParams,
    Status,
    Task,
    Tier,
    seed_for,
)

TOKENIZER = train_tokenizer(["a"], vocab_size=260, special_tokens=["<|end|>"])
STOP_IDS = tuple(range(0, len(TOKENIZER), 3))
SIZES = PolicyConfig(
    vocab_size=len(TOKENIZER),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
CONFIG = with_overrides(
    RunConfig(),
    {
        "steps": 6,
        "checkpoint_every": 2,
        "rollout.group_size": 4,
        "rollout.max_context_tokens": 64,
        "sampling.groups_per_step": 3,
        "sampling.tasks_per_round": 3,
        "credit.rule": "gagar",
        "grader.name": "shortest",
        "optim.lr": 1e-2,
    },
)


class ShortestCompletion:
    """A grader: fewer tokens are better, and the shortest alone is T1."""

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        lengths = {
            candidate.id: candidate.turns[0].num_action_tokens
            for candidate in candidates
            if candidate.outcome.status is Status.PASS
        }
        shortest = min(lengths.values())
        return GroupGrade(
            {
                name: CandidateGrade(
                    (3, 3, 3, 3, 3), Tier.T1 if n == shortest else Tier.T2, n
                )
                for name, n in lengths.items()
            }
        )


def open_bandit(config: RunConfig, run: RunFolder, ranks: Ranks = ALONE) -> TrainState:
    policy = TinyPolicy(SIZES, seed=config.seed)
    engine = TorchEngine(policy, max_rows=16, max_context=64)
    if config.optim.sharded:
        shard(policy, ranks)
    sampling = SamplingParams(config.rollout.temperature, 4, STOP_IDS)

    async def member(task: Task, name: str, prompt: list[int], seed: int):
        with engine.conversation() as conversation:
            completion = await conversation.complete(prompt, sampling, seed)
        ids = np.concatenate([prompt, completion.ids])
        is_lucky = completion.ids[0] % 2 == 0
        trajectory = make_trajectory(
            name,
            task,
            ids,
            len(prompt),
            completion.logprobs,
            weight_version=completion.weight_version,
        )
        return trajectory, Outcome(Status.PASS if is_lucky else Status.FAIL)

    async def sample_group(task: Task, group_id: str, seed: int) -> RolloutGroup:
        prompt = [1, 2 + int(task.id.rpartition("-")[2])]
        members = await asyncio.gather(
            *(
                member(task, f"{group_id}/{index}", prompt, seed_for(seed, index))
                for index in range(config.rollout.group_size)
            )
        )
        trajectories, outcomes = zip(*members, strict=True)
        return RolloutGroup(group_id, task, tuple(trajectories), tuple(outcomes))

    tasks = tuple(make_task(f"bandit-{number}") for number in range(4))
    return TrainState(
        config=config,
        run=run,
        policy=policy,
        tokenizer=TOKENIZER,
        optimizer=make_optimizer(policy, config),
        engine=engine,
        sampler=TaskSampler(tasks, seed_for(config.seed, "tasks")),
        sample_group=sample_group,
        grader=ShortestCompletion(),
        ranks=ranks,
    )


def train_bandit(
    config: RunConfig, run_dir: Path, *, resume: bool = False, ranks: Ranks = ALONE
) -> dict:
    stopper = Stopper()
    run = open_shared_run(ranks, run_dir, config, resume=resume)
    with run, stopper.listening():
        state = open_bandit(config, run, ranks)
        return stopper.run(run_to_the_end(state, stopper, progress=False))


if __name__ == "__main__":
    with joined_ranks() as all_ranks:
        is_resumed = "--resume" in sys.argv
        train_bandit(CONFIG, Path(sys.argv[1]), resume=is_resumed, ranks=all_ranks)
    print([line["policy/loss"] for line in read_metrics(sys.argv[1])])
