"""Knobs: one sentence for every slip, and a round trip through dict, YAML and flags."""

import dataclasses
import re

import pytest
import tyro

from gagar_mini.config import (
    PRESETS,
    RunConfig,
    differences,
    from_dict,
    from_yaml,
    to_dict,
    to_yaml,
    with_overrides,
)


def test_dotted_names_set_nested_knobs_and_leave_the_rest():
    config = with_overrides(RunConfig(), {"rollout.group_size": 4, "seed": "7"})
    assert differences(RunConfig(), config) == {
        "seed": (0, 7),
        "rollout.group_size": (8, 4),
    }


def test_strings_are_read_as_the_type_of_the_knob():
    config = with_overrides(
        RunConfig(),
        {"optim.lr": "3e-4", "credit.scale-by-std": "true", "optim.warmup_steps": "0"},
    )
    assert config.optim.lr == 3e-4
    assert config.credit.scale_by_std is True
    assert config.optim.warmup_steps == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rollout.group_sise": 4}, "did you mean 'rollout.group_size'"),
        ({"group_size": 4}, "did you mean 'rollout.group_size'"),
        ({"rollout": 4}, "no setting 'rollout'"),
        ({"rollout.group_size": "four"}, "'four': it must be of type int"),
        ({"rollout.group_size": 4.5}, "4.5: it must be of type int"),
        ({"rollout.group_size": True}, "True: it must be of type int"),
        ({"credit.rule": "gagr"}, "one of binary, downweight, gagar"),
        ({"rollout.group_size": 1}, "at least 2"),
        ({"rollout.temperature": 0.0}, "greedy rollouts"),
        ({"credit.rule": "gagar"}, "needs a grader"),
        ({"sampling.max_rounds": 0}, "must be above 0"),
        ({"loss.band_low": 1.5}, "must hold the on-policy ratio 1"),
        ({"grader.reference": "random"}, "a real grader"),
        ({"optim.lr": float("nan")}, "must be above 0"),
        ({"optim.lr": float("inf")}, "must be a finite number"),
        ({"optim.lr": 10**400}, "too large a number"),
        ({"rollout.temperature": float("nan")}, "must be a finite number"),
        ({"credit.max_scale": float("nan")}, "must be a finite number"),
        ({"optim.weight_decay": -0.1}, "may be below 0"),
        ({"rollout.max_observation_chars": 0}, "must be above 0"),
    ],
)
def test_every_slip_is_one_sentence(overrides, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        with_overrides(RunConfig(), overrides)
    assert "\n" not in str(error.value)


def test_combinations_are_checked_after_all_overrides():
    config = with_overrides(
        RunConfig(), {"credit.rule": "gagar", "grader.name": "rubric"}
    )
    assert config.credit.rule == "gagar"


@pytest.mark.parametrize("preset", PRESETS.values(), ids=list(PRESETS))
def test_round_trips(preset):
    config = with_overrides(preset(), {"optim.lr": 1e-5, "seed": 3})
    assert from_dict(to_dict(config)) == config
    assert from_yaml(to_yaml(config)) == config
    assert dataclasses.replace(config, seed=3) == config


def test_yaml_that_is_none_is_refused():
    with pytest.raises(ValueError, match="no valid YAML"):
        from_yaml("a: [")
    with pytest.raises(ValueError, match="mapping"):
        from_yaml("- 1")
    with pytest.raises(ValueError, match="nested too deeply"):
        from_yaml("[" * 5000)


def test_flags_are_built_from_the_dataclasses():
    arguments = ["--rollout.group-size", "4", "--credit.rule", "binary"]
    config = tyro.cli(RunConfig, args=arguments, default=PRESETS["tiny"]())
    assert config == with_overrides(PRESETS["tiny"](), {"rollout.group_size": 4})
