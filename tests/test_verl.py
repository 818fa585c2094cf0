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
from gagar_mini.paths import find_checkpoint

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


# --- verl's trainer and its queue, without a Ray cluster ------------------------------


@pytest.fixture
def queue():
    """TransferQueue's own controller and storage as objects of this process, where a
    trainer has Ray start them elsewhere; all goes through their sockets, as ever."""
    import transfer_queue
    from omegaconf import OmegaConf
    from transfer_queue import interface
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    def plain(actor):
        return actor.__ray_metadata__.modified_class

    config = OmegaConf.load(Path(transfer_queue.__file__).with_name("config.yaml"))
    config = OmegaConf.create(
        OmegaConf.to_container(config), flags={"allow_objects": True}
    )
    controller = plain(TransferQueueController)()
    storage = plain(SimpleStorageUnit)(dict(config.backend.SimpleStorage))
    config.controller.zmq_info = controller.get_zmq_server_info()
    config.backend.SimpleStorage.zmq_info = {"0": storage.get_zmq_server_info()}
    interface._maybe_create_tq_client(config)
    yield transfer_queue
    interface._TQ_CLIENT.close()
    interface._TQ_CLIENT = None


def trainer_of(recipe_overrides):
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer.ppo.v1 import get_trainer_cls

    ours.register()
    with initialize_config_dir(str(RECIPE.parent), version_base=None):
        config = compose(RECIPE.stem, recipe_overrides)
    OmegaConf.resolve(config)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    trainer.global_steps = 1
    return trainer


def test_a_step_of_the_trainer_from_the_queue_to_the_weights(queue):
    """Rollouts lie in the queue; the registered trainer grades them and puts advantages
    back; verl's own loss makes a step of a real model of them. What is left of a step
    is Ray's to place on GPUs: sampling, and the actors that hold the shards."""
    from transfer_queue import KVBatchMeta
    from transformers import AutoModelForCausalLM
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.trainer.ppo.v1.agent_loop_tq import list_of_dict_to_tensordict
    from verl.utils.config import omega_conf_to_dataclass

    trainer = trainer_of(["actor_rollout_ref.model.path=any"])
    trainer.grader = ScriptedGrader((T1, T3))
    policy = AutoModelForCausalLM.from_pretrained(find_checkpoint("data/policy/tiny"))
    ids = torch.arange(20, 52).view(4, 8)  # prompts of three tokens, answers of five
    before = answer_logprobs(policy, ids)
    keys = [f"u_{row}_0" for row in range(4)]
    fields = [
        {
            "uid": "u",
            "response_mask": torch.ones(5, dtype=torch.int64),
            "rm_scores": torch.tensor([0, 0, 0, 0, reward]),
            "rollout_log_probs": before[row].detach(),
            "old_log_probs": before[row].detach(),
            "extra_fields": {
                "raw_prompt": [{"role": "user", "content": "fix it"}],
                "gagar": {"patch": f"patch {row}".encode()},
            },
        }
        for row, reward in enumerate([1.0, 1.0, 0.0, 0.0])
    ]
    tags = [{} for _ in keys]
    data = list_of_dict_to_tensordict(fields)
    queue.kv_batch_put(keys=keys, fields=data, tags=tags, partition_id="train")

    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    assert metrics["gagar/gradable_groups"] == 1
    task, candidates = trainer.grader.seen[0]
    assert "fix it" in task.statement
    assert [c.patch for c in candidates] == [
        b"patch 0",
        b"patch 1",
        b"patch 2",
        b"patch 3",
    ]
    names = ["advantages"]
    known = queue.kv_batch_get(keys=keys, partition_id="train", select_fields=names)
    advantages = torch.stack(list(known["advantages"].unbind()))
    expected = torch.tensor([0.775, 0.175, -0.475, -0.475]).unsqueeze(1).expand(4, 5)
    assert_close(advantages, expected, atol=5e-6, rtol=0)

    actor = omega_conf_to_dataclass(trainer.config.actor_rollout_ref.actor)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1e-3)
    logprobs = answer_logprobs(policy, ids)
    loss, _ = get_policy_loss_fn("vanilla")(
        old_log_prob=before.detach(),
        log_prob=logprobs,
        advantages=advantages,
        response_mask=torch.ones(4, 5),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    logprobs.retain_grad()
    loss.backward()
    assert_close(logprobs.grad, -expected / 20)  # the token mean, on-policy
    optimizer.step()
    lift = (answer_logprobs(policy, ids) - before).sum(1)
    assert lift[0] > lift[1] > lift[2:].max() and lift[0] > 0 > lift[2:].min()


def answer_logprobs(policy, ids):
    """[4, 5], of the tokens behind the prompt of three."""
    logprobs = policy(ids).logits[:, 2:-1].log_softmax(-1)
    return logprobs.gather(-1, ids[:, 3:, None]).squeeze(-1)
