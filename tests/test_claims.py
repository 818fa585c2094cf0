"""Verdicts: paired over seeds; one seed decides nothing; no effect may be expected."""

import math

import pytest

from gagar_mini.config import PRESETS, with_overrides
from gagar_mini.view.claims import Claim, claims_markdown, judge_claims, verdict_of
from gagar_mini.view.compare import Run, method_of

CLAIM = Claim("passes more", "gagar + rubric", "binary", "pass_rate", 1, "this project")


def a_run(tmp_path, seed, pass_rate, **settings):
    config = with_overrides(PRESETS["tiny"](), {"seed": seed, **settings})
    budget = {"max_turns": config.rollout.max_turns}
    budget["max_tokens"] = config.rollout.max_action_tokens
    tight = {"max_turns": 2, "max_tokens": 50, "pass_rate": 0.0}
    evaluations = [tight, {**budget, "pass_rate": pass_rate}]
    return Run(tmp_path, config, method_of(config), [], evaluations)


def test_effect_is_the_mean_of_paired_differences(tmp_path):
    method = {"credit.rule": "gagar", "grader.name": "rubric"}
    runs = [
        a_run(tmp_path, seed, rate, **settings)
        for settings, rates in (({}, (0.1, 0.5, 0.9)), (method, (0.2, 0.6, 1.0)))
        for seed, rate in enumerate(rates)
    ]
    (verdict,) = judge_claims(runs, [CLAIM])
    # the seeds differ widely, their pairs do not: every difference is .1
    assert verdict.effect == pytest.approx(0.1)
    assert verdict.low == pytest.approx(0.1)
    assert (verdict.num_seeds, verdict.verdict) == (3, "reproduced")
    assert "| +0.100 |" in claims_markdown([verdict])


@pytest.mark.parametrize(
    ("sign", "low", "high", "verdict"),
    [
        (1, 0.1, 0.2, "reproduced"),
        (-1, -0.2, -0.1, "reproduced"),
        (1, -0.1, 0.2, "not reproduced"),
        (1, -0.2, -0.1, "contradicted"),
        (0, -0.1, 0.2, "consistent"),
        (0, 0.1, 0.2, "contradicted"),
        (1, -math.inf, math.inf, "not testable with one seed"),
    ],
)
def test_verdicts(sign, low, high, verdict):
    assert verdict_of(sign, low, high) == verdict
