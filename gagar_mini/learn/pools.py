"""Pools of candidates, each of one task, and the files that hold them.

Stored are calls and what the visible check said; all other observations, and the hash
of the tree, follow from the calls when a pool is read.
"""

import functools
import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gagar_mini.agent.loop import Workspace
from gagar_mini.paths import find_data
from gagar_mini.types import (
    Candidate,
    Outcome,
    SandboxUnavailable,
    Status,
    Task,
    ToolCall,
    Turn,
)
from gagar_mini.world.patches import tree_hash
from gagar_mini.world.sandbox.base import RunResult
from gagar_mini.world.tasks import find_task

Source = Literal["ladder", "rollout"]


@dataclass(frozen=True)
class PoolCandidate:
    """One candidate, and what it is made of: `kinds` are its degradations, in the order
    of application, () for a clean ladder member, a failing one and a rollout."""

    candidate: Candidate
    kinds: tuple[str, ...]
    source: Source
    way: str = ""
    """For a ladder member, the clean ways under it joined by "+"; "gold" for none of
    them, "wrong" for a wrong line."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates of one task, passing and failing."""

    task: Task
    candidates: tuple[PoolCandidate, ...]


@functools.cache
def load_pools(name: str, every: int = 1) -> tuple[Pool, ...]:
    """The pools of a data file: "train", "rollouts_eval", "ladders_eval",
    "ladders_seen"; one in `every`, for reading takes its time. FileNotFoundError
    without the file."""
    content = gzip.decompress(find_data(f"grader/{name}.jsonl.gz").read_bytes())
    return tuple(
        decode_pool(json.loads(line)) for line in content.splitlines()[::every]
    )


def write_pools(path: Path, pools: Sequence[Pool]) -> None:
    """One JSON object a line, gzipped; the same bytes for the same pools."""
    lines = [json.dumps(encode_pool(pool), separators=(",", ":")) for pool in pools]
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as file:
        file.write("".join(line + "\n" for line in lines).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def encode_pool(pool: Pool) -> dict[str, object]:
    return {
        "task": pool.task.id,
        "candidates": [encode_candidate(pool.task, c) for c in pool.candidates],
    }


def encode_candidate(task: Task, member: PoolCandidate) -> dict[str, object]:
    """The fields that do not follow from the task and the calls."""
    candidate, outcome = member.candidate, member.candidate.outcome
    calls = [turn.action for turn in candidate.turns]
    replayed = list(Replay(task).play(calls))
    record = {
        "id": candidate.id,
        "source": member.source,
        "kinds": list(member.kinds),
        "patch": candidate.patch.decode(),
        "status": outcome.status.value,
        "turns": [
            encode_turn(turn, again)
            for turn, again in zip(candidate.turns, replayed, strict=True)
        ],
    }
    if member.way:
        record["way"] = member.way
    if outcome.status is not Status.PASS:
        record |= {"tests": dict(outcome.tests), "reason": outcome.reason}
        record |= {"codes": list(outcome.codes)} if outcome.codes else {}
    return record


def encode_turn(turn: Turn, replayed: Turn) -> list[object]:
    """[name, arguments, tokens] and the observation where a replay does not give it."""
    action = turn.action
    call = [action.name, *action.arguments.items()] if action else [""]
    told = [] if turn.observation == replayed.observation else [turn.observation]
    return [call, turn.num_action_tokens, *told]


class NoSandbox:
    """A sandbox for a workspace in which nothing is run."""

    name = "none"

    def run(self, *args: object, **options: object) -> RunResult:
        raise SandboxUnavailable("nothing runs where calls are only replayed")

    def close(self) -> None:
        pass


class Replay:
    """Plays calls without running anything: the check says nothing."""

    def __init__(self, task: Task):
        self.workspace = Workspace(task, NoSandbox())

    def play(self, calls: Sequence[ToolCall | None]) -> Iterator[Turn]:
        for call in calls:
            is_silent = call is None or call.name in ("submit", "run_check")
            yield Turn(call, "" if is_silent else self.workspace.act(call), 0)


def decode_pool(record: dict) -> Pool:
    task = find_task(record["task"])
    return Pool(task, tuple(decode_candidate(task, c) for c in record["candidates"]))


def decode_candidate(task: Task, record: dict) -> PoolCandidate:
    calls = [decode_call(call) for call, *_ in record["turns"]]
    replay = Replay(task)
    turns = tuple(
        Turn(turn.action, told[0] if told else turn.observation, num_tokens)
        for turn, (_, num_tokens, *told) in zip(
            replay.play(calls), record["turns"], strict=True
        )
    )
    patch = record["patch"].encode()
    passes = {test.id: "pass" for test in task.hidden_tests}
    outcome = Outcome(
        Status(record["status"]),
        record.get("tests", passes),
        record.get("reason", ""),
        tuple(record.get("codes", ())),
        patch_hash=hashlib.sha256(patch).hexdigest(),
        tree_hash=tree_hash(replay.workspace.files),
    )
    candidate = Candidate(record["id"], patch, outcome, turns)
    return PoolCandidate(
        candidate, tuple(record["kinds"]), record["source"], record.get("way", "")
    )


def decode_call(call: Sequence) -> ToolCall | None:
    name, *arguments = call
    return ToolCall(name, dict(arguments)) if name else None
