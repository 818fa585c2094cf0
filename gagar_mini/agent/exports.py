"""A run's trajectories, written in the formats of other projects.

predictions   SWE-bench: JSON lines of patches, for its evaluation
mini-swe      mini-swe-agent-1.1: one .traj.json per trajectory
atif          ATIF-v1.7 (Harbor): one .json per trajectory
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from gagar_mini.agent.atif import to_atif
from gagar_mini.agent.members import Member, portable_patch, read_members
from gagar_mini.agent.mini_swe import to_mini_swe
from gagar_mini.records import Json
from gagar_mini.types import Task

ONE_EACH: dict[str, tuple[Callable[[Member, str], dict[str, Json]], str]] = {
    "atif": (to_atif, ".json"),
    "mini-swe": (to_mini_swe, ".traj.json"),
}
"""Formats with a file per trajectory, and how its name ends."""
FORMATS = ("predictions", *ONE_EACH)


def export_run(
    run_dir: Path,
    step: int | None,
    form: str,
    out: Path,
    find_task: Callable[[str], Task],
) -> list[Path]:
    """Write the trajectories of a step (the newest by default) to `out`; the files.

    Raises ValueError, before anything is written, for a format that does not exist, a
    step that was not recorded, and a file that is there already.
    """
    if form not in FORMATS:
        raise ValueError(f"export format {form!r} is none of {', '.join(FORMATS)}")
    step = newest_step(run_dir) if step is None else step
    members = read_members(run_dir, step, find_task)
    contents = file_contents(members, form, f"{run_dir.name}-step{step}")
    paths = {out / name: text for name, text in contents.items()}
    taken = next((path for path in paths if path.exists()), None)
    if taken is not None:
        raise ValueError(f"{taken} exists: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text)
    return list(paths)


def newest_step(run_dir: Path) -> int:
    """The last step whose rollouts were recorded."""
    names = sorted(path.name for path in run_dir.glob("rollouts/step_*.jsonl.gz"))
    if not names:
        raise ValueError(f"there are no recorded rollouts in {str(run_dir)!r}")
    return int(names[-1].removeprefix("step_").split(".")[0])


def file_contents(members: Iterable[Member], form: str, model: str) -> dict[str, str]:
    """File name -> text."""
    if form == "predictions":
        return {
            name: "".join(json.dumps(row) + "\n" for row in rows)
            for name, rows in prediction_files(members, model).items()
        }
    write, ending = ONE_EACH[form]
    return {
        safe_name(member.trajectory.id) + ending: json.dumps(
            write(member, model), indent=1
        )
        + "\n"
        for member in members
    }


def safe_name(trajectory_id: str) -> str:
    """A trajectory's id as the name of a file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", trajectory_id).strip(".") or "trajectory"


def prediction(member: Member, model: str) -> dict[str, Json]:
    """The three fields that SWE-bench's evaluation reads."""
    return {
        "instance_id": member.task.id,
        "model_name_or_path": model,
        "model_patch": portable_patch(member.task, member.trajectory.patch),
    }


def prediction_files(
    members: Iterable[Member], model: str
) -> dict[str, list[dict[str, Json]]]:
    """File name -> predictions: the k-th patch for a task goes to the k-th file, since
    SWE-bench wants each instance once."""
    files: dict[str, list[dict[str, Json]]] = defaultdict(list)
    seen: dict[str, int] = defaultdict(int)
    for member in members:
        number = seen[member.task.id]
        seen[member.task.id] += 1
        files[f"predictions-{number}.jsonl"].append(prediction(member, model))
    return dict(files)
