"""Demonstrations that really run, batches without leaks, a policy that learns them."""

import json
import random

import pytest
import torch

from gagar_mini.agent.dialect import SPECIAL_TOKENS, CompactDialect
from gagar_mini.learn.demonstrations import (
    CheckedWorkspace,
    Demonstration,
    Habits,
    bugs_of,
    context_of,
    demonstrate,
    play,
)
from gagar_mini.learn.sft import (
    SftConfig,
    batches_of,
    fit,
    schedule,
    sft_loss,
    texts_of,
)
from gagar_mini.model.policy import PolicyConfig, TinyPolicy
from gagar_mini.model.tokenizer import train_tokenizer
from gagar_mini.types import Status
from gagar_mini.world.patches import make_patch
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.verifier import verify

ALWAYS_RIGHT = Habits(right_base=1.0, right_max=1.0, right_on_retry=1.0, slip=0.0)
ALWAYS_WRONG = Habits(right_base=0.0, right_per_habit=0.0, retry=0.0, slip=0.0)


@pytest.fixture(scope="module")
def tasks():
    return load_tasks("core", "train")[:12]


@pytest.fixture(scope="module")
def dialect(tasks, sandbox):
    texts = texts_of(tasks, sandbox, 0, Habits())
    tokenizer = train_tokenizer(texts, vocab_size=400, special_tokens=SPECIAL_TOKENS)
    return CompactDialect(tokenizer)


def test_context_is_the_fewest_lines_that_make_an_edit_unambiguous():
    text = "def f():\n    return 1\ndef g():\n    return 1\n"
    assert context_of(text, 2) == "def f():\n"
    assert context_of(text, 3) == ""


@pytest.mark.parametrize(
    ("habits", "status"), [(ALWAYS_RIGHT, Status.PASS), (ALWAYS_WRONG, Status.FAIL)]
)
def test_the_demonstrator_passes_exactly_when_its_lines_are_right(
    tasks, dialect, sandbox, habits, status
):
    for seed, task in enumerate(tasks):
        workspace = CheckedWorkspace(task, sandbox, {})
        script = demonstrate(task, random.Random(seed), habits)
        demonstration = play(script, workspace, dialect)
        taught = zip(demonstration.ids, demonstration.is_taught, strict=True)
        assert sum(t for i, t in taught if i == dialect.stop_ids[0]) == len(
            demonstration.calls
        )
        patch = make_patch(task.files, workspace.files)
        assert verify(task, patch, sandbox, seed=seed).status is status


def test_clean_style_leaves_nothing_but_the_repair(tasks, dialect, sandbox):
    habits = Habits(clean=1.0, right_base=1.0, right_max=1.0)
    for task in tasks:
        workspace = CheckedWorkspace(task, sandbox, {})
        play(demonstrate(task, random.Random(0), habits), workspace, dialect)
        for bug in bugs_of(task):
            assert bug.gold in workspace.files[bug.path].decode()
        assert workspace.files.keys() == task.files.keys()


def test_every_wrong_line_differs_from_the_right_one(tasks):
    for task in tasks:
        for bug in json.loads(task.metadata["bugs"]):
            assert bug["wrong"] and bug["gold"] not in bug["wrong"]


def demonstrations(num: int) -> list[Demonstration]:
    rng = random.Random(0)
    return [
        Demonstration([1 + i % 7] * rng.randint(2, 200), [], []) for i in range(num)
    ]


def test_batches_hold_every_demonstration_once_in_rows_of_its_own():
    drawn = demonstrations(60)
    drawn = [Demonstration(d.ids, [True] * len(d.ids), []) for d in drawn]
    batches = batches_of(drawn, batch_tokens=1024, seed=0)
    assert sum(len(ids) for ids, _ in batches) == len(drawn)
    assert sum(int((ids > 0).sum()) for ids, _ in batches) == sum(
        len(d.ids) for d in drawn
    )
    for ids, _ in batches:
        assert ids.shape[1] % 64 == 0
        assert ids.numel() <= 1024 or len(ids) == 1


def test_loss_is_the_weighted_mean_over_actions_and_context():
    policy = TinyPolicy(PolicyConfig(vocab_size=16), seed=0)
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()  # uniform: every token costs log 16
        loss = sft_loss(
            policy, ids, torch.tensor([[0.0, 1.0, -1.0, 0.0]]), context_weight=0.5
        )
    assert loss.item() == pytest.approx(torch.tensor(16.0).log().item(), abs=1e-2)


def test_learning_rate_rises_then_falls_to_a_tenth():
    rates = [schedule(progress / 100, 0.1) for progress in range(101)]
    assert rates.index(max(rates)) == 10
    assert rates[-1] == pytest.approx(0.1)


def test_a_policy_learns_what_it_is_shown():
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    shown = [Demonstration(ids, [False] + [True] * 7, [])] * 128
    policy = TinyPolicy(PolicyConfig(vocab_size=16), seed=0)
    config = SftConfig(batch_tokens=256, threads=1)
    assert fit(policy, shown, config) < 0.2


def test_a_slip_is_shown_but_not_taught(tasks, dialect, sandbox):
    habits = Habits(clean=1.0, slip=1.0, check_if_clean=0.0)
    workspace = CheckedWorkspace(tasks[0], sandbox, {})
    shown = play(demonstrate(tasks[0], random.Random(0), habits), workspace, dialect)
    ends = [
        t
        for i, t in zip(shown.ids, shown.is_taught, strict=True)
        if i == dialect.stop_ids[0]
    ]
    names = [call.name for call in shown.calls]
    first_edit = names.index("edit")
    assert names[first_edit : first_edit + 3] == ["edit", "view", "edit"]
    assert ends[first_edit : first_edit + 3] == [False, True, True]
