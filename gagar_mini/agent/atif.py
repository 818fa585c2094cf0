"""ATIF-v1.7, the trajectory format of Harbor, written and read.

    step 1      the statement, by the user
    step n + 1  turn n: one call of a tool, its observation, the tokens it took

A trajectory in memory gives the sampled ids and their log-probabilities, too; one that
was recorded gives counts. No time is recorded, so none is written. Outcome, stop reason
and patch stand in the root's `extra`.

Foreign documents are read as far as a grader needs: calls, observations, and a patch
where `extra` has one.
"""

import json
from collections.abc import Iterator

import numpy as np

import gagar_mini
from gagar_mini.agent.members import (
    AGENT,
    Member,
    about,
    bare_trajectory,
    one_sentence,
    portable_patch,
)
from gagar_mini.records import Json
from gagar_mini.types import StopReason, ToolCall, Trajectory, Turn

VERSION = "ATIF-v1.7"
KEYS = {
    "trajectory": {"schema_version", "session_id", "trajectory_id", "agent", "steps",
                   "notes", "final_metrics", "continued_trajectory_ref", "extra",
                   "subagent_trajectories"},
    "step": {"step_id", "timestamp", "source", "model_name", "reasoning_effort",
             "message", "reasoning_content", "tool_calls", "observation", "metrics",
             "is_copied_context", "llm_call_count", "extra"},
    "call": {"tool_call_id", "function_name", "arguments", "extra"},
    "result": {"source_call_id", "content", "subagent_trajectory_ref", "extra"},
    "metrics": {"prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd",
                "prompt_token_ids", "completion_token_ids", "logprobs", "extra"},
}  # fmt: skip
AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls",
              "metrics")  # fmt: skip


def to_atif(member: Member, model: str) -> dict[str, Json]:
    """The ATIF-v1.7 document of a trajectory: the statement, then a step per turn."""
    trajectory = member.trajectory
    spans = action_spans(trajectory)
    steps: list[Json] = [
        {"step_id": 1, "source": "user", "message": member.task.statement}
    ]
    for number, turn in enumerate(trajectory.turns):
        span = spans[number] if spans else None
        steps.append(_step(number, turn, trajectory, span))
    total = sum(turn.num_action_tokens for turn in trajectory.turns)
    final = {"total_completion_tokens": total, "total_steps": len(steps)}
    patch = portable_patch(member.task, trajectory.patch)
    return {
        "schema_version": VERSION,
        "session_id": member.group_id or trajectory.id,
        "trajectory_id": trajectory.id,
        "agent": {
            "name": AGENT,
            "version": gagar_mini.__version__,
            "model_name": model,
        },
        "steps": steps,
        "final_metrics": final,
        "extra": {"task_id": member.task.id, "patch": patch, **about(member)},
    }


def action_spans(trajectory: Trajectory) -> list[tuple[int, int]]:
    """[first, last) token of each completion; empty where tokens were not recorded."""
    if not len(trajectory.ids):
        return []
    edges = np.diff(np.concatenate([[0], trajectory.action_mask.astype(int), [0]]))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
    assert len(spans) == len(trajectory.turns), "an observation parts two completions"
    return spans


def _step(
    number: int, turn: Turn, trajectory: Trajectory, span: tuple[int, int] | None
) -> dict[str, Json]:
    call_id = f"call-{number + 1}"
    metrics: dict[str, Json] = {"completion_tokens": turn.num_action_tokens}
    if span is not None:
        first, last = span
        metrics |= {
            "prompt_tokens": first,
            "completion_token_ids": trajectory.ids[first:last].tolist(),
            "logprobs": trajectory.behaviour_logprobs[first:last].tolist(),
        }
    step: dict[str, Json] = {
        "step_id": number + 2,
        "source": "agent",
        "message": "",  # a turn is a call and nothing else
        "metrics": metrics,
        "llm_call_count": 1,
        "extra": {"weight_version": turn.weight_version},
    }
    result: dict[str, Json] = {"content": turn.observation}
    if turn.action is not None:
        step["tool_calls"] = [
            {
                "tool_call_id": call_id,
                "function_name": turn.action.name,
                "arguments": dict(turn.action.arguments),
            }
        ]
        result["source_call_id"] = call_id
    return step | {"observation": {"results": [result]}}


def from_atif(document: object, name: str = "document") -> Trajectory:
    """The trajectory in an ATIF document, as far as a grader sees one: turns and patch.

    Tokens are not read. A foreign document has no patch: it is b"" then.
    """
    check(document, name)
    with one_sentence(name):
        extra = document.get("extra") or {}
        by_agent = [step for step in document["steps"] if step["source"] == "agent"]
        return bare_trajectory(
            document.get("trajectory_id") or name,
            extra.get("task_id", ""),
            [turn for step in by_agent for turn in _turns(step)],
            extra.get("patch", ""),
            StopReason(extra.get("stop_reason", StopReason.SUBMITTED)),
        )


def _turns(step: dict) -> Iterator[Turn]:
    """One turn per call; a step without a call is a turn without an action."""
    results = (step.get("observation") or {}).get("results", [])
    calls = step.get("tool_calls") or [None]
    tokens = (step.get("metrics") or {}).get("completion_tokens") or 0
    version = (step.get("extra") or {}).get("weight_version", 0)
    for number, call in enumerate(calls):
        call_id = call and call["tool_call_id"]
        seen = [_plain(r.get("content")) for r in results
                if r.get("source_call_id") == call_id]  # fmt: skip
        action = None
        if call is not None:
            given = call["arguments"].items()
            arguments = {key: _plain(value) for key, value in given}
            action = ToolCall(call["function_name"], arguments)
        yield Turn(action, "\n".join(seen), 0 if number else tokens, version)


def _plain(value: object) -> str:
    """Text as it is, nothing as "", anything else as JSON: arguments here are texts."""
    return (value or "") if isinstance(value, str | None) else json.dumps(value)


def check(document: object, name: str = "document") -> None:
    """Raise ValueError for what the ATIF-v1.7 schema does not allow."""
    if not isinstance(document, dict) or document.get("schema_version") != VERSION:
        raise ValueError(f"{name} is no {VERSION} document")
    _check_keys(document, "trajectory", name, {"agent", "steps"})
    agent = document["agent"]
    if not isinstance(agent, dict) or not {"name", "version"} <= agent.keys():
        raise ValueError(f"{name}: the agent needs a name and a version")
    steps = document["steps"]
    if not isinstance(steps, list) or not steps:
        raise ValueError(f"{name}: steps must list at least one step")
    with one_sentence(name):
        for number, step in enumerate(steps, start=1):
            _check_step(step, number, f"{name}: step {number}")


def _check_step(step: object, number: int, where: str) -> None:
    _check_keys(step, "step", where, {"step_id", "source", "message"})
    if step["step_id"] != number:
        raise ValueError(
            f"{where} has the id {step['step_id']!r}: ids run 1, 2, 3, ..."
        )
    if step["source"] not in ("system", "user", "agent"):
        raise ValueError(f"{where} has the source {step['source']!r}")
    foreign = [key for key in AGENT_ONLY if step.get(key) is not None]
    if foreign and step["source"] != "agent":
        raise ValueError(f"{where} is no step of the agent and has {foreign[0]}")
    call_ids = {None}
    for call in step.get("tool_calls") or []:
        required = {"tool_call_id", "function_name", "arguments"}
        _check_keys(call, "call", f"{where}, call", required)
        if not isinstance(call["arguments"], dict):
            raise ValueError(f"{where}: the arguments of a call must be an object")
        call_ids.add(call["tool_call_id"])
    for result in (step.get("observation") or {}).get("results", []):
        _check_keys(result, "result", f"{where}, result", set())
        if result.get("source_call_id") not in call_ids:
            called = result["source_call_id"]
            raise ValueError(f"{where}: a result answers {called!r}, which is no call")
    if step.get("metrics") is not None:
        _check_keys(step["metrics"], "metrics", f"{where}, metrics", set())


def _check_keys(found: object, kind: str, where: str, required: set[str]) -> None:
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object")
    unknown = sorted(found.keys() - KEYS[kind])
    if unknown:
        raise ValueError(
            f"{where} has the field {unknown[0]!r}, which {VERSION} has not"
        )
    missing = sorted(required - found.keys())
    if missing:
        raise ValueError(f"{where} lacks {missing[0]!r}")
