"""Statistics: against enumeration and printed tables, and by what they must cover."""

import itertools
import math

import numpy as np
import pytest

from gagar_mini.metrics import (
    bootstrap_interval,
    effective_passes,
    kendall_tau_b,
    mean_interval_over_seeds,
    pairwise_accuracy,
    pass_at_k,
    wilson_interval,
)


@pytest.mark.parametrize(
    ("passes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # the four examples of Newcombe (1998), Table I
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_of_published_examples(passes, trials, low, high):
    assert wilson_interval(passes, trials) == pytest.approx((low, high), abs=6e-5)
    mirrored = wilson_interval(trials - passes, trials)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=6e-5)


@pytest.mark.parametrize(
    ("num_seeds", "quantile"),  # the printed table of Student's t at 0.975
    [(2, 12.706), (3, 4.303), (4, 3.182), (5, 2.776), (10, 2.262), (31, 2.042)],
)
def test_seed_interval_is_students_t(num_seeds, quantile):
    values = np.random.default_rng(0).normal(size=num_seeds)
    mean, low, high = mean_interval_over_seeds(values)
    error = values.std(ddof=1) / math.sqrt(num_seeds)
    assert mean == pytest.approx(values.mean()) == pytest.approx((low + high) / 2)
    assert (high - mean) / error == pytest.approx(quantile, abs=5.1e-4)


def test_one_seed_has_no_spread_to_speak_of():
    assert mean_interval_over_seeds([0.7]) == (0.7, -math.inf, math.inf)


@pytest.mark.parametrize(("n", "c"), [(6, 0), (6, 1), (6, 3), (6, 6), (5, 4)])
def test_pass_at_k_equals_the_enumeration(n, c):
    passed = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        draws = list(itertools.combinations(passed, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_stays_exact_for_many_samples():
    assert pass_at_k(1000, 1, 500) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="pass@4"):
        pass_at_k(3, 1, 4)


def test_bootstrap_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        low, high = bootstrap_interval(
            rng.exponential(size=60), seed=seed, num_resamples=400
        )
        covered += low <= 1 <= high
    assert 0.88 <= covered / 200 <= 0.98


def test_bootstrap_over_tasks_admits_that_attempts_resemble_each_other():
    rng = np.random.default_rng(1)
    covered = {"tasks": 0, "attempts": 0}
    tasks = np.repeat(np.arange(30), 8)
    for seed in range(100):
        passes = (rng.random(240) < 0.2 + 0.6 * rng.integers(0, 2, 30)[tasks]).astype(
            float
        )
        for name, groups in (("tasks", tasks), ("attempts", None)):
            low, high = bootstrap_interval(
                passes, groups=groups, seed=seed, num_resamples=400
            )
            covered[name] += low <= 0.5 <= high
    assert covered["tasks"] >= 88 > covered["attempts"]


def test_bootstrap_is_reproducible_and_takes_any_labels():
    values, tasks = [1, 0, 1, 1], ["a", "b", "a", "c"]
    first = bootstrap_interval(values, groups=tasks, seed=3)
    assert first == bootstrap_interval(values, groups=tasks, seed=3)
    assert first != bootstrap_interval(values, groups=None, seed=3)
    assert bootstrap_interval([2.0, 2.0], seed=0) == (2.0, 2.0)


def test_kendall_tau_by_hand():
    # pairs: 0-1 tied in gold; 0-2 right, 0-3 wrong, 1-2 tied, 1-3 wrong, 2-3 wrong
    gold, predicted = [1, 1, 2, 3], [2, 3, 3, 1]
    assert kendall_tau_b(gold, predicted) == pytest.approx((1 - 3) / math.sqrt(5 * 5))
    assert kendall_tau_b([1, 2, 3, 4], [4, 3, 2, 1]) == -1
    assert kendall_tau_b([1, 1, 2], [5, 5, 9]) == 1  # the same ties on both sides
    assert math.isnan(kendall_tau_b([1, 1], [1, 2]))


def test_pairwise_accuracy_by_hand():
    # pairs: 0-1 tied in gold; 0-2 right, 0-3 wrong, 1-2 tied, 1-3 wrong, 2-3 wrong
    gold, predicted = [1, 1, 2, 3], [2, 3, 3, 1]
    assert pairwise_accuracy(gold, predicted) == pytest.approx((1 + 0.5) / 5)
    assert pairwise_accuracy(gold, [0, 0, 0, 0]) == 0.5
    assert pairwise_accuracy(gold, gold) == 1
    assert math.isnan(pairwise_accuracy([1, 1], [1, 2]))


def test_effective_passes_of_the_published_factors():
    assert effective_passes([1, 0.85, 0.4]) == pytest.approx(2.25**2 / 1.8825)  # 2.69
    assert effective_passes([1, 0.2]) == pytest.approx(1.44 / 1.04)  # 1.385
    assert effective_passes([0.4] * 5) == pytest.approx(5)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [[1.0], [2.0]]])
def test_what_has_no_mean_is_refused(values):
    with pytest.raises(ValueError, match="values"):
        bootstrap_interval(np.array(values), seed=0)
