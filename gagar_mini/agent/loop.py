"""The agent: a policy, six tools, limits, and one reason to stop.

The agent edits a tree in memory and runs the visible check in the sandbox; with
`rollout.tools` "bash" there is a seventh tool, a shell command on that tree, which runs
in the sandbox, too (`world.shell`). Whatever it does wrong (a malformed call, a path
outside the tree, an edit that matches nothing) comes back as an observation; only a
failing harness is an exception.

Edits name the old text, not line numbers: numbers go stale with the first edit.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np

from gagar_mini.agent.dialect import Dialect, MalformedCall
from gagar_mini.config import RolloutConfig
from gagar_mini.types import (
    Completion,
    Conversation,
    Engine,
    SamplingParams,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
    Turn,
    seed_for,
)
from gagar_mini.world.patches import make_patch
from gagar_mini.world.sandbox.base import Limits, Sandbox, episode
from gagar_mini.world.shell import run_shell, told
from gagar_mini.world.trees import path_error

MAX_FILES = 64
MAX_FILE_BYTES = 1 << 18
CHECK_LIMITS = Limits(wall_s=4.0, cpu_s=3, memory_mb=512, max_output_bytes=8192)


class Workspace:
    """The tree of one trajectory and the tools that act on it."""

    def __init__(
        self,
        task: Task,
        sandbox: Sandbox,
        max_observation_chars: int = 1200,
        *,
        has_bash: bool = False,
    ):
        self.task = task
        self.files: dict[str, bytes] = dict(task.files)
        self._sandbox = sandbox
        self._max_observation_chars = max_observation_chars
        self._tools: dict[str, Callable[..., str]] = {
            "ls": self._ls,
            "view": self._view,
            "edit": self._edit,
            "create": self._create,
            "run_check": self._run_check,
        }
        if has_bash:
            self._tools["bash"] = self._bash

    def act(self, call: ToolCall) -> str:
        """The observation of one call. Blocking: `run_check` and `bash` run
        programs."""
        if call.name not in self._tools:
            return f"error: there is no tool {call.name}"
        return shorten(
            self._tools[call.name](**call.arguments), self._max_observation_chars
        )

    def _ls(self) -> str:
        return "\n".join(sorted(self.files))

    def _view(self, path: str) -> str:
        if path not in self.files:
            return f"error: no file {path}"
        return visible_text(self.files[path])

    def _edit(self, path: str, old: str, new: str) -> str:
        if path not in self.files:
            return f"error: no file {path}"
        content, wanted = self.files[path], old.encode("utf-8", "replace")
        count = content.count(wanted) if wanted else 0
        if count != 1:
            return f"error: old text occurs {count} times in {path}"
        return self._write(
            path, content.replace(wanted, new.encode("utf-8", "replace"))
        )

    def _create(self, path: str, text: str) -> str:
        if path in self.files:
            return f"error: {path} exists, use edit"
        problem = path_error(path, self.files)
        if problem:
            return f"error: {problem}"
        if len(self.files) >= MAX_FILES:
            return f"error: at most {MAX_FILES} files"
        return self._write(path, text.encode("utf-8", "replace"))

    def _write(self, path: str, content: bytes) -> str:
        if len(content) > MAX_FILE_BYTES:
            return f"error: a file holds at most {MAX_FILE_BYTES} bytes"
        self.files[path] = content
        return "ok"

    def _run_check(self) -> str:
        result = self._sandbox.run(
            self.files, ("python", self.task.visible_check), limits=CHECK_LIMITS
        )
        if result.is_timeout:
            return f"error: the check ran longer than {CHECK_LIMITS.wall_s:g} s"
        text = visible_text(result.stdout + result.stderr).strip()
        return text or f"no output, exit status {result.returncode}"

    def _bash(self, command: str) -> str:
        result = run_shell(self._sandbox, self.files, command)
        self.files = dict(result.files)
        return told(result)


def visible_text(content: bytes) -> str:
    """Text of any bytes: undecodable ones and NULs are replaced, never dropped
    unseen."""
    return content.decode("utf-8", "replace").replace("\x00", "\ufffd")


def shorten(text: str, max_chars: int) -> str:
    """`text`, or its head and tail with the number of characters cut between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{text[-half:]}"


class Transcript:
    """The token arrays of one trajectory as they grow: append only, one length for
    all."""

    def __init__(self, prompt_ids: list[int]):
        self.ids = list(prompt_ids)
        self._is_action = [False] * len(prompt_ids)
        self._logprobs = [0.0] * len(prompt_ids)

    def append_completion(self, completion: Completion) -> None:
        self.ids += completion.ids.tolist()
        self._is_action += [True] * len(completion.ids)
        self._logprobs += completion.logprobs.tolist()

    def append_observation(self, ids: list[int]) -> None:
        self.ids += ids
        self._is_action += [False] * len(ids)
        self._logprobs += [0.0] * len(ids)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids [T] int64, action_mask [T] bool, behaviour_logprobs [T] float32."""
        return (
            np.array(self.ids, dtype=np.int64),
            np.array(self._is_action, dtype=bool),
            np.array(self._logprobs, dtype=np.float32),
        )


async def run_agent(
    task: Task,
    engine: Engine,
    dialect: Dialect,
    sandbox: Sandbox,
    limits: RolloutConfig,
    *,
    trajectory_id: str,
    seed: int,
) -> Trajectory:
    """Let the policy work on `task` until it submits or a limit is met.

    A budget that is used up is the policy's own doing: the tree as it stands is scored.
    Raises SandboxUnavailable when the harness fails.
    """
    transcript = Transcript(dialect.prompt_ids(task))
    async with _episode(sandbox) as room:
        workspace = Workspace(
            task,
            room,
            limits.max_observation_chars,
            has_bash=limits.tools == "bash",
        )
        with engine.conversation() as conversation:
            turns, stop_reason = await _take_turns(
                workspace, transcript, conversation, dialect, limits, seed
            )
    ids, action_mask, behaviour_logprobs = transcript.arrays()
    patch = await asyncio.to_thread(make_patch, task.files, workspace.files)
    return Trajectory(
        id=trajectory_id,
        task_id=task.id,
        ids=ids,
        action_mask=action_mask,
        behaviour_logprobs=behaviour_logprobs,
        turns=tuple(turns),
        patch=patch,
        stop_reason=stop_reason,
        weight_version=min((turn.weight_version for turn in turns), default=0),
    )


@asynccontextmanager
async def _episode(sandbox: Sandbox) -> AsyncIterator[Sandbox]:
    """The agent's own room, ended before its patch is verified, in a thread: other
    agents go on meanwhile."""
    room = episode(sandbox)
    try:
        yield room.__enter__()
    finally:
        await asyncio.to_thread(room.__exit__, None, None, None)


async def _take_turns(
    workspace: Workspace,
    transcript: Transcript,
    conversation: Conversation,
    dialect: Dialect,
    limits: RolloutConfig,
    seed: int,
) -> tuple[list[Turn], StopReason]:
    turns: list[Turn] = []
    action_tokens, tool_seconds = 0, 0.0
    while True:
        episode_left = limits.max_action_tokens - action_tokens
        context_left = limits.max_context_tokens - len(transcript.ids)
        if episode_left <= 0:
            return turns, StopReason.MAX_TOKENS
        if context_left <= 0:
            return turns, StopReason.MAX_CONTEXT
        sampling = SamplingParams(
            temperature=limits.temperature,
            max_new_tokens=min(limits.max_new_tokens, episode_left, context_left),
            stop_ids=dialect.stop_ids,
        )
        completion = await conversation.complete(
            transcript.ids, sampling, seed_for(seed, "turn", len(turns))
        )
        action, slip = parsed(dialect, completion, transcript.ids)
        transcript.append_completion(completion)
        action_tokens += len(completion.ids)

        started = time.monotonic()
        observation = slip if action is None else await _act(workspace, action)
        tool_seconds += time.monotonic() - started
        turns.append(
            Turn(action, observation, len(completion.ids), completion.weight_version)
        )
        if action is not None and action.name == "submit":
            return turns, StopReason.SUBMITTED
        if tool_seconds > limits.max_tool_seconds:
            return turns, StopReason.MAX_TOOL_SECONDS
        if len(turns) >= limits.max_turns:
            return turns, StopReason.MAX_TURNS
        observation_ids = dialect.observation_ids(
            action, observation, is_finished=completion.is_finished
        )
        # Checked before appending: an observation is whole or absent, never cut mid-
        # token.
        if len(transcript.ids) + len(observation_ids) >= limits.max_context_tokens:
            return turns, StopReason.MAX_CONTEXT
        transcript.append_observation(observation_ids)


def parsed(
    dialect: Dialect, completion: Completion, context: list[int]
) -> tuple[ToolCall | None, str]:
    """The call that a completion makes, or None and what to tell the policy."""
    try:
        return dialect.parse(completion.ids.tolist(), context), ""
    except MalformedCall as error:
        return None, f"error: {error}"


async def _act(workspace: Workspace, action: ToolCall) -> str:
    if action.name == "submit":
        return ""
    if action.name in ("run_check", "bash"):
        return await asyncio.to_thread(workspace.act, action)
    return workspace.act(action)
