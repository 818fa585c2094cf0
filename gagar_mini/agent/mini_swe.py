"""mini-swe-agent-1.1, the .traj.json of mini-swe-agent, written and read.

mini-swe-agent has one tool, a shell. A call of another tool is written as such in
`tool_calls`, and as the command line that it reads like in `extra.actions`, where
viewers look. Exit codes and times are not recorded: they are null.
"""

import json
import shlex
from itertools import pairwise

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

FORMAT = "mini-swe-agent-1.1"
EXIT_STATUS = {
    StopReason.SUBMITTED: "Submitted",
    StopReason.MAX_TURNS: "LimitsExceeded",
    StopReason.MAX_TOKENS: "LimitsExceeded",
    StopReason.MAX_CONTEXT: "LimitsExceeded",
    StopReason.MAX_TOOL_SECONDS: "TimeExceeded",
    StopReason.INFRA: "SandboxUnavailable",
}
"""mini-swe-agent's names of why an agent ended."""


def to_mini_swe(member: Member, model: str) -> dict[str, Json]:
    """The document of a trajectory. `submission` is the final tree's patch whatever
    ended the trajectory: that is what was scored."""
    trajectory = member.trajectory
    patch = portable_patch(member.task, trajectory.patch)
    ended = {"exit_status": EXIT_STATUS[trajectory.stop_reason], "submission": patch}
    messages: list[Json] = [{"role": "user", "content": member.task.statement}]
    for number, turn in enumerate(trajectory.turns, start=1):
        messages += [_asked(turn, f"call-{number}"), _answered(turn, f"call-{number}")]
    messages.append({"role": "exit", "content": patch, "extra": ended})
    return {
        "info": {
            "model_stats": {
                "instance_cost": 0.0,
                "api_calls": len(trajectory.turns),
            },
            "config": {"model": {"model_name": model}, "agent_type": AGENT},
            "mini_version": "",  # another agent wrote it
            **ended,
            AGENT: {"trajectory_id": trajectory.id, **about(member)},
        },
        "messages": messages,
        "trajectory_format": FORMAT,
        "instance_id": member.task.id,
    }


def _asked(turn: Turn, call_id: str) -> dict[str, Json]:
    """What the model said: a call, or a completion that was none."""
    extra: dict[str, Json] = {
        "actions": [],
        "usage": {"completion_tokens": turn.num_action_tokens},
        "weight_version": turn.weight_version,
    }
    message: dict[str, Json] = {"role": "assistant", "content": "", "extra": extra}
    if turn.action is not None:
        line = command_line(turn.action)
        extra["actions"] = [{"command": line, "tool_call_id": call_id}]
        arguments = json.dumps(dict(turn.action.arguments))
        function = {"name": turn.action.name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        message["tool_calls"] = [call]
    return message


def _answered(turn: Turn, call_id: str) -> dict[str, Json]:
    is_answer = turn.action is not None
    return {
        "role": "tool" if is_answer else "user",
        "content": turn.observation,
        "extra": {
            "raw_output": turn.observation,
            "returncode": None,
            "timestamp": None,
            "exception_info": "",
        },
        **({"tool_call_id": call_id} if is_answer else {}),
    }


def command_line(call: ToolCall) -> str:
    """A call as a shell would read it; the command itself for the tool bash."""
    if call.name == "bash":
        return call.arguments.get("command", "")
    return shlex.join([call.name, *call.arguments.values()])


def from_mini_swe(document: object, name: str = "document") -> Trajectory:
    """The trajectory in a document, without tokens; in a foreign one, whose actions are
    commands, all calls are of the tool bash."""
    form = document.get("trajectory_format") if isinstance(document, dict) else None
    if form != FORMAT:
        raise ValueError(f"{name} is no {FORMAT} trajectory but {str(form)[:40]!r}")
    with one_sentence(name):
        info = document["info"]
        said = [m for m in document["messages"] if m["role"] != "exit"]
        turns = [
            _turn(message, following)
            for message, following in pairwise([*said, {"role": "", "content": ""}])
            if message["role"] == "assistant"
        ]
        own = info.get(AGENT, {})
        reasons = {status: reason for reason, status in EXIT_STATUS.items()}
        guessed = reasons.get(info["exit_status"], StopReason.INFRA)
        return bare_trajectory(
            own.get("trajectory_id", name),
            document.get("instance_id", ""),
            turns,
            info["submission"],
            StopReason(own.get("stop_reason", guessed)),
        )


def _turn(message: dict, following: dict) -> Turn:
    extra = message.get("extra", {})
    actions, calls = extra.get("actions", []), message.get("tool_calls") or []
    if max(len(actions), len(calls)) > 1:
        raise ValueError("a message with several calls is more than one turn")
    action = None
    if calls:
        function = calls[0]["function"]
        action = ToolCall(function["name"], json.loads(function["arguments"]))
    elif actions:
        action = ToolCall("bash", {"command": actions[0]["command"]})
    is_answer = following["role"] in ("tool", "user")
    return Turn(
        action,
        following["content"] if is_answer else "",
        extra.get("usage", {}).get("completion_tokens", 0),
        extra.get("weight_version", 0),
    )
