"""The training loop as a whole: golden losses, resumption to the bit, and learning.

The golden losses are what `python tests/bandit.py /tmp/new-folder` prints.
"""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bandit import CONFIG, SIZES, open_bandit, train_bandit
from safetensors.torch import load_file
from synthetic import FAIL, INFRA, PASS, make_grade, make_group, make_task
from torch.testing import assert_close

from gagar_mini.agent.dialect import SPECIAL_TOKENS, CompactDialect
from gagar_mini.agent.rollouts import Harness, rollout_group
from gagar_mini.agent.scripted import ScriptedEngine
from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.grader.controls import make_grader
from gagar_mini.learn.batching import build_batch
from gagar_mini.learn.collecting import TaskSampler, collect
from gagar_mini.learn.losses import token_entropy, token_logprobs
from gagar_mini.learn.rl import credit, run_to_the_end, train
from gagar_mini.learn.sharing import share_credit
from gagar_mini.learn.state import make_optimizer, restore_state
from gagar_mini.learn.stopping import Stopper
from gagar_mini.learn.telemetry import METRICS, credit_metrics
from gagar_mini.learn.update import action_logprobs, update_policy
from gagar_mini.model.policy import TinyPolicy, save_policy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.records import open_run, read_metrics, read_rollouts
from gagar_mini.types import RolloutGroup, ToolCall, UnusableGrade
from gagar_mini.world.patches import apply_patch
from gagar_mini.world.tasks import load_tasks

GOLDEN_LOSSES = [-0.060304, 0.048664, 0.016313, 0.043647, -0.066833, -0.019471]
ROOT = Path(__file__).parents[1]
GAGAR = with_overrides(RunConfig(), {"credit.rule": "gagar", "grader.name": "rubric"})


# --- credit ---------------------------------------------------------------------------


def test_credit_masks_then_revokes_then_shares():
    grade = make_grade({"g/0": "T1", "g/1": "T3"})
    grade = replace(grade, confirmed_hacks=("g/2",))
    group = make_group([PASS, PASS, PASS, FAIL, INFRA], grade=grade)
    # The hack is a failure before any mean is taken: rewards 1 1 0 0, mean 1/2.
    share = share_credit(group, GAGAR.credit)
    assert share.before.tolist() == [0.5, 0.5, -0.5, -0.5, 0.0]
    # f = (1, .2): lambda 5/3 is capped at 1.5, see the golden vectors of the paper.
    assert share.is_cap_hit
    assert_close(share.scale, 5 / 3)
    assert_close(
        credit(group, GAGAR.credit),
        torch.tensor([0.775, 0.175, -0.475, -0.475, 0.0], dtype=torch.float64),
    )


def test_a_group_without_a_grade_keeps_the_advantages_of_grpo():
    group = make_group([PASS, FAIL, FAIL, FAIL])
    for rule in ("binary", "downweight", "gagar", "gagar-exact"):
        shared = credit(group, replace(GAGAR.credit, rule=rule))
        assert shared.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_token_mass_is_not_conserved_though_the_sum_is():
    config = replace(GAGAR.credit, rule="gagar-exact")
    grade = make_grade({"g/0": "T1", "g/1": "T2"})
    # Two prompt tokens each, so 10 and 40 action tokens.
    group = make_group([PASS, PASS, FAIL, FAIL], lengths=[12, 42, 6, 6], grade=grade)
    metrics = credit_metrics([group], [share_credit(group, config)])
    scale = 2 / (1 + 0.85)
    assert_close(metrics["credit/sum_before"], 1.0)
    assert_close(metrics["credit/sum_after"], 1.0)
    assert_close(metrics["credit/token_mass_before"], 0.5 * 10 + 0.5 * 40)
    assert_close(metrics["credit/token_mass_after"], scale * (5 + 0.85 * 20))


# --- dynamic sampling -----------------------------------------------------------------


def test_the_task_walk_visits_every_task_once_an_epoch_and_depends_on_its_place_only():
    tasks = [make_task(f"t-{number}") for number in range(5)]
    walk = [task.id for _, task in TaskSampler(tasks, seed=1).draw(10)]
    assert sorted(walk[:5]) == sorted(walk[5:]) == sorted(task.id for task in tasks)
    assert walk[:5] != walk[5:]
    later = TaskSampler(tasks, seed=1, num_drawn=7)
    assert [task.id for _, task in later.draw(3)] == walk[7:]


def collect_with(statuses_of, *, surplus=(), grader=None, **overrides):
    """One collection where the n-th drawn task gives a group with `statuses_of(n)`."""
    config = with_overrides(CONFIG, overrides)
    sampler = TaskSampler([make_task()], seed=0)

    async def sample_group(task, group_id: str, seed: int) -> RolloutGroup:
        return make_group(statuses_of(int(group_id[-6:])), group_id=group_id)

    return asyncio.run(
        collect(
            config,
            0,
            surplus=list(surplus),
            sampler=sampler,
            sample_group=sample_group,
            grader=grader,
        )
    )


def test_uniform_groups_are_dropped_and_rounds_are_bounded():
    groups, surplus, collection = collect_with(
        lambda number: [PASS, FAIL] if number == 4 else [FAIL, FAIL]
    )
    assert [group.id for group in groups] == ["s00000-t000004"]
    assert surplus == []
    assert collection.num_rounds == CONFIG.sampling.max_rounds == 2
    assert len(collection.sampled) == 6
    assert list(collection.use.values()).count("uninformative") == 5


def test_nothing_informative_is_an_empty_step_and_no_endless_loop():
    groups, surplus, _ = collect_with(lambda number: [PASS, PASS])
    assert groups == surplus == []


def test_harness_failures_are_no_failures_of_the_policy():
    groups, _, collection = collect_with(
        lambda number: [[PASS, INFRA], [PASS, FAIL, INFRA], [PASS, PASS, INFRA]][
            number % 3
        ],
        **{"sampling.max_rounds": 1},
    )
    assert [group.id[-1] for group in groups] == ["1"]
    assert list(collection.use.values()) == ["infra", "trained", "uninformative"]


def test_the_oldest_surplus_trains_first_and_what_is_left_twice_is_stale():
    carried = [make_group([PASS, FAIL], group_id=f"old-{n}") for n in range(4)]
    groups, surplus, collection = collect_with(
        lambda number: [PASS, FAIL], surplus=carried
    )
    assert [group.id for group in groups] == ["old-0", "old-1", "old-2"]
    assert collection.use["old-3"] == "stale"
    assert [group.id[-1] for group in surplus] == ["0", "1", "2"]
    assert collection.num_rounds == 1


class RefusingGrader:
    """Cannot grade anything."""

    async def grade(self, task, candidates, seed):
        raise UnusableGrade("no-evidence")


def test_a_refused_grade_is_counted_and_the_group_keeps_its_advantages():
    groups, _, _ = collect_with(lambda n: [PASS, PASS, FAIL], grader=RefusingGrader())
    assert {group.fallback_reason for group in groups} == {"no-evidence"}
    assert (
        credit(groups[0], GAGAR.credit).tolist()
        == credit(groups[0], RunConfig().credit).tolist()
    )


def test_a_failing_rollout_ends_the_step():
    def explode(number):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        collect_with(explode)


# --- the update -----------------------------------------------------------------------


@pytest.fixture
def state(tmp_path):
    with open_run(tmp_path / "run", CONFIG) as run:
        yield open_bandit(CONFIG, run)


def bandit_batch(state, **overrides):
    groups = [
        make_group(
            [PASS, FAIL, FAIL],
            group_id=str(n),
            vocab_size=state.policy.config.vocab_size,
        )
        for n in range(2)
    ]
    config = with_overrides(CONFIG, overrides)
    return build_batch(groups, [credit(g, config.credit) for g in groups], config)


def test_logits_at_actions_only_give_the_same_log_probs(state):
    batch = bandit_batch(state)
    logprobs, entropies = action_logprobs(state.policy, batch, temperature=0.7)
    logits = state.policy(batch.ids)
    mask = batch.action_mask
    expected = token_logprobs(logits, batch.ids, temperature=0.7)
    assert_close(logprobs, torch.where(mask, expected, 0.0), atol=1e-5, rtol=1e-5)
    expected = token_entropy(logits, temperature=0.7)
    assert_close(entropies, torch.where(mask, expected, 0.0), atol=1e-5, rtol=1e-5)


def test_an_empty_step_moves_nothing(state):
    update_policy(state, bandit_batch(state), 0)  # so that Adam has momentum
    before = {name: w.clone() for name, w in state.policy.state_dict().items()}
    metrics = update_policy(state, build_batch([], [], CONFIG), 1)
    assert metrics == {"policy/updates": 0}
    assert all(torch.equal(before[n], w) for n, w in state.policy.state_dict().items())


def test_the_split_into_micro_batches_changes_memory_only(tmp_path):
    weights = []
    for max_tokens in (1, 128, 10_000):
        config = with_overrides(CONFIG, {"optim.micro_batch_tokens": max_tokens})
        with open_run(tmp_path / str(max_tokens), config) as run:
            state = open_bandit(config, run)
            update_policy(state, bandit_batch(state), 0)
            weights.append(state.policy.state_dict())
    for name in weights[0]:
        # Adam divides by the size of the gradient: rounding grows where that is tiny.
        assert_close(weights[0][name], weights[2][name], atol=1e-4, rtol=0)
        assert_close(weights[1][name], weights[2][name], atol=1e-4, rtol=0)


def test_a_loss_that_is_not_finite_keeps_its_batch_and_ends_the_run(state):
    batch = bandit_batch(state)
    broken = replace(batch, advantages=batch.advantages * float("nan"))
    before = {name: w.clone() for name, w in state.policy.state_dict().items()}
    with pytest.raises(FloatingPointError, match="step 7 gave loss nan"):
        update_policy(state, broken, 7)
    kept = load_file(state.run.path / "failed_step_00007.safetensors")
    assert kept["advantages"].isnan().all()
    assert all(torch.equal(before[n], w) for n, w in state.policy.state_dict().items())


def test_on_policy_the_loss_is_near_zero_and_the_gradient_is_not(tmp_path):
    config = with_overrides(CONFIG, {"steps": 1, "optim.num_minibatches": 1})
    train_bandit(config, tmp_path / "run")
    (line,) = read_metrics(tmp_path / "run")
    assert line["policy/sampler_drift"] < 1e-5
    assert line["policy/grad_norm"] > 1e-3
    assert line["policy/clip_fraction"] == 0


# --- the run --------------------------------------------------------------------------


def stable(lines):
    """Metrics without what differs between two equal runs: clocks and memory."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
        for line in lines
    ]


def assert_equal_runs(first, second, step):
    assert stable(read_metrics(first)) == stable(read_metrics(second))
    for index in range(step):
        assert read_rollouts(first, index) == read_rollouts(second, index)
    for name in ("model", "optimizer", "surplus"):
        file = Path("checkpoints") / f"step_{step:05d}" / f"{name}.safetensors"
        assert (first / file).read_bytes() == (second / file).read_bytes()


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    summary = train_bandit(CONFIG, path)
    assert summary["status"] == "finished"
    return path


def test_golden_losses(whole_run):
    losses = [line["policy/loss"] for line in read_metrics(whole_run)]
    assert_close(losses, GOLDEN_LOSSES, atol=2e-4, rtol=0)


def test_every_metric_has_a_meaning_and_groups_tell_their_use(whole_run):
    lines = read_metrics(whole_run)
    for line in lines:
        assert set(METRICS) <= set(line)
        known = {name for name in line if not name.startswith("grader/fallback/")}
        assert known <= {*METRICS, "step"}
    rows = [row for step in range(6) for row in read_rollouts(whole_run, step)]
    trained = [row for row in rows if row["use"] == "trained"]
    assert len(trained) == sum(line["groups/trained"] for line in lines) > 0
    assert all((row["use"] == "trained") == (row["credit"] is not None) for row in rows)


def test_k_steps_and_k_more_equal_2k_steps_to_the_bit(whole_run, tmp_path):
    path = tmp_path / "run"
    assert train_bandit(replace(CONFIG, steps=3), path)["steps_done"] == 3
    train_bandit(CONFIG, path, resume=True)
    assert_equal_runs(path, whole_run, 6)


def test_a_damaged_checkpoint_costs_steps_but_not_the_run(whole_run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole_run, path)
    (path / "checkpoints" / "step_00006" / "model.safetensors").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="is damaged"):
        train_bandit(CONFIG, path, resume=True)
    assert_equal_runs(path, whole_run, 6)


def test_other_tasks_than_the_checkpoint_saw_are_refused(whole_run, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole_run, path)
    with open_run(path, CONFIG, resume=True) as run:
        state = open_bandit(CONFIG, run)
        state.sampler.tasks = state.sampler.tasks[1:]
        with pytest.raises(ValueError, match="have changed since the checkpoint"):
            restore_state(state, run.latest_checkpoint())


def start(path, *arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "bandit.py"), str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(path, step, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while len(read_metrics(path)) <= step:
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_run_resumes_to_the_same_bits(whole_run, tmp_path, seed):
    path = tmp_path / "run"
    rng = random.Random(seed)
    process = start(path)
    wait_for_step(path, rng.randrange(5))
    time.sleep(rng.random() * 0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = start(path, "--resume")
    output, _ = done.communicate(timeout=120)
    assert done.returncode == 0, output
    assert_equal_runs(path, whole_run, 6)


@pytest.mark.slow
def test_ctrl_c_ends_with_a_checkpoint_and_resumes(whole_run, tmp_path):
    path = tmp_path / "run"
    process = start(path)
    wait_for_step(path, 0)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopping after this step" in output
    assert (path / "summary.json").exists()
    train_bandit(CONFIG, path, resume=True)
    assert_equal_runs(path, whole_run, 6)


def test_training_inside_a_running_event_loop(tmp_path):
    async def notebook():
        return train_bandit(replace(CONFIG, steps=1), tmp_path / "run")

    assert asyncio.run(notebook())["steps_done"] == 1


def test_the_bandit_is_learned(tmp_path):
    config = with_overrides(
        CONFIG, {"steps": 15, "rollout.group_size": 8, "optim.lr": 2e-2}
    )
    train_bandit(config, tmp_path / "run")
    rates = [line["reward/pass_rate"] for line in read_metrics(tmp_path / "run")]
    assert np.mean(rates[:3]) < 0.8
    assert np.mean(rates[-3:]) > 0.9


def test_samples_are_at_most_one_step_old(whole_run):
    """Weights are pushed at every step, whatever happened in it."""
    ages = set()
    for step in range(6):
        for row in read_rollouts(whole_run, step):
            is_carried = int(row["id"][1:6]) < step
            for trajectory in row["trajectories"]:
                ages.add((is_carried, step - trajectory["weight_version"]))
    assert ages == {(False, 0), (True, 1)}


def test_a_second_interrupt_ends_the_run_at_once():
    stopper = Stopper()
    closed = []

    async def endless() -> dict:
        try:
            while True:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.01)
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stopper.listening():
        stopper.run(endless())
    assert stopper.is_asked
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_missing_policy_leaves_no_run_folder(tmp_path):
    config = replace(CONFIG, policy=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_whole_loop_on_real_tasks_in_the_real_sandbox(sandbox, tmp_path):
    """An untrained policy passes nothing: steps are recorded, nothing is updated."""
    tokenizer = train_tokenizer(["x"], vocab_size=300, special_tokens=SPECIAL_TOKENS)
    sizes = replace(SIZES, vocab_size=len(tokenizer), max_position_embeddings=1024)
    save_policy(TinyPolicy(sizes), tokenizer, tmp_path / "policy")
    config = with_overrides(
        CONFIG,
        {
            "policy": str(tmp_path / "policy"),
            "steps": 2,
            "rollout.group_size": 2,
            "rollout.max_turns": 2,
            "rollout.max_new_tokens": 8,
            "rollout.max_context_tokens": 1024,
            "sampling.tasks_per_round": 2,
            "sampling.max_rounds": 1,
        },
    )
    summary = train(config, tmp_path / "run", progress=False)
    assert summary["status"] == "finished"
    lines = read_metrics(tmp_path / "run")
    assert [line["reward/pass_rate"] for line in lines] == [0.0, 0.0]
    assert [line["policy/updates"] for line in lines] == [0, 0]
    assert lines[0]["rollout/malformed_rate"] == 1.0
    assert (tmp_path / "run" / "checkpoints" / "step_00002").is_dir()


def test_real_patches_are_verified_graded_and_trained_on(sandbox, tmp_path):
    """Gold, gold with a print, and two that give up: all but the sampling is real."""
    task = load_tasks("core", "train")[0]
    tokenizer = train_tokenizer(
        [text.decode() for text in task.files.values()],
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
    )
    dialect = CompactDialect(tokenizer)
    gold = apply_patch(task.files, task.gold_patch)
    (path,) = [path for path in gold if gold[path] != task.files.get(path)]
    old, new = task.files[path].decode(), gold[path].decode()
    submit = dialect.call_ids(ToolCall("submit", {}), [])

    def repair(text: str) -> list[int]:
        return dialect.call_ids(
            ToolCall("edit", {"path": path, "old": old, "new": text}), []
        )

    scripts = [[repair(new), submit], [repair(new + "print(1)\n"), submit], [submit]]
    engine = ScriptedEngine([*scripts, [submit]])
    overrides = {
        "steps": 1,
        "grader.name": "rubric",
        "rollout.max_new_tokens": 1000,
        "rollout.max_action_tokens": 1000,
        "rollout.max_context_tokens": 2048,
        "sampling.tasks_per_round": 1,
        "sampling.groups_per_step": 1,
    }
    config = with_overrides(CONFIG, overrides)
    harness = Harness(engine, dialect, sandbox)

    async def sample_group(task, group_id: str, seed: int) -> RolloutGroup:
        return await rollout_group(
            harness, task, config.rollout, group_id=group_id, seed=seed
        )

    sizes = replace(SIZES, vocab_size=len(tokenizer), max_position_embeddings=2048)
    policy = TinyPolicy(sizes)
    with open_run(tmp_path / "run", config) as run:
        state = replace(
            open_bandit(config, run),
            policy=policy,
            tokenizer=tokenizer,
            optimizer=make_optimizer(policy, config),
            engine=engine,
            sampler=TaskSampler((task,), seed=0),
            sample_group=sample_group,
            grader=make_grader(config.grader),
        )
        asyncio.run(run_to_the_end(state, Stopper(), progress=False))
    (line,) = read_metrics(tmp_path / "run")
    (row,) = read_rollouts(tmp_path / "run", 0)
    assert line["reward/pass_rate"] == 0.5
    assert line["patch/clean_share"] == 0.5
    assert line["policy/updates"] == 1
    clean, noisy, *failures = row["credit"]["advantages_after"]
    assert clean > noisy > 0 > failures[0] == failures[1]
    assert_close(clean + noisy + sum(failures), 0.0)
