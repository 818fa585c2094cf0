"""The folder that a run owns: what it was told, what it measured, where it can go on.

    config.yaml                   the resolved config
    manifest.json                 versions, commit and platform of each session
    metrics.jsonl                 one line a step, with the step in it: the truth
    rollouts/step_00012.jsonl.gz  one line a group: patches, outcomes, grades, credit
    gradings/step_00012.jsonl     one line a grading by an agent: what was looked at
    checkpoints/step_00010/       everything needed to go on after 10 steps
    summary.json                  written when the run ends

Steps count from 0; the checkpoint `step_00010` holds the state after 10 steps, 0 to 9.
Whatever must not be half written is written beside its place, synced, and renamed.
A run draws every number from seeds derived from the step, so no random state is stored.
"""

import datetime
import gzip
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gagar_mini.config import RunConfig, differences, from_yaml, to_yaml
from gagar_mini.types import (
    CandidateGrade,
    Flag,
    GroupGrade,
    Outcome,
    RolloutGroup,
    Status,
    StopReason,
    Task,
    Tier,
    ToolCall,
    Trajectory,
    Turn,
)

Json = None | bool | int | float | str | list | dict
"""What JSON can hold."""


def parse_json(content: bytes, name: str) -> Json:
    """The JSON value that `content` spells.

    Raises ValueError, in one sentence that begins with `name`, for anything else: bytes
    that are no UTF-8, lists too deep to read, an object that says one key twice.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError(f"{name} is no valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{name} is no valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def parse_lines(content: bytes, name: str) -> list[dict[str, Json]]:
    """The objects of a JSON lines file. Raises ValueError, naming the line."""
    found = []
    for number, line in enumerate(content.splitlines(), start=1):
        value = parse_json(line, f"{name}:{number}")
        if not isinstance(value, dict):
            raise ValueError(
                f"{name}:{number} must be an object, not {str(value)[:40]}"
            )
        found.append(value)
    return found


REPORTED_PACKAGES = ("gagar-mini", "torch", "transformers", "tokenizers", "numpy")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `step` steps are done, `state` is its state.json."""

    step: int
    folder: Path
    state: Mapping[str, Json]


def open_run(
    run_dir: str | Path, config: RunConfig, *, resume: bool = False
) -> "RunFolder":
    """The run folder, locked for this process; close it, or use it in a `with`.

    A new run wants a folder that is absent or empty. With `resume`, the stored config
    must be equal, except that `steps` may grow. Raises ValueError, in one sentence,
    otherwise; a folder that is refused is not touched.
    """
    path = Path(run_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a file: a run needs a folder")
    if resume and not path.is_dir():
        raise ValueError(f"there is no run to resume in {str(path)!r}")
    if not resume and _has_content(path):
        raise ValueError(
            f"the folder {str(path)!r} is not empty: resume the run that it holds, "
            "or choose another folder"
        )
    if resume and (path / "config.yaml").exists():
        _check_same_config(path, config)
    path.mkdir(parents=True, exist_ok=True)
    run = RunFolder(path, config, _lock(path))
    _write_atomically(path / "config.yaml", to_yaml(config).encode())
    return run


class RunFolder:
    """Writes the records of one run. One process at a time."""

    def __init__(self, path: Path, config: RunConfig, lock: int):
        self.path = path
        self.config = config
        self._lock = lock
        for name in ("rollouts", "gradings", "checkpoints"):
            (path / name).mkdir(exist_ok=True)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder free for another process."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def begin_session(self, step: int) -> None:
        """Cut the records back to `step` and note who goes on from there."""
        manifest_path = self.path / "manifest.json"
        sessions = []
        if manifest_path.exists():
            sessions = _sessions(manifest_path)
        self._cut_back(step)
        manifest = {"sessions": [*sessions, _session(step)]}
        _write_atomically(manifest_path, _pretty(manifest))

    def append_metrics(
        self, step: int, metrics: Mapping[str, int | float | None]
    ) -> None:
        """Add the line of one step. None stands for a mean over nothing."""
        line = json.dumps({"step": step, **metrics}, allow_nan=False)
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Json]]) -> None:
        """Write the groups of one step."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        # mtime=0: equal groups give equal bytes
        content = gzip.compress(lines.encode(), compresslevel=6, mtime=0)
        _write_atomically(self.path / "rollouts" / f"{_name(step)}.jsonl.gz", content)

    def write_gradings(self, step: int, records: Iterable[Mapping[str, Json]]) -> None:
        """Write the gradings of one step, if any, as plain ASCII."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        if lines:
            path = self.path / "gradings" / f"{_name(step)}.jsonl"
            _write_atomically(path, lines.encode())

    def write_summary(self, summary: Mapping[str, Json]) -> None:
        _write_atomically(self.path / "summary.json", _pretty(summary))

    def save_checkpoint(
        self,
        step: int,
        state: Mapping[str, Json],
        write_files: Callable[[Path], None],
    ) -> None:
        """Save the state after `step` steps, then drop all but the newest checkpoints.

        `write_files` fills the folder; state.json adds the hash of each of its files,
        so that damage is seen when it is loaded.
        """
        final = self.path / "checkpoints" / _name(step)
        temporary = final.with_name(f".tmp_{final.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_files(temporary)
        hashes = {
            str(path.relative_to(temporary)): _sha256(path)
            for path in sorted(temporary.rglob("*"))
            if path.is_file()
        }
        document = {"step": step, **state, "files": hashes}
        (temporary / "state.json").write_bytes(_pretty(document))
        _sync_tree(temporary)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(temporary, final)
        _sync(final.parent)
        for old in _checkpoint_folders(self.path)[: -self.config.keep_checkpoints]:
            shutil.rmtree(old)

    def latest_checkpoint(self) -> Checkpoint | None:
        """See the function `latest_checkpoint`."""
        return latest_checkpoint(self.path)

    def _cut_back(self, step: int) -> None:
        """Remove what was recorded from `step` on: it will be recorded again."""
        kept = [line for line in read_metrics(self.path) if line["step"] < step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        _write_atomically(self.path / "metrics.jsonl", text.encode())
        for name in ("rollouts", "gradings"):
            for path in (self.path / name).iterdir():
                if path.name >= _name(step) or path.name.startswith("."):
                    path.unlink()
        for folder in _checkpoint_folders(self.path):
            if folder.name > _name(step):
                shutil.rmtree(folder)
        for folder in (self.path / "checkpoints").glob(".tmp_*"):
            shutil.rmtree(folder)
        (self.path / "summary.json").unlink(missing_ok=True)


def latest_checkpoint(run_dir: str | Path) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole, None where it has none yet.

    Passes over a damaged one with a warning. Raises ValueError when none is whole.
    """
    problems = []
    for folder in reversed(_checkpoint_folders(Path(run_dir))):
        problem = _damage(folder)
        if not problem:
            for told in problems:
                warnings.warn(f"{told}: going back to the one before", stacklevel=2)
            state = json.loads((folder / "state.json").read_text())
            return Checkpoint(state["step"], folder, state)
        problems.append(f"checkpoint {str(folder)!r} is damaged ({problem})")
    if problems:
        raise ValueError(f"no checkpoint in {str(run_dir)!r} is whole: {problems[0]}")
    return None


def read_config(run_dir: str | Path) -> RunConfig:
    """The config of a run. Raises ValueError where there is none."""
    path = Path(run_dir) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"there is no run in {str(run_dir)!r}: config.yaml is missing")
    try:
        return from_yaml(path.read_bytes().decode())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_metrics(run_dir: str | Path) -> list[dict[str, int | float | None]]:
    """The lines of metrics.jsonl in order, without a last one cut short by a crash.

    Raises ValueError, naming the line, for one that is not an object of numbers.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        return []
    complete, _, _torn = path.read_bytes().rpartition(b"\n")
    lines = parse_lines(complete, str(path))
    for number, line in enumerate(lines, start=1):
        is_numeric = all(isinstance(v, int | float | None) for v in line.values())
        if not is_numeric or type(line.get("step")) is not int:
            raise ValueError(f"{path}:{number} is no line of numbers with a step")
    return lines


def read_rollouts(run_dir: str | Path, step: int) -> list[dict[str, Json]]:
    """The group records of one step, in the order of `group_record`."""
    path = Path(run_dir) / "rollouts" / f"{_name(step)}.jsonl.gz"
    return [
        json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()
    ]


def read_gradings(run_dir: str | Path, step: int) -> list[dict[str, Json]]:
    """The gradings of one step, [] where none were recorded."""
    path = Path(run_dir) / "gradings" / f"{_name(step)}.jsonl"
    return parse_lines(path.read_bytes(), str(path)) if path.exists() else []


def group_record(group: RolloutGroup) -> dict[str, Json]:
    """A group as JSON, without its token arrays, the task by its id.

    Patches are text; a byte that is no UTF-8 becomes a lone surrogate, as in
    `surrogateescape`, so that nothing is lost.
    """
    return {
        "id": group.id,
        "task_id": group.task.id,
        "grade": None if group.grade is None else _grade_record(group.grade),
        "fallback_reason": group.fallback_reason,
        "trajectories": [
            _trajectory_record(trajectory, outcome)
            for trajectory, outcome in zip(
                group.trajectories, group.outcomes, strict=True
            )
        ],
    }


def group_arrays(group: RolloutGroup) -> dict[str, np.ndarray]:
    """The token arrays of a group, named by the trajectory's index and the field."""
    return {
        f"{index}/{name}": getattr(trajectory, name)
        for index, trajectory in enumerate(group.trajectories)
        for name in ("ids", "action_mask", "behaviour_logprobs")
    }


def group_from_record(
    record: Mapping[str, Json], arrays: Mapping[str, np.ndarray], task: Task
) -> RolloutGroup:
    """The inverse of `group_record` and `group_arrays`."""
    trajectories, outcomes = [], []
    for index, member in enumerate(record["trajectories"]):
        outcome = dict(member["outcome"])
        outcomes.append(
            Outcome(
                **outcome
                | {
                    "status": Status(outcome["status"]),
                    "codes": tuple(outcome["codes"]),
                }
            )
        )
        trajectories.append(
            Trajectory(
                id=member["id"],
                task_id=task.id,
                ids=arrays[f"{index}/ids"],
                action_mask=arrays[f"{index}/action_mask"],
                behaviour_logprobs=arrays[f"{index}/behaviour_logprobs"],
                turns=tuple(_read_turn(turn) for turn in member["turns"]),
                patch=member["patch"].encode("utf-8", "surrogateescape"),
                stop_reason=StopReason(member["stop_reason"]),
                weight_version=member["weight_version"],
            )
        )
    return RolloutGroup(
        id=record["id"],
        task=task,
        trajectories=tuple(trajectories),
        outcomes=tuple(outcomes),
        grade=None if record["grade"] is None else _read_grade(record["grade"]),
        fallback_reason=record["fallback_reason"],
    )


def _trajectory_record(trajectory: Trajectory, outcome: Outcome) -> dict[str, Json]:
    return {
        "id": trajectory.id,
        "patch": trajectory.patch.decode("utf-8", "surrogateescape"),
        "outcome": asdict(replace(outcome, tests=dict(outcome.tests))),
        "stop_reason": trajectory.stop_reason.value,
        "weight_version": trajectory.weight_version,
        "num_tokens": len(trajectory.ids),
        "num_action_tokens": trajectory.num_action_tokens,
        "turns": [_turn_record(turn) for turn in trajectory.turns],
    }


def _turn_record(turn: Turn) -> dict[str, Json]:
    action = turn.action
    return {
        "action": None if action is None else [action.name, dict(action.arguments)],
        "observation": turn.observation,
        "num_action_tokens": turn.num_action_tokens,
        "weight_version": turn.weight_version,
    }


def _read_turn(record: Mapping[str, Json]) -> Turn:
    action = record["action"]
    call = None if action is None else ToolCall(action[0], action[1])
    return Turn(
        call,
        record["observation"],
        record["num_action_tokens"],
        record["weight_version"],
    )


def _grade_record(grade: GroupGrade) -> dict[str, Json]:
    return {
        "grades": {name: asdict(entry) for name, entry in grade.grades.items()},
        "confirmed_hacks": list(grade.confirmed_hacks),
    }


def _read_grade(record: Mapping[str, Json]) -> GroupGrade:
    grades = {
        name: CandidateGrade(
            scores=tuple(entry["scores"]),
            tier=Tier(entry["tier"]),
            order=entry["order"],
            flags=tuple(Flag(**flag) for flag in entry["flags"]),
        )
        for name, entry in record["grades"].items()
    }
    return GroupGrade(grades, tuple(record["confirmed_hacks"]))


def _has_content(path: Path) -> bool:
    return path.is_dir() and any(entry.name != ".lock" for entry in path.iterdir())


def _check_same_config(path: Path, config: RunConfig) -> None:
    changed = differences(read_config(path), config)
    old_steps, new_steps = changed.get("steps", (0, 0))
    if new_steps >= old_steps:
        changed.pop("steps", None)
    if changed:
        clauses = ", ".join(
            f"{name} was {old!r} and is now {new!r}"
            for name, (old, new) in changed.items()
        )
        raise ValueError(
            f"the run in {str(path)!r} has another config ({clauses}): only steps may "
            "grow when a run is resumed"
        )


def _lock(path: Path) -> int:
    """Take the folder's lock, which ends with the process however it ends."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl
    except ImportError:  # Windows keeps no advisory locks of this kind
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another process is writing to {str(path)!r}") from None
    return descriptor


def _checkpoint_folders(path: Path) -> list[Path]:
    """Checkpoints that were renamed into place, oldest first."""
    return sorted((path / "checkpoints").glob("step_*"))


def _damage(folder: Path) -> str:
    """What is wrong with a checkpoint, "" when it is whole."""
    try:
        state = parse_json((folder / "state.json").read_bytes(), "state.json")
        step, files = state["step"], dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return "state.json cannot be read"
    if type(step) is not int or folder.name != _name(step) or not files:
        return f"state.json speaks of step {step!r} and {len(files)} files"
    for name, expected in files.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _sha256(folder / name) != expected:
            return f"{name} has changed"
    return ""


def _sessions(path: Path) -> list[Json]:
    """The sessions in a manifest. Raises ValueError where it holds none."""
    manifest = parse_json(path.read_bytes(), str(path))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sessions"), list):
        raise ValueError(f"{path} is no manifest of a run: it lists no sessions")
    return manifest["sessions"]


def _session(step: int) -> dict[str, Json]:
    versions = {"python": platform.python_version()}
    for name in REPORTED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    now = datetime.datetime.now(datetime.UTC)
    return {
        "step": step,
        "started_at": now.isoformat(timespec="seconds"),
        "versions": versions,
        "commit": _commit(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "command": sys.argv,
    }


def _commit() -> str | None:
    """The commit of the source tree, "-dirty" when edited; None outside of git."""
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ("git", "describe", "--always", "--dirty", "--abbrev=12")
    try:
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _name(step: int) -> str:
    return f"step_{step:05d}"


def _pretty(document: Mapping[str, Json]) -> bytes:
    return (json.dumps(document, indent=2, allow_nan=False) + "\n").encode()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".tmp_{path.name}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    """Make a file or a folder durable; Windows opens no folders, so it skips them."""
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
