"""What several commands share: the flags of a grader, and how results are written."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gagar_mini.config import GraderConfig, GraderName

FIGURE_SUFFIXES = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class GraderModel:
    model: str = GraderConfig().model
    """Folder of the checkpoint of the grader agentic; folder or id of a chat model for
    the grader chat."""
    endpoint: str = ""
    """Base URL of the OpenAI-compatible endpoint of the grader llm; its key is read
    from OPENAI_API_KEY."""
    endpoint_model: str = ""
    """Model that the grader llm asks."""
    timeout_s: float = GraderConfig().timeout_s
    """Seconds for one grading."""

    def config(self, name: GraderName = "none") -> GraderConfig:
        return GraderConfig(name=name, **dataclasses.asdict(self))


GraderFlags = Annotated[GraderModel, tyro.conf.arg(name="")]
"""A field of this type adds these flags to a command."""


def check_figure_name(path: Path) -> None:
    if path.suffix not in FIGURE_SUFFIXES or path.is_dir():
        raise ValueError(
            f"{path} is no name of a figure: let it end in {', '.join(FIGURE_SUFFIXES)}"
        )


def refuse_overwriting(path: Path, *, force: bool) -> None:
    if path.exists() and not force:
        raise ValueError(
            f"{path} exists: choose another name, or --force to replace it"
        )


def print_json(value: object) -> None:
    """Print JSON that any reader takes: numbers that do not exist become null."""
    from gagar_mini.view.tables import without_nan

    print(json.dumps(without_nan(value), indent=2, default=str))
