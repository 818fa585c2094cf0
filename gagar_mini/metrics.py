"""Statistics of runs and graders: intervals, agreement, pass@k; numpy and nothing else.

Every interval is (low, high) at `confidence`, 0.95 unless told otherwise. Which one to
use: `wilson_interval` for a share of independent trials, `bootstrap_interval` with
`groups` for trials that share a task, `mean_interval_over_seeds` for runs.
"""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]
Values = Sequence[float] | Sequence[int] | np.ndarray


def wilson_interval(
    num_successes: int, num_trials: int, *, confidence: float = 0.95
) -> Interval:
    """Interval of a success probability (Wilson's score interval), inside [0, 1].

    Unlike p +- 2 sqrt(p (1 - p) / n) it keeps a width at 0 and at n successes.
    """
    if not 0 <= num_successes <= num_trials or num_trials == 0:
        raise ValueError(
            f"{num_successes} successes in {num_trials} trials: impossible"
        )
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    rate, shrink = num_successes / num_trials, 1 + z * z / num_trials
    centre = (rate + z * z / (2 * num_trials)) / shrink
    spread = rate * (1 - rate) / num_trials + z * z / (4 * num_trials**2)
    half = z * math.sqrt(spread) / shrink
    # The rate itself is inside, rounding or not: the ends at 0 and n depend on it.
    return max(0.0, min(rate, centre - half)), min(1.0, max(rate, centre + half))


def bootstrap_interval(
    values: Values,
    *,
    groups: Sequence[Hashable] | np.ndarray | None = None,
    seed: int,
    num_resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile interval of the mean of `values`.

    With `groups` (one label per value, a task id for instance) whole groups are drawn
    again: attempts at one task resemble each other, and drawing them one by one would
    promise too much. NaN (a metric that a member lacks) is a ValueError: drop it first.
    """
    values = _finite("values", values)
    labels = range(len(values)) if groups is None else list(groups)
    if len(labels) != len(values):
        raise ValueError(f"{len(values)} values, but {len(labels)} group labels")
    index = {label: i for i, label in enumerate(dict.fromkeys(labels))}
    group = np.array([index[label] for label in labels])
    sums, counts = np.bincount(group, values), np.bincount(group)
    rng = np.random.default_rng(seed)
    # A resample is how often each group was drawn, so one matrix product does it all.
    num_groups = len(counts)
    shares = np.full(num_groups, 1 / num_groups)
    draws = rng.multinomial(num_groups, shares, size=num_resamples)
    means = (draws @ sums) / (draws @ counts)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def mean_interval_over_seeds(
    values: Values, *, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(mean, low, high) of one number per run, by Student's t with n - 1 degrees.

    A single run says nothing about the spread: its interval is (-inf, inf).
    """
    values = _finite("values", values)
    mean = float(values.mean())
    if len(values) == 1:
        return mean, -math.inf, math.inf
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    half = _t_quantile(0.5 + confidence / 2, len(values) - 1) * error
    return mean, mean - half, mean + half


def pass_at_k(num_samples: int, num_passes: int, k: int) -> float:
    """Chance that at least one of k samples passes, unbiased from n >= k samples.

    1 - C(n - c, k) / C(n, k) (arXiv 2107.03374), in whole numbers until the last step.
    """
    if not 0 <= num_passes <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"pass@{k} of {num_passes} passes in {num_samples} samples: needs "
            "0 <= passes <= samples and 1 <= k <= samples"
        )
    none_passes = math.comb(num_samples - num_passes, k)
    return 1 - none_passes / math.comb(num_samples, k)


def kendall_tau_b(gold: Values, predicted: Values) -> float:
    """Rank agreement in [-1, 1] with ties on either side allowed for (tau-b).

    (concordant - discordant) / sqrt(pairs untied in gold * pairs untied in predicted).
    NaN where one side ties everything: there is no order to agree with.
    """
    return tau_b_of_signs(*_pair_signs(gold, predicted))


def tau_b_of_signs(gold_sign: Values, predicted_sign: Values) -> float:
    """`kendall_tau_b` from the sign of each pair (0 is a tie), for orders in which not
    every pair can be compared: leave those out on both sides."""
    gold_sign, predicted_sign = np.asarray(gold_sign), np.asarray(predicted_sign)
    norm = math.sqrt(np.count_nonzero(gold_sign) * np.count_nonzero(predicted_sign))
    if norm == 0:
        return math.nan
    return float((gold_sign * predicted_sign).sum()) / norm


def pairwise_accuracy(gold: Values, predicted: Values) -> float:
    """Share of pairs ordered as in gold; a predicted tie counts one half.

    Pairs that gold ties are left out, so a coin and an all-ties grader both get 0.5.
    NaN where gold ties everything.
    """
    gold_sign, predicted_sign = _pair_signs(gold, predicted)
    is_ordered = gold_sign != 0
    if not is_ordered.any():
        return math.nan
    agreement = gold_sign[is_ordered] * predicted_sign[is_ordered]
    return float(((agreement + 1) / 2).mean())


def effective_passes(factors: Values) -> float:
    """How many equally rewarded passes carry as much signal: (sum f)^2 / sum f^2.

    `factors` of the passing members only. n equal factors give n; the second moment of
    the passing advantages grows by n / effective_passes.
    """
    factors = _finite("factors", factors)
    return float(factors.sum() ** 2 / (factors**2).sum())


def _pair_signs(gold: Values, predicted: Values) -> tuple[np.ndarray, np.ndarray]:
    """For each pair i < j, the sign of value_i - value_j on either side."""
    gold, predicted = _finite("gold", gold), _finite("predicted", predicted)
    if len(gold) != len(predicted):
        raise ValueError(f"{len(gold)} gold values, but {len(predicted)} predicted")
    first, second = np.triu_indices(len(gold), k=1)
    return tuple(np.sign(side[first] - side[second]) for side in (gold, predicted))


def _finite(name: str, values: Values) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"{name} must be a non-empty list, got shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name}[{int(np.argmin(np.isfinite(array)))}] is not finite")
    return array


def _t_quantile(probability: float, degrees: int) -> float:
    """Quantile above the median of Student's t, by bisection on its distribution."""
    low, high = 0.0, 1.0
    while _t_cdf(high, degrees) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _t_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


def _t_cdf(t: float, degrees: int) -> float:
    """P(T <= t) for t >= 0: the finite sums for whole degrees of freedom.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2 == 1
    term, total = (cosine, cosine) if is_odd else (1.0, 1.0)
    if degrees == 1:
        total = 0.0
    first = 3 if is_odd else 2
    for k in range(first, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    central = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return 0.5 + central / 2
