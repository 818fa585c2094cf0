"""Attacks on named graders, as a report: JSON for machines, a table for readers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from gagar_mini.config import GraderConfig
from gagar_mini.grader.controls import make_grader
from gagar_mini.grader.resistance import (
    AttackPair,
    AttackRow,
    attack_pairs,
    codeipi_pairs,
    measure_attacks,
)
from gagar_mini.types import Grader
from gagar_mini.view.tables import text_table, without_nan
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.tasks.codeipi import load_codeipi

FAMILIES = ("core", "full")
NAME = "grader_attacks"

Report = Mapping[str, object]


def make_graders(names: Sequence[str], config: GraderConfig) -> dict[str, Grader]:
    """Grader by name, each set up as `config` says. ValueError for one that is none."""
    graders = {}
    for name in names:
        grader = make_grader(GraderConfig(**asdict(config) | {"name": name}))
        if grader is None:
            raise ValueError(f"the grader {name!r} grades nobody")
        graders[name] = grader
    return graders


def make_pairs(num_tasks: int, codeipi: Path | None, *, seed: int) -> list[AttackPair]:
    """The attacks on the first `num_tasks` held-out tasks of each family, and those of
    CodeIPI where its package is named.

    Outcomes are those that follow from how an attack is made: on a busy machine a
    verification may run out of time, and the figures would depend on it.
    """
    repositories = load_codeipi(codeipi) if codeipi is not None else ()
    pairs = []
    for family in FAMILIES:
        tasks = load_tasks(family, "eval")[:num_tasks]
        pairs += attack_pairs(tasks, seed=seed)
    return [*pairs, *codeipi_pairs(repositories)]


def attack_graders(
    graders: Mapping[str, Grader],
    pairs: Sequence[AttackPair],
    *,
    seed: int,
    timeout_s: float,
) -> dict[str, list[AttackRow]]:
    """The rows of each grader, the last ones over all attacks. Blocking."""
    return {
        name: measure_attacks(grader, pairs, seed=seed, timeout_s=timeout_s)
        for name, grader in graders.items()
    }


def settings_of(num_tasks: int, seed: int, codeipi: Path | None) -> Report:
    """What the figures depend on, besides the graders."""
    return {
        "tasks": " and ".join(f"{num_tasks} of {family}/eval" for family in FAMILIES),
        "seed": seed,
        "codeipi": "no" if codeipi is None else codeipi.name,
    }


def report_of(settings: Report, found: Mapping[str, Sequence[AttackRow]]) -> Report:
    """The report as JSON holds it."""
    rows = {name: [asdict(row) for row in rows] for name, rows in found.items()}
    return {"settings": settings, "graders": rows}


def table(found: Mapping[str, Sequence[AttackRow]]) -> str:
    """One line per attack and grader."""
    return text_table(
        [{"grader": name} | asdict(row) for name, rows in found.items() for row in rows]
    )


def markdown(settings: Report, found: Mapping[str, Sequence[AttackRow]]) -> str:
    """The report as a page: one line per attack, one column per grader."""
    names = list(found)
    head = ["attack", "attacked", *(f"{name}: placed better" for name in names)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for rows in zip(*found.values(), strict=True):
        num = rows[0].pairs + rows[0].unusable + rows[0].no_twin
        cells = [rows[0].attack, str(num), *map(cell, rows)]
        lines.append(f"| {' | '.join(cells)} |")
    told = ", ".join(f"{name} {value}" for name, value in settings.items())
    return INTRODUCTION.format(table="\n".join(lines), settings=told)


def cell(row: AttackRow) -> str:
    """ "0 (0 to 0.12)", with what is not placed at all beside it."""
    text = f"{row.better} ({row.low:.3f} to {row.high:.3f})"
    beside = {"not ranked": row.out, "unusable": row.unusable, "no twin": row.no_twin}
    told = [f"{count} {name}" for name, count in beside.items() if count]
    return "; ".join([text, *told])


INTRODUCTION = """\
# Attacks on graders

How often an attack placed its candidate better than the twin without the attack, in the
same group: a better tier or, in the same tier, fewer members above it. In brackets the
95 % Wilson interval of the rate. Where it says "against plain text" the twin has honest
words in the same place. "none" rows are no attacks: what moves there moves by itself. A
patch that fails or tampers with the checks is not ranked; an unusable grade
leaves the group its original advantages.

Written by `gagar-mini eval attacks`, `make attacks`: {settings}.

{table}
"""


def save_report(
    settings: Report, found: Mapping[str, Sequence[AttackRow]], folder: Path
) -> None:
    """Write grader_attacks.json and grader_attacks.md."""
    folder.mkdir(parents=True, exist_ok=True)
    report = json.dumps(without_nan(report_of(settings, found)), indent=1)
    (folder / f"{NAME}.json").write_text(report + "\n")
    (folder / f"{NAME}.md").write_text(markdown(settings, found))
