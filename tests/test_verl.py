"""GAGAR inside the installed verl: its registry, its batches, its trainer's queue."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from peer_world import GOLDEN, LOGGED_MAXIMA, T1, T3, ScriptedGrader
from torch.testing import assert_close

from gagar_mini.integrations import verl as ours

pytestmark = pytest.mark.peers

NO_STD = {"norm_adv_by_std_in_grpo": False}
RECIPE = Path(ours.__file__).with_name("verl_recipe.yaml")


def batch_of(rewards, fields, *, groups=None, length=3):
    """A DataProto as verl's agent loops leave it; row i has i % length + 1 tokens."""
    from verl import DataProto

    num_rows = len(rewards)
    mask = torch.zeros(num_rows, length)
    scores = torch.zeros(num_rows, length)
    for row, reward in enumerate(rewards):
        last = row % length
        mask[row, : last + 1] = 1
        scores[row, last] = reward
    objects = np.empty(num_rows, dtype=object)
    objects[:] = fields
    return DataProto.from_dict(
        tensors={"token_level_rewards": scores, "response_mask": mask},
        non_tensors={
            "uid": np.array(groups or ["g"] * num_rows, dtype=object),
            "gagar": objects,
        },
    )


def advantages_of(batch, rule="gagar", sessions=None, **known):
    """[N] through verl's own `compute_advantage`, after a look at each token."""
    from verl.trainer.ppo.ray_trainer import compute_advantage

    ours.register()
    own = sessions or [str(i) for i in range(len(batch))]
    rows = ours.Rows(list(batch.non_tensor_batch["gagar"]), own, **known)
    with ours.rows_at_hand(rows):
        done = compute_advantage(batch, adv_estimator=rule, config=NO_STD)
    spread, mask = done.batch["advantages"], done.batch["response_mask"]
    assert spread.dtype == torch.float32
    assert torch.equal(spread, spread[:, :1] * mask)
    assert torch.equal(spread, done.batch["returns"])
    return spread[:, 0]


def graded(*tiers):
    return [{"tier": tier, "order": order} for tier, order in tiers]


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers_arrive_in_the_tensors_of_verl(name):
    tiers, num_failures, rule, passes, failure = GOLDEN[name]
    batch = batch_of(
        [1.0] * len(tiers) + [0.0] * num_failures,
        [*graded(*tiers), *[{}] * num_failures],
    )
    expected = torch.tensor([*passes, *[failure] * num_failures])
    assert_close(advantages_of(batch, rule), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("tiers", LOGGED_MAXIMA)
def test_maxima_of_the_published_run(tiers):
    num_failures = 16 - len(tiers)
    batch = batch_of(
        [1.0] * len(tiers) + [0.0] * num_failures,
        [*graded(*tiers), *[{}] * num_failures],
    )
    assert advantages_of(batch).max().item() == pytest.approx(
        LOGGED_MAXIMA[tiers], abs=5e-6
    )


def test_groups_go_by_id_wherever_their_rows_lie():
    first, second = graded(T1, T3)
    batch = batch_of(
        [1, 0, 0, 1, 1, 0, 0, 1],
        [first, {}, {}, second, second, {}, {}, first],
        groups=["a", "b", "a", "b", "a", "a", "b", "b"],
    )
    expected = [0.775, -0.475, -0.475, 0.175, 0.175, -0.475, -0.475, 0.775]
    assert_close(advantages_of(batch), torch.tensor(expected), atol=5e-6, rtol=0)


def test_all_outputs_of_a_session_share_what_its_last_one_earned():
    batch = batch_of([0, 1, 1, 0, 0], [{}, *graded(T1, T3), {}, {}])
    advantages = advantages_of(batch, sessions=["s0", "s0", "s1", "s2", "s3"])
    expected = torch.tensor([0.775, 0.775, 0.175, -0.475, -0.475])
    assert_close(advantages, expected, atol=5e-6, rtol=0)


def test_a_hack_is_a_failure_and_a_dead_harness_is_in_no_mean():
    first, second = graded(T1, T3)
    fields = [first, {"is_hack": True}, second, {"is_valid": False}, {}]
    advantages = advantages_of(batch_of([1, 1, 1, 1, 0], fields), "gagar-exact")
    expected = torch.tensor([5 / 6, -0.5, 1 / 6, 0, -0.5])
    assert_close(advantages, expected, atol=5e-6, rtol=0)


def test_a_pass_without_a_tier_makes_the_group_plain_grpo():
    batch = batch_of([1, 1, 0, 0], [*graded(T1), {}, {}, {}])
    assert advantages_of(batch).tolist() == [0.5, 0.5, -0.5, -0.5]


def test_a_grader_is_fed_from_the_fields():
    patches = [{"patch": text} for text in ("a", "b", "c", "d")]
    batch = batch_of([1, 1, 0, 0], patches)
    rows = ours.Rows(patches, list("0123"), prompts=["fix it"] * 4)
    grader = ScriptedGrader((T1, T3))
    rewards = batch.batch["token_level_rewards"].sum(-1)
    index = batch.non_tensor_batch["uid"]
    rows, metrics = ours.grade_rows(rows, index, rewards, grader, timeout_s=5.0, seed=0)
    task, candidates = grader.seen[0]
    assert task.statement == "fix it"
    assert b"".join(candidate.patch for candidate in candidates) == b"abcd"
    assert metrics == {"gagar/gradable_groups": 1.0}
    expected = torch.tensor([0.775, 0.175, -0.475, -0.475])
    advantages = advantages_of(batch, grades=rows.grades)
    assert_close(advantages, expected, atol=5e-6, rtol=0)


def test_what_cannot_be_right_is_refused():
    from verl.trainer.ppo.ray_trainer import compute_advantage

    ours.register()
    batch = batch_of([1, 0], [{}, {}])
    with pytest.raises(ValueError, match="norm_adv_by_std_in_grpo"):
        compute_advantage(batch, adv_estimator="gagar", config={})
    with pytest.raises(ValueError, match="trainer_mode=gagar_sync"):
        compute_advantage(batch, adv_estimator="gagar", config=NO_STD)
    with pytest.raises(ValueError, match="nothing to tell one pass"):
        advantages_of(batch)
    with pytest.raises(ValueError, match="use_kl_in_reward"):
        ours.check_config(NO_STD | {"use_kl_in_reward": True})
    with pytest.raises(ValueError, match="it knows"):
        ours.grader_of({"gagar": {"grader": {"nmae": "rubric"}}})


def test_verl_loads_the_plug_in_by_its_variable():
    code = (
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as get\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get('gagar').keywords, get_trainer_cls('gagar_sync').__mro__[1:3])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VERL_USE_EXTERNAL_MODULES": ours.__name__},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert "{'rule': 'gagar'}" in done.stdout, done.stderr
    assert "GagarAdvantages" in done.stdout and "PPOTrainerSync" in done.stdout


def test_the_recipe_is_a_config_of_verl():
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.config import AlgoConfig
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with initialize_config_dir(str(RECIPE.parent), version_base=None):
        config = compose(RECIPE.stem, ["actor_rollout_ref.model.path=any"])
    OmegaConf.resolve(config.algorithm)
    algorithm = omega_conf_to_dataclass(config.algorithm)
    assert isinstance(algorithm, AlgoConfig)
    ours.check_config(config.algorithm)
    validate_config(config, use_reference_policy=False, use_critic=False)
    grader, timeout_s = ours.grader_of(config)
    assert type(grader).__name__ == "RubricGrader" and timeout_s == 600
    assert config.algorithm.adv_estimator in ours.ESTIMATORS
