"""Where the data files are, after any kind of install."""

import os
import sys
from pathlib import Path

ENVIRONMENT_VARIABLE = "GAGAR_MINI_DATA"


def data_roots() -> tuple[Path, ...]:
    """Folders that may hold the data, first match wins.

    GAGAR_MINI_DATA when it is set (and then nothing else), else `data/` beside the
    package (a checkout or an editable install), else `share/gagar_mini/data` of the
    environment.
    """
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    if named:
        return (Path(named),)
    checkout = Path(__file__).resolve().parent.parent / "data"
    return (checkout, Path(sys.prefix) / "share" / "gagar_mini" / "data")


def check_can_be_made(folder: Path) -> None:
    """Raise ValueError where `folder` cannot be made: better before the work for it."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(
            f"{folder} cannot be written: {there} is no folder to write in"
        )


def find_checkpoint(name: str) -> Path:
    """The folder of a model: a path, or "data/..." among the files of the project.

    Raises FileNotFoundError, in a sentence, for one of the latter that is not there.
    """
    path = Path(name)
    if path.exists() or path.parts[:1] != ("data",):
        return path
    return find_data(path.relative_to("data").as_posix())


def find_data(name: str) -> Path:
    """The file or folder `name` of the data, a POSIX path such as "tasks/core".

    Raises FileNotFoundError with the places that were tried and where to get the data.
    """
    roots = data_roots()
    for root in roots:
        if (root / name).exists():
            return root / name
    tried = ", ".join(str(root) for root in roots)
    raise FileNotFoundError(
        f"data file {name!r} is in none of: {tried}. Clone the repository (its data/ "
        f"folder holds it) and set {ENVIRONMENT_VARIABLE} to that folder, or rebuild it"
    )
