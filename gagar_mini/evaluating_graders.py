"""Measuring a grader and its baselines on sets of known order: table, JSON, figure."""

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from gagar_mini.config import GraderConfig
from gagar_mini.grader.baselines import LintGrader, PointwiseGrader, fit_linear
from gagar_mini.grader.controls import make_grader
from gagar_mini.grader.evaluation import (
    FIGURES,
    JudgedGroup,
    accuracy_by_degradation,
    accuracy_by_length,
    estimate,
    facts_of,
    figures,
    invalid_reasons,
    judge,
)
from gagar_mini.grader.known import KnownGroup, is_rankable, known_by_oracle
from gagar_mini.grader.ladders import known_by_kinds
from gagar_mini.learn import grader_data
from gagar_mini.learn.pools import Pool, load_pools
from gagar_mini.types import Candidate, Grader
from gagar_mini.view.tables import text_table, without_nan

Report = dict[str, object]
"""What one evaluation says, as JSON holds it: "settings", and "sets" with, for each
set, "facts", "graders" and "differences"."""

SETS = ("rollouts_eval", "ladders_eval", "ladders_seen")
BASELINES = ("shortest", "lint", "linear", "rubric", "oracle", "random")
PAIRED_FIGURES = ("accuracy", "tau_b", "top1")
"""Figures whose difference to each baseline is given."""

POINTWISE = "one by one"
"""Added to the name of a grader that is shown one passing candidate at a time."""

FIT_EVERY = 10
"""The linear baseline is fitted to one in so many training pools: thousands of pairs
for a few dozen weights."""


def load_sets(names: Sequence[str], max_groups: int = 0) -> dict[str, list[KnownGroup]]:
    """The rankable groups of each set, the first `max_groups` of them unless that is 0.
    ValueError for a set that does not exist, or has no such group."""
    sets = {}
    for name in names:
        if name not in SETS:
            known = ", ".join(SETS)
            raise ValueError(f"there is no set {name!r}: use some of {known}")
        all_groups = grader_data.known_groups(name)
        groups = [group for group in all_groups if is_rankable(group.candidates)]
        if not groups:
            raise ValueError(f"the set {name} has no group that can be ranked")
        sets[name] = groups[: max_groups or None]
    return sets


def make_baseline(name: str) -> Grader:
    """One of `BASELINES`. ValueError where it does not exist or cannot run."""
    if name not in BASELINES:
        known = ", ".join(BASELINES)
        raise ValueError(f"there is no baseline {name!r}: use some of {known}")
    if name == "lint":
        return LintGrader()
    if name == "linear":
        return fit_linear(training_groups(load_pools("train", every=FIT_EVERY)))
    return make_grader(GraderConfig(name=name))


def training_groups(pools: Sequence[Pool]) -> list[KnownGroup]:
    """The known pairs of training pools: ladders by construction, rollouts by the
    oracle."""
    groups = []
    for number, pool in enumerate(pools):
        parts: dict[str, list[Candidate]] = {"ladder": [], "rollout": []}
        for member in pool.candidates:
            parts[member.source].append(member.candidate)
        kinds = {m.candidate.id: m.kinds for m in pool.candidates}
        groups += [
            known_by_kinds(f"ladder {number}", pool.task, parts["ladder"], kinds),
            known_by_oracle(f"rollouts {number}", pool.task, parts["rollout"]),
        ]
    return groups


def make_graders(
    config: GraderConfig, baselines: Sequence[str], *, pointwise: bool
) -> dict[str, Grader]:
    """The grader in question first, then itself one by one, then the baselines."""
    grader = make_grader(config)
    if grader is None:
        raise ValueError('the grader "none" grades nothing: name another')
    graders = {config.name: grader}
    if pointwise:
        graders[f"{config.name} {POINTWISE}"] = PointwiseGrader(grader)
    wanted = [name for name in baselines if name != config.name]
    return graders | {name: make_baseline(name) for name in wanted}


def evaluate_graders(
    graders: Mapping[str, Grader],
    sets: Mapping[str, Sequence[KnownGroup]],
    *,
    num_orders: int,
    seed: int,
    concurrency: int = 1,
) -> dict[str, dict]:
    """Facts, figures and differences for each set: "sets" of the report. The first
    grader is the one that differences are taken from."""
    found = {}
    for name, groups in sets.items():
        judged = {
            who: asyncio.run(
                judge_with_progress(
                    who, name, grader, groups, num_orders, seed, concurrency
                )
            )
            for who, grader in graders.items()
        }
        first, *others = judged
        found[name] = {
            "facts": facts_of(groups),
            "graders": {who: describe(one, seed) for who, one in judged.items()},
            "differences": {
                who: differences(judged[first], judged[who], seed) for who in others
            },
        }
    return found


async def judge_with_progress(
    who: str,
    set_name: str,
    grader: Grader,
    groups: Sequence[KnownGroup],
    num_orders: int,
    seed: int,
    concurrency: int,
) -> tuple[JudgedGroup, ...]:
    with tqdm(total=len(groups), desc=f"{set_name}: {who}", unit="group") as progress:
        return await judge(
            grader,
            groups,
            num_orders=num_orders,
            seed=seed,
            concurrency=concurrency,
            on_group=lambda judged: progress.update(),
        )


def describe(judged: Sequence[JudgedGroup], seed: int) -> dict[str, object]:
    """All figures of one grader on one set."""
    tables = {
        "figures": figures(judged, seed=seed),
        "by_length": accuracy_by_length(judged, seed=seed),
        "by_degradation": accuracy_by_degradation(judged, seed=seed),
    }
    plain = {
        name: {key: dataclasses.asdict(one) for key, one in table.items()}
        for name, table in tables.items()
    }
    return {**plain, "invalid_reasons": invalid_reasons(judged)}


def differences(
    judged: Sequence[JudgedGroup], minus: Sequence[JudgedGroup], seed: int
) -> dict[str, dict]:
    """The first grader's figures minus the other's, paired."""
    return {
        name: dataclasses.asdict(
            estimate(judged, FIGURES[name], minus=minus, seed=seed)
        )
        for name in PAIRED_FIGURES
    }


def save_report(report: Report, folder: Path) -> None:
    """grader_eval.json, grader_eval.md and grader_eval.png in `folder`."""
    from gagar_mini.view.grader_plots import save_grader_figure

    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(without_nan(report), indent=1)
    (folder / "grader_eval.json").write_text(text + "\n")
    (folder / "grader_eval.md").write_text(markdown(report))
    save_grader_figure(report, folder / "grader_eval.png")


def table(report: Report) -> str:
    """For each set its facts and one line a grader; intervals resample tasks."""
    parts = []
    for name, found in report["sets"].items():
        rows = [
            row_of(who, one, found["differences"].get(who))
            for who, one in found["graders"].items()
        ]
        parts += [f"{name}: {facts_text(found['facts'])}", text_table(rows), ""]
        for who, one in found["graders"].items():
            if one["invalid_reasons"]:
                told = ", ".join(f"{k} {n}" for k, n in one["invalid_reasons"].items())
                parts += [f"unusable grades of {who}: {told}", ""]
    return "\n".join(parts).rstrip()


def markdown(report: Report) -> str:
    """Accuracy of each grader on each set, with what each set is, as Markdown."""
    sets = report["sets"]
    graders = list(
        dict.fromkeys(who for one in sets.values() for who in one["graders"])
    )
    lines = ["| grader | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
    for who in graders:
        cells = [
            "{value:.3f} [{low:.3f}, {high:.3f}]".format(
                **one["graders"][who]["figures"]["accuracy"]
            )
            for one in sets.values()
        ]
        lines.append(f"| {who} | {' | '.join(cells)} |")
    told = [f"`{name}`: {facts_text(one['facts'])}." for name, one in sets.items()]
    return "\n".join([*lines, "", *told]) + "\n"


def facts_text(facts: Mapping[str, float | int]) -> str:
    shorter, longer = (
        facts[f"num_pairs, {kind} is better"] for kind in ("shorter", "longer")
    )
    return (
        f"{facts['num_groups']} groups, {facts['num_tasks']} tasks, "
        f"{facts['num_pairs']} known pairs (the shorter is better in {shorter}, the "
        f"longer in {longer}), {facts['num_equal_pairs']} equal ones; chance .5; "
        f"the commonest tier has {facts['most_common_tier']:.2f} of the members"
    )


def row_of(who: str, one: Mapping, difference: Mapping | None) -> dict:
    """A line of the table. "minus" is the first grader's accuracy minus this one's."""
    found = one["figures"]
    value = {name: figure["value"] for name, figure in found.items()}
    minus = difference["accuracy"] if difference else None
    return {
        "grader": who,
        "accuracy": value["accuracy"],
        "95 %": "{low:.3f} to {high:.3f}".format(**found["accuracy"]),
        "first minus": "{low:+.3f} to {high:+.3f}".format(**minus) if minus else "",
        "longer is better": one["by_length"]["longer is better"]["value"],
        "tau-b": value["tau_b"],
        "top-1": value["top1"],
        "chance": value["top1_chance"],
        "tier": value["tier_accuracy"],
        "equal tied": value["equal_tied"],
        "consistent": value["consistency"],
        "position": value["rank_position"],
        "length": value["rank_length"],
        "invalid": value["invalid"],
        "tokens": value["tokens"],
        "s/group": value["seconds"],
    }
