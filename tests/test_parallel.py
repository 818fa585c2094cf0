"""One process against several (gloo, forked): the same groups, counts and gradients."""

import asyncio
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bandit import CONFIG, open_bandit, train_bandit
from ranks import on_ranks
from synthetic import FAIL, INFRA, PASS, make_group
from test_train import GOLDEN_LOSSES
from torch.testing import assert_close

from gagar_mini.config import with_overrides
from gagar_mini.learn.batching import build_batch, deal_groups, split_minibatches
from gagar_mini.learn.collecting import TaskSampler
from gagar_mini.learn.opening import own_servers
from gagar_mini.learn.parallel import ALONE, Ranks, interleave, joined_ranks, whole
from gagar_mini.learn.rl import credit, open_shared_run, run_to_the_end
from gagar_mini.learn.stopping import Stopper
from gagar_mini.learn.update import accumulate_gradient
from gagar_mini.records import read_config, read_metrics, read_rollouts

SHARDED = with_overrides(CONFIG, {"optim.sharded": True})


def uneven_groups(count):
    """Groups of 2 to 4 members and 4 to 60 tokens; one member was broken."""
    shapes = [
        ([PASS, FAIL, FAIL], [60, 5, 9]),
        ([PASS, FAIL], [4, 33]),
        ([PASS, PASS, FAIL, INFRA], [20, 7, 5, 50]),
        ([FAIL, PASS], [6, 6]),
        ([PASS, FAIL, FAIL, FAIL], [58, 57, 40, 30]),
    ]
    return [
        make_group(statuses, group_id=str(n), lengths=lengths, vocab_size=250, seed=n)
        for n, (statuses, lengths) in enumerate(shapes[:count])
    ]


# --- without a process ----------------------------------------------------------------


def test_interleave_undoes_own():
    for size in (1, 2, 3, 7):
        items = list(range(5))
        parts = [Ranks(rank, size).own(items) for rank in range(size)]
        assert interleave(parts) == items


def test_groups_are_dealt_whole_and_evenly():
    groups = uneven_groups(5)
    batch = build_batch(groups, [credit(g, CONFIG.credit) for g in groups], CONFIG)
    parts = deal_groups(batch, 3)
    members = [set(part.group_index.tolist()) for part in parts]
    # tokens 185, 74, 37, 32, 12: each goes to who has the fewest so far
    assert members == [{4}, {0}, {1, 2, 3}]
    assert sum(map(len, parts)) == len(batch)
    assert [len(part) for part in deal_groups(batch.rows(torch.tensor([0])), 2)] == [
        1,
        0,
    ]


def test_a_server_samples_for_one_rank():
    hands = [own_servers("http://a http://b http://c", rank, 2) for rank in (0, 1)]
    assert hands == [["http://a", "http://c"], ["http://b"]]
    assert own_servers("", 1, 2) == []  # vLLM in every process
    with pytest.raises(ValueError, match="a server for each"):
        own_servers("http://a", 1, 2)


def test_one_process_is_alone():
    with joined_ranks() as ranks:
        assert ranks is ALONE and ranks.is_first
        assert ranks.gather("a") == ["a"] and ranks.first("a") == "a"
        assert ranks.any(True) and not ranks.any(False)


# --- the gradient ---------------------------------------------------------------------


def gradient_of(config, groups, run_dir, ranks=ALONE):
    """(gradient as one vector, loss, tokens counted) of one optimiser step."""
    with open_shared_run(ranks, run_dir, config, resume=False) as run:
        state = open_bandit(config, run, ranks)
        advantages = [credit(group, config.credit) for group in groups]
        batch = build_batch(groups, advantages, config)
        (minibatch,) = split_minibatches(
            batch, 1, aggregation=config.loss.aggregation, seed=0
        )
        loss, sums, _ = accumulate_gradient(state, minibatch)
        vector = torch.cat([whole(w.grad).flatten() for w in state.policy.parameters()])
        return vector.numpy(), loss, int(sums["num_action_tokens"])


def assert_same_gradient(config, groups, size, tmp_path):
    alone = gradient_of(replace(config, steps=1), groups, tmp_path / "1")

    def work(ranks):
        return gradient_of(config, groups, tmp_path / str(ranks.size), ranks)

    for vector, loss, num_tokens in on_ranks(size, work):
        distance = float(((vector - alone[0]) ** 2).sum() ** 0.5)
        assert distance <= 1e-5 * float((alone[0] ** 2).sum() ** 0.5)
        assert_close(loss, alone[1], atol=1e-6, rtol=1e-5)
        assert num_tokens == alone[2]


@pytest.mark.parametrize(
    ("size", "num_groups"),
    [(2, 5), (2, 1), (4, 5), (4, 2)],
    ids=["uneven", "a rank without data", "four", "two ranks without data"],
)
def test_gradients_add_up_to_those_of_one_process(size, num_groups, tmp_path):
    assert_same_gradient(CONFIG, uneven_groups(num_groups), size, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["token-mean", "prompt-mean", "sequence-mean"])
@pytest.mark.parametrize("num_groups", [5, 1])
def test_sharded_gradients_add_up_too(aggregation, num_groups, tmp_path):
    overrides = {"loss.aggregation": aggregation, "optim.micro_batch_tokens": 64}
    config = with_overrides(SHARDED, overrides)
    assert_same_gradient(config, uneven_groups(num_groups), 2, tmp_path)


# --- whole runs -----------------------------------------------------------------------


def run_recorded(config, run_dir, ranks=ALONE):
    """Steps on recorded groups, whatever the policy; the run folder tells the rest."""
    recorded = uneven_groups(5)

    async def sample_group(task, group_id, seed):
        number = int(group_id[-6:])
        group = recorded[number % 5]
        return replace(group, id=group_id, task=task)

    with open_shared_run(ranks, run_dir, config, resume=False) as run:
        state = open_bandit(config, run, ranks)
        state.sample_group = sample_group
        state.sampler = TaskSampler(tuple(g.task for g in recorded), seed=0)
        return asyncio.run(run_to_the_end(state, Stopper(), progress=False))


def credit_rows(run_dir):
    steps = len(read_metrics(run_dir))
    return [read_rollouts(run_dir, step) for step in range(steps)]


def assert_close_metrics(first, second, *, but=("time/", "memory/")):
    for one, other in zip(read_metrics(first), read_metrics(second), strict=True):
        for name in one:
            if not name.startswith(but):
                assert_close(one[name], other[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [CONFIG, SHARDED], ids=["plain", "sharded"])
def test_recorded_groups_get_the_same_credit_and_counts(size, config, tmp_path):
    config = with_overrides(config, {"steps": 3, "optim.lr": 1e-4})
    run_recorded(config, tmp_path / "one")
    on_ranks(size, lambda ranks: run_recorded(config, tmp_path / "many", ranks))
    assert credit_rows(tmp_path / "one") == credit_rows(tmp_path / "many")
    assert_close_metrics(tmp_path / "one", tmp_path / "many")


def tasks_and_ids(run_dir):
    return [[(row["id"], row["task_id"]) for row in step] for step in asked(run_dir)]


def asked(run_dir):
    """The rows of the groups that each step sampled itself."""
    return [
        [row for row in rows if int(row["id"][1:6]) == step]
        for step, rows in enumerate(credit_rows(run_dir))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, SHARDED], ids=["plain", "sharded"])
def test_a_run_goes_on_with_another_number_of_ranks(config, tmp_path):
    """Two ranks, then one, then four, against one throughout: the first steps sample
    the same tokens, and later ones differ by rounding at most."""
    config = with_overrides(config, {"optim.lr": 1e-4})
    train_bandit(config, tmp_path / "one")
    for steps, size in ((2, 2), (4, 1), (6, 4)):
        part = replace(config, steps=steps)

        def work(ranks, part=part, steps=steps):
            return train_bandit(part, tmp_path / "many", resume=steps > 2, ranks=ranks)

        results = on_ranks(size, work) if size > 1 else [work(ALONE)]
        assert results[0]["steps_done"] == steps
        assert results[1:] == [{}] * (size - 1)
    assert tasks_and_ids(tmp_path / "one") == tasks_and_ids(tmp_path / "many")
    assert_close_metrics(tmp_path / "one", tmp_path / "many")
    assert read_config(tmp_path / "many") == config


def test_a_folder_that_is_refused_is_told_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")

    def work(ranks):
        try:
            with open_shared_run(ranks, tmp_path / "run", CONFIG, resume=False):
                return "opened"
        except (ValueError, SystemExit) as error:
            return type(error).__name__

    assert on_ranks(2, work) == ["ValueError", "SystemExit"]


def test_a_rank_that_dies_is_noticed_by_the_others(tmp_path):
    def work(ranks):
        if not ranks.is_first:
            os._exit(9)
        try:
            ranks.gather(None)
        except ConnectionError as error:
            (tmp_path / "told").write_text(str(error))

    with pytest.raises(AssertionError, match="died without a word"):
        on_ranks(2, work)
    assert "another process of the run has ended" in (tmp_path / "told").read_text()


@pytest.mark.slow
def test_torchrun_gives_the_golden_losses_of_one_process(tmp_path):
    """One step: later ones may sample other tokens where rounding differs."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("bandit.py")
    subprocess.run(
        [sys.executable, *command, script, tmp_path / "run"],
        check=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    losses = [line["policy/loss"] for line in read_metrics(tmp_path / "run")]
    assert len(losses) == len(GOLDEN_LOSSES)
    assert_close(losses[0], GOLDEN_LOSSES[0], atol=2e-4, rtol=0)


@pytest.mark.slow
def test_two_nodes_train_as_one_run(tmp_path):
    """The documented command, both nodes on this machine: a rendezvous, a folder that
    both see, one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"""-m torch.distributed.run --nnodes 2 --nproc-per-node 1
        --rdzv-backend c10d --rdzv-id nodes --rdzv-endpoint 127.0.0.1:{port}
        --local-addr 127.0.0.1 -m gagar_mini train --preset tiny --steps 2
        --sampling.tasks-per-round 2 --sampling.groups-per-step 2
        --rollout.group-size 4 --run-dir {tmp_path / "run"}"""
    nodes = [
        subprocess.Popen(
            [sys.executable, *command.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    try:
        told = [node.communicate(timeout=300) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told[0][1] + told[1][1]
    assert sum("done; next" in said for said, _ in told) == 1
    lines = read_metrics(tmp_path / "run")
    # two tasks a round, one a node: all of their groups are on record
    assert [line["step"] for line in lines] == [0, 1]
    assert all(line["groups/sampled"] in (2, 4) for line in lines)
