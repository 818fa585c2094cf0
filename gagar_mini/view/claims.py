"""Claims about the method, judged from runs: effect, interval, seeds, verdict.

A claim compares two arms on one held-out figure. The effect is the mean over seeds of
the paired difference (same seed, so same tasks and start), with Student's 95 %
interval. The claims were written down before the runs that judge them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gagar_mini.metrics import mean_interval_over_seeds
from gagar_mini.view.compare import Evaluation, Run

TRAINED, TIGHT = "trained", "tight"
"""Budget of an evaluation: the one of training, or the tightest that was evaluated."""


@dataclass(frozen=True)
class Claim:
    """`arm` minus `reference` on `figure` (a key of eval.jsonl) is expected to have
    this sign; 0: no effect. `source` says how the paper's claim is known."""

    text: str
    arm: str
    reference: str
    figure: str
    sign: int
    source: str
    budget: str = TRAINED


@dataclass(frozen=True)
class Verdict:
    claim: Claim
    effect: float
    low: float
    high: float
    num_seeds: int
    verdict: str


GAGAR, BINARY = "gagar + rubric", "binary"
AGENTIC = "gagar + agentic"
DOWNWEIGHT = "downweight + rubric"
RANDOM, REVERSED = "gagar + random", "gagar + reversed"
PAPER = "paper, secondary"
OURS = "this project"


def of_the_method(arm: str, name: str) -> tuple[Claim, ...]:
    """The paper's claims against binary reward, the same for every real grader."""
    return (
        Claim(f"{name} passes more than binary", arm, BINARY, "pass_rate", 1, PAPER),
        Claim(f"{name} takes fewer turns", arm, BINARY, "turns", -1, PAPER),
        Claim(f"{name} samples fewer tokens", arm, BINARY, "action_tokens", -1, PAPER),
        Claim(f"passes of {name} are cleaner", arm, BINARY, "clean_share", 1, PAPER),
        Claim(
            f"{name} passes more under a tighter budget than trained with",
            *(arm, BINARY, "pass_rate", 1, OURS, TIGHT),
        ),
    )


CLAIMS = (
    *of_the_method(GAGAR, "GAGAR (rubric)"),
    *of_the_method(AGENTIC, "GAGAR (agentic)"),
    Claim(
        "downweight only passes less than GAGAR",
        *(DOWNWEIGHT, GAGAR, "pass_rate", -1, PAPER),
    ),
    Claim(
        "downweight only ends with a higher entropy than GAGAR",
        *(DOWNWEIGHT, GAGAR, "entropy", 1, PAPER),
    ),
    Claim(
        "downweight only samples more tokens than GAGAR",
        *(DOWNWEIGHT, GAGAR, "action_tokens", 1, PAPER),
    ),
    Claim(
        "a reversed grader makes passes dirtier than binary",
        *(REVERSED, BINARY, "clean_share", -1, OURS),
    ),
    Claim(
        "a random grader leaves the clean share as it is",
        *(RANDOM, BINARY, "clean_share", 0, OURS),
    ),
)


def judge_claims(
    runs: Sequence[Run], claims: Sequence[Claim] = CLAIMS
) -> list[Verdict]:
    """The verdicts on those claims whose two arms share at least one seed."""
    verdicts = []
    for claim in claims:
        differences = paired_differences(runs, claim)
        if differences:
            effect, low, high = mean_interval_over_seeds(differences)
            verdict = verdict_of(claim.sign, low, high)
            verdicts.append(
                Verdict(claim, effect, low, high, len(differences), verdict)
            )
    return verdicts


def paired_differences(runs: Sequence[Run], claim: Claim) -> list[float]:
    """Arm minus reference for every seed that both have."""
    of_arm = figures_by_seed(runs, claim.arm, claim)
    of_reference = figures_by_seed(runs, claim.reference, claim)
    return [of_arm[seed] - of_reference[seed] for seed in of_arm.keys() & of_reference]


def figures_by_seed(runs: Sequence[Run], arm: str, claim: Claim) -> dict[int, float]:
    """The claim's figure of an arm's runs under the claim's budget, by seed."""
    found = {}
    for run in runs:
        if run.method.partition(",")[0] == arm and run.evaluations:
            figure = evaluation_at(run, claim.budget)[claim.figure]
            if figure is not None:
                found[run.config.seed] = figure
    return found


def evaluation_at(run: Run, budget: str) -> Evaluation:
    """The evaluation under the tightest budget, or under that of the training (the
    most generous one where that is missing)."""
    ordered = sorted(run.evaluations, key=budget_of)
    if budget == TIGHT:
        return ordered[0]
    trained = (run.config.rollout.max_turns, run.config.rollout.max_action_tokens)
    return next((e for e in ordered if budget_of(e) == trained), ordered[-1])


def budget_of(evaluation: Evaluation) -> tuple[int, int]:
    return evaluation["max_turns"], evaluation["max_tokens"]


def verdict_of(sign: int, low: float, high: float) -> str:
    """One seed has no interval and decides nothing."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "not testable with one seed"
    if sign == 0:
        return "consistent" if low <= 0 <= high else "contradicted"
    if min(sign * low, sign * high) > 0:
        return "reproduced"
    return "contradicted" if max(sign * low, sign * high) < 0 else "not reproduced"


def claims_markdown(verdicts: Sequence[Verdict]) -> str:
    """A Markdown table, one row a claim."""
    lines = [
        "| claim | source | effect | 95 % interval | seeds | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in verdicts:
        digits = 1 if abs(row.effect) >= 2 else 3
        interval = f"{row.low:+.{digits}f} to {row.high:+.{digits}f}"
        lines.append(
            f"| {row.claim.text} ({row.claim.figure}) | {row.claim.source} "
            f"| {row.effect:+.{digits}f} | {interval} | {row.num_seeds} "
            f"| {row.verdict} |"
        )
    return "\n".join(lines) + "\n"
