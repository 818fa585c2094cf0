"""`doctor` and `bench`: what this machine can run, and how fast."""

import dataclasses
from dataclasses import dataclass

from gagar_mini.cli.shared import print_json
from gagar_mini.config import PRESETS, with_overrides


@dataclass(frozen=True)
class Doctor:
    """What this machine can run, and what is missing.

    Example: gagar-mini doctor

    Each line says whether a part is there, what it is for and how to get it. Always
    exits with 0: a part that is missing only closes what needs it.
    """

    json: bool = False
    """Print a JSON list instead of the table."""

    def execute(self) -> None:
        from gagar_mini.doctor import examine, table

        checks = examine()
        told = [dataclasses.asdict(check) for check in checks]
        print_json(told) if self.json else print(table(checks))


@dataclass(frozen=True)
class Bench:
    """How fast this machine trains: seconds a step, tokens a second, memory.

    Example: gagar-mini bench --steps 3

    Trains a few steps of the tiny preset with GAGAR, in a folder that is then gone.
    """

    steps: int = 3
    """Steps that are timed, after one that is not."""
    json: bool = False
    """Print JSON instead of the table."""

    def execute(self) -> None:
        settings = {
            "credit.rule": "gagar",
            "grader.name": "rubric",
            "steps": self.steps,
        }
        config = with_overrides(PRESETS["tiny"](), settings)
        from gagar_mini.bench import measure_speed, table

        figures = measure_speed(config, self.steps)
        told = [dataclasses.asdict(figure) for figure in figures]
        print_json(told) if self.json else print(table(figures))
