"""The training loop: rollouts, credit, update, records.

`train_step` is the whole method on one screen. Baseline and method differ only in the
credit rule and the grader that the config names. Whatever a step needs from the steps
before it (weights, optimiser, position in the tasks, surplus groups) is in `TrainState`
and in every checkpoint: k steps, a stop, and k more steps give the same bits as 2k.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from gagar_mini.agent.rollouts import Harness, rollout_group
from gagar_mini.config import CreditConfig, RunConfig
from gagar_mini.cpu_meter import tree_cpu_s
from gagar_mini.grader.background import BackgroundGrader
from gagar_mini.grader.controls import make_grader
from gagar_mini.grader.transcript import grading_row
from gagar_mini.learn.batching import build_batch
from gagar_mini.learn.collecting import Collection, TaskSampler, collect
from gagar_mini.learn.opening import open_dialect, open_engine, open_policy
from gagar_mini.learn.parallel import (
    ALONE,
    Ranks,
    joined_ranks,
    shard,
    whole_policy,
)
from gagar_mini.learn.sharing import share_credit
from gagar_mini.learn.state import (
    TrainState,
    make_optimizer,
    restore_state,
    save_state,
)
from gagar_mini.learn.stopping import Stopper
from gagar_mini.learn.telemetry import Metrics, StepRecord, group_rows, step_metrics
from gagar_mini.learn.update import update_policy
from gagar_mini.model.self_check import check_engine
from gagar_mini.records import Json, RunFolder, open_run, read_metrics
from gagar_mini.types import RolloutGroup, SamplingParams, Task, seed_for
from gagar_mini.world.sandbox import open_sandbox
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.tasks.leaks import with_leaks

TRIAL_TOKENS = 16
"""Tokens sampled after each trial prompt, to compare engine and policy."""


def train(
    config: RunConfig,
    run_dir: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
    on_begin: Callable[[], None] = lambda: None,
) -> dict[str, Json]:
    """Train into `run_dir` and return the summary, which the folder holds as well.

    Started by torchrun, it is one run in several processes: the first one writes, calls
    `on_begin` and has a summary, and the folder must be one that all of them see.

    `on_begin` is called once, when everything is open and the first step begins.

    Ctrl-C ends the run after the step it is in, with a checkpoint; a second one ends it
    at once (KeyboardInterrupt), and it resumes from the newest checkpoint. Raises
    ValueError, before anything is written, for a folder, policy or task set that cannot
    be used, and SandboxUnavailable where no untrusted code can run; ValueError before
    the first step for an engine that samples from another distribution than the policy.
    """
    torch.set_num_threads(config.threads)
    stopper = Stopper()
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(joined_ranks())
        state = stack.enter_context(open_state(config, run_dir, ranks, resume=resume))
        stack.enter_context(stopper.listening())
        return stopper.run(
            run_to_the_end(state, stopper, progress=progress, on_begin=on_begin)
        )


async def train_step(state: TrainState, step: int) -> StepRecord:
    """One step: collect groups, share their credit, update the policy, hand it on."""
    clock = Clock()
    groups, collection = await collect_groups(state, step)
    clock.start("time/credit_s")
    advantages = [credit(group, state.config.credit) for group in groups]
    clock.start("time/update_s")
    batch = build_batch(groups, advantages, state.config)
    await state.engine.sleep()  # until new weights come: its memory is the update's
    update = update_policy(state, batch, step)
    clock.start("time/sync_s")
    await state.engine.sync_weights(whole_policy(state.policy), version=step + 1)
    times = clock.stop(collection)
    times["time/cpu_s"] = sum(state.ranks.gather(times["time/cpu_s"]))
    shares = [share_credit(group, state.config.credit) for group in groups]
    return StepRecord(step, collection, groups, shares, update, times)


async def collect_groups(
    state: TrainState, step: int
) -> tuple[list[RolloutGroup], Collection]:
    """The groups to train on and what happened; the surplus stays in `state`."""
    groups, state.surplus, collection = await collect(
        state.config,
        step,
        surplus=state.surplus,
        sampler=state.sampler,
        sample_group=state.sample_group,
        grader=state.grader,
        ranks=state.ranks,
    )
    return groups, collection


def credit(group: RolloutGroup, config: CreditConfig) -> Float[Tensor, " group"]:
    """The advantages that train; `sharing` has the order of corrections."""
    return share_credit(group, config).after


async def run_to_the_end(
    state: TrainState,
    stopper: Stopper,
    *,
    progress: bool,
    on_begin: Callable[[], None] = lambda: None,
) -> dict[str, Json]:
    """Resume where there is a checkpoint, train, and write the summary, which is empty
    on all ranks but the first."""
    started, is_first = time.monotonic(), state.ranks.is_first
    checkpoint = state.ranks.first(state.run.latest_checkpoint() if is_first else None)
    if checkpoint is not None:
        restore_state(state, checkpoint)
    first_step = 0 if checkpoint is None else checkpoint.step
    if is_first:
        state.run.begin_session(first_step)
        on_begin()
    try:
        steps_done = await run_steps(
            state, first_step, must_stop=lambda: stopper.is_asked, progress=progress
        )
    finally:
        # A round that an interrupt left running ends with the process.
        with contextlib.suppress(RuntimeError):
            await state.engine.close()
    if not is_first:
        return {}
    summary = summarise(state, steps_done, time.monotonic() - started)
    state.run.write_summary(summary)
    return summary


async def run_steps(
    state: TrainState,
    first_step: int,
    *,
    must_stop: Callable[[], bool] = lambda: False,
    progress: bool = True,
) -> int:
    """Train from `first_step` until the config's steps are done or `must_stop` says so.

    Gives the number of steps done, all of them recorded and the last one saved. The
    weights are pushed before the first rollout, fresh or resumed.
    """
    config = state.config
    await state.engine.sync_weights(whole_policy(state.policy), version=first_step)
    await check_first_weights(state)
    with tqdm(
        desc=f"{config.credit.rule} seed {config.seed}",
        unit="step",
        initial=first_step,
        total=config.steps,
        disable=not (progress and state.ranks.is_first),
    ) as bar:
        for step in range(first_step, config.steps):
            record = await train_step(state, step)
            if state.ranks.is_first:
                bar.set_postfix(_headline(write_step(state, record)), refresh=False)
                bar.update()
            stops = state.ranks.any(must_stop()) or step + 1 == config.steps
            if stops or (step + 1) % config.checkpoint_every == 0:
                save_state(state, step + 1)
            if stops:
                return step + 1
    return max(first_step, config.steps)


async def check_first_weights(state: TrainState) -> None:
    """Raise ValueError, which says what to do, where the engine samples from another
    distribution than the policy's, on the run's own prompts."""
    if not state.trial_prompts:
        return
    config, policy = state.config, state.policy
    sampling = SamplingParams(config.rollout.temperature, TRIAL_TOKENS, stop_ids=())
    await check_engine(
        state.engine,
        lambda ids: policy.logits(policy.forward_hidden(ids)),
        state.trial_prompts,
        sampling,
        seed=seed_for(config.seed, "trial"),
        dtype=config.dtype,
        device=next(policy.parameters()).device,
    )


def write_step(state: TrainState, record: StepRecord) -> Metrics:
    """Put a step on record; its metrics."""
    metrics, step = step_metrics(record), record.step
    state.run.write_rollouts(step, group_rows(record))
    state.run.write_gradings(
        step, [grading_row(found) for found in record.collection.gradings]
    )
    state.run.append_metrics(step, metrics)
    return metrics


@contextlib.contextmanager
def open_state(
    config: RunConfig,
    run_dir: str | Path,
    ranks: Ranks = ALONE,
    *,
    resume: bool = False,
) -> Iterator[TrainState]:
    """Everything that a run needs, opened, and closed again however the run ends.

    The run folder comes last, so that a missing policy, sandbox or grader leaves none
    behind, whichever rank misses it.
    """
    policy, tokenizer = open_policy(config)
    dialect = open_dialect(policy, tokenizer, config)
    tasks = with_leaks(
        load_tasks(config.tasks.family, config.tasks.split),
        config.tasks.leak_share,
        seed=config.seed,
    )
    own_tasks = -(-config.sampling.tasks_per_round // ranks.size)
    rows = own_tasks * config.rollout.group_size
    with contextlib.ExitStack() as stack:
        sandbox = open_sandbox(config.sandbox, config.sandbox_image)
        stack.callback(sandbox.close)
        engine = open_engine(policy, tokenizer, config, max_rows=rows)
        harness = Harness(engine, dialect, sandbox)
        grader = make_grader(config.grader, sandbox)
        if grader is not None:
            grader = stack.enter_context(BackgroundGrader(grader))

        async def sample_group(task: Task, group_id: str, seed: int) -> RolloutGroup:
            return await rollout_group(
                harness, task, config.rollout, group_id=group_id, seed=seed
            )

        if config.optim.sharded:
            shard(policy, ranks)
        run = open_shared_run(ranks, run_dir, config, resume=resume)
        yield TrainState(
            config=config,
            run=stack.enter_context(run),
            policy=policy,
            tokenizer=tokenizer,
            optimizer=make_optimizer(policy, config),
            engine=engine,
            sampler=TaskSampler(tasks, seed_for(config.seed, "tasks")),
            sample_group=sample_group,
            trial_prompts=[dialect.prompt_ids(task) for task in tasks[:2]],
            grader=grader,
            ranks=ranks,
        )


def open_shared_run(
    ranks: Ranks, run_dir: str | Path, config: RunConfig, *, resume: bool
) -> RunFolder:
    """The run folder, once all ranks have come so far; the first one holds its lock.

    Raises ValueError on the first rank, as `open_run` does; the others then end without
    a word (SystemExit), as one sentence is enough.
    """
    ranks.gather(None)
    run, problem = None, ""
    if ranks.is_first:
        try:
            run = open_run(run_dir, config, resume=resume)
        except ValueError as error:
            problem = str(error)
    problem = ranks.first(problem)
    if problem and not ranks.is_first:
        raise SystemExit(2)
    if problem:
        raise ValueError(problem)
    return run or RunFolder(Path(run_dir), config, lock=-1)


def summarise(state: TrainState, steps_done: int, wall_s: float) -> dict[str, Json]:
    """How the run ended, with the means of the last tenth of its steps (at least 1)."""
    lines = read_metrics(state.run.path)
    last = lines[-max(1, len(lines) // 10) :]
    means = {}
    for name in lines[-1] if lines else ():
        values = [line[name] for line in last if line.get(name) is not None]
        if name != "step" and values:
            means[name] = sum(values) / len(values)
    is_done = steps_done >= state.config.steps
    return {
        "status": "finished" if is_done else "stopped",
        "steps_done": steps_done,
        "num_updates": state.num_updates,
        "session_wall_s": wall_s,
        "last_steps": len(last),
        "means_over_last_steps": means,
    }


class Clock:
    """Wall time of the parts of a step, one after the other, and its processor time."""

    def __init__(self) -> None:
        self._started, self._cpu_s = time.monotonic(), tree_cpu_s()
        self._marks: list[tuple[str, float]] = []

    def start(self, name: str) -> None:
        self._marks.append((name, time.monotonic()))

    def stop(self, collection: Collection) -> dict[str, float]:
        ends = [moment for _, moment in self._marks[1:]] + [time.monotonic()]
        parts = {
            name: end - begin
            for (name, begin), end in zip(self._marks, ends, strict=True)
        }
        return {
            "time/rollout_s": collection.rollout_s,
            **parts,
            "time/step_s": ends[-1] - self._started,
            "time/cpu_s": tree_cpu_s() - self._cpu_s,
        }


def _headline(metrics: Metrics) -> dict[str, str]:
    names: Sequence[tuple[str, str]] = (
        ("pass", "reward/pass_rate"),
        ("groups", "groups/trained"),
        ("entropy", "policy/entropy"),
    )
    return {
        label: f"{value:.3g}"
        for label, name in names
        if (value := metrics.get(name)) is not None
    }
