"""One grading loop for every mind: look at the workspace with tools, then submit.

A mind is whatever chooses the next call: a script, a small trained model, a model
behind an endpoint. The loop, the tools, the limits and the checks are the same for all,
so that graders differ in judgement alone. An unusable reply is told once to the mind,
with the reason; the second one ends the grading, and the group keeps its original
advantages.

Paper (report, section 4.3): an agentic grader inspects all trajectories of the group
jointly. Differs from the paper: its grader and its prompt are not public.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from gagar_mini.grader.rubric import validate_grade
from gagar_mini.grader.tools import GraderCall, GradingTools, ToolSpec
from gagar_mini.grader.verdict import SUBMIT_TOOL, Verdict, grade_from, read_verdict
from gagar_mini.grader.workspace import SharedWorkspace, build_workspace
from gagar_mini.types import (
    Candidate,
    GroupGrade,
    SandboxUnavailable,
    Task,
    UnusableGrade,
)
from gagar_mini.world.sandbox.base import Sandbox

RULES_VERSION = 1
"""Part of the grader's version: a change of tools or checks makes old grades stale."""


@dataclass(frozen=True)
class GradingLimits:
    """What one grading may cost: replies, tokens read and written (as the mind reports
    them), seconds per reply and in all."""

    max_turns: int = 64
    max_tokens: int = 400_000
    reply_s: float = 60.0
    total_s: float = 300.0


DEFAULT_LIMITS = GradingLimits()


@dataclass(frozen=True)
class Exchange:
    """A call (None where the reply was none) and what came back: data that candidates
    wrote, or a word of the loop."""

    call: GraderCall | None
    output: str
    is_data: bool = True


@dataclass(frozen=True)
class Dialogue:
    """All that a mind knows: the task, the tools on offer, what was said so far."""

    task: str
    tools: tuple[ToolSpec, ...]
    exchanges: tuple[Exchange, ...]
    seed: int


@dataclass(frozen=True)
class MindReply:
    """The next call, or None and a `problem`: "no_tool_call" or "malformed_call".
    `num_tokens` were read and written for it."""

    call: GraderCall | None
    num_tokens: int = 0
    problem: str = "no_tool_call"


@runtime_checkable
class GradingSession(Protocol):
    """A mind at work on one grading: chooses the next call, each time."""

    async def reply(self, dialogue: Dialogue) -> MindReply: ...


@runtime_checkable
class GraderMind(Protocol):
    """Opens a session for each grading, which may remember what it has read and ends
    with its `with` block. `version` names the weights and the prompt."""

    version: str

    def session(self) -> AbstractContextManager[GradingSession]: ...


@dataclass(frozen=True)
class GradingRecord:
    """One grading, for a log or a lesson: what was said, what it cost, how it ended.

    `reason` is "" for a usable grade; `retried_for` is the reason of the retry, if any.
    """

    task_id: str
    version: str
    reason: str
    retried_for: str
    exchanges: tuple[Exchange, ...]
    num_tokens: int
    seconds: float
    is_cached: bool = False
    shown: tuple[str, ...] = ()
    """The candidates, by their own ids, in the order in which the mind saw them."""
    submitted: GraderCall | None = None
    """The last submission, usable or not."""


class AgenticGrader:
    """Grades through a mind. Implements `types.Grader`.

    Fewer than `min_trees` distinct passing trees leave nothing to rank: UnusableGrade(
    "one_tree"), without a question; with 1 it scores single candidates, too. `sandbox`
    gives the mind the tool `run`. `records` holds the latest gradings.

    With `cache_size` above 0, a group with the trees of an earlier one (same task, same
    version of the mind) gets its verdict, whatever the order of the candidates. A
    verdict that rests on turns or runs is never kept, but a cached one does not look at
    new turns either: leave it at 0 where the process should be judged each time.
    """

    def __init__(
        self,
        mind: GraderMind,
        *,
        limits: GradingLimits = DEFAULT_LIMITS,
        sandbox: Sandbox | None = None,
        cache_size: int = 0,
        min_trees: int = 2,
    ):
        self.min_trees = min_trees
        self.records: deque[GradingRecord] = deque(maxlen=256)
        self.version = f"{RULES_VERSION}:{mind.version}"
        self._mind = mind
        self._limits = limits
        self._sandbox = sandbox
        self._cache_size = cache_size
        self._cache: OrderedDict[tuple[str, ...], Verdict] = OrderedDict()

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        """Raises UnusableGrade: a reason of `read_verdict` or `build_workspace`, or
        "no_tool_call", "malformed_call", "max_turns", "max_tokens", "timeout", "crash",
        "sandbox", "one_tree"."""
        workspace = await asyncio.to_thread(build_workspace, task, candidates, seed)
        if len(workspace.passing) < self.min_trees:
            raise UnusableGrade("one_tree", "nothing to rank")
        key = (
            task.id,
            self.version,
            *sorted(e.key for e in workspace.entries.values()),
        )
        verdict = self._recall(key, workspace, task)
        if verdict is None:
            tools = GradingTools(workspace, task.files, self._sandbox)
            with self._mind.session() as session:
                grading = _Grading(session, tools, self._limits, seed)
                verdict = await self._hold(grading, task)
            self._keep(key, workspace, verdict)
        return validate_grade(grade_from(verdict, workspace), candidates)

    async def _hold(self, grading: "_Grading", task: Task) -> Verdict:
        started, reason = time.monotonic(), "crash"
        try:
            verdict = await grading.run()
            reason = ""
            return verdict
        except UnusableGrade as error:
            reason = error.reason
            raise
        except asyncio.CancelledError:
            reason = "timeout"  # the caller's deadline
            raise
        finally:
            self.records.append(
                GradingRecord(
                    task.id,
                    self.version,
                    reason,
                    grading.retried_for,
                    tuple(grading.exchanges),
                    grading.num_tokens,
                    time.monotonic() - started,
                    shown=shown_in(grading.tools.workspace),
                    submitted=grading.submitted,
                )
            )

    def _recall(
        self, key: tuple[str, ...], workspace: SharedWorkspace, task: Task
    ) -> Verdict | None:
        """The kept verdict on these trees, in this workspace's ids."""
        verdict = self._cache.get(key)
        if verdict is None:
            return None
        self._cache.move_to_end(key)
        self.records.append(
            GradingRecord(
                task.id, self.version, "", "", (), 0, 0.0, True, shown_in(workspace)
            )
        )
        return rename(verdict, {e.key: id_ for id_, e in workspace.entries.items()})

    def _keep(
        self, key: tuple[str, ...], workspace: SharedWorkspace, verdict: Verdict
    ) -> None:
        if self._cache_size and is_about_trees(verdict):
            keys = {id_: e.key for id_, e in workspace.entries.items()}
            self._cache[key] = rename(verdict, keys)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)


def shown_in(workspace: SharedWorkspace) -> tuple[str, ...]:
    """The candidates' own ids in the order of the workspace, equal trees together."""
    members = (
        m for entry in workspace.entries.values() for m in entry.members.values()
    )
    return tuple(member.id for member in members)


def is_about_trees(verdict: Verdict) -> bool:
    """Whether the verdict holds for other trajectories with the same trees."""
    cited = [flag.evidence for flags in verdict.flags.values() for flag in flags]
    rests_on_events = any(text.startswith(("turn ", "run ")) for text in cited)
    splits_trees = any(
        i not in verdict.scores for group in verdict.order for i in group
    )
    return not (verdict.hacks or verdict.own_flags or rests_on_events or splits_trees)


def rename(verdict: Verdict, names: dict[str, str]) -> Verdict:
    """`verdict` with each entry's id replaced by `names[id]`."""
    return replace(
        verdict,
        scores={names[id_]: scores for id_, scores in verdict.scores.items()},
        flags={names[id_]: flags for id_, flags in verdict.flags.items()},
        order=tuple(tuple(names[id_] for id_ in group) for group in verdict.order),
    )


@dataclass
class _Grading:
    """One grading as it goes on."""

    session: GradingSession
    tools: GradingTools
    limits: GradingLimits
    seed: int
    exchanges: list[Exchange] = field(default_factory=list)
    num_tokens: int = 0
    retried_for: str = ""
    submitted: GraderCall | None = None

    async def run(self) -> Verdict:
        """The verdict; after one retry, UnusableGrade with the last reason."""
        try:
            async with asyncio.timeout(self.limits.total_s):
                return await self._take_turns()
        except TimeoutError:
            raise UnusableGrade("timeout", "the grading took too long") from None
        except SandboxUnavailable as error:
            raise UnusableGrade("sandbox", str(error)) from error

    async def _take_turns(self) -> Verdict:
        while True:
            call = None
            try:
                call = await self._next_call()
                if call.name == SUBMIT_TOOL.name:
                    self.submitted = call
                    return read_verdict(call.arguments, self.tools)
                exchange = Exchange(call, await self.tools.use(call))
            except UnusableGrade as error:
                if self.retried_for:
                    raise
                self.retried_for = error.reason
                told = f"unusable: {error}. You have one more try: submit_grade."
                exchange = Exchange(call, told, is_data=False)
            self.exchanges.append(exchange)

    async def _next_call(self) -> GraderCall:
        """One reply within the limits. Raises UnusableGrade."""
        # the reply that a retry asks for, and the exchange that asked, are extra
        allowed = self.limits.max_turns + (2 if self.retried_for else 0)
        if len(self.exchanges) >= allowed:
            raise UnusableGrade("max_turns", f"no verdict in {self.limits.max_turns}")
        reply = await self._ask()
        self.num_tokens += max(0, reply.num_tokens)
        if reply.call is None:
            raise UnusableGrade(reply.problem, "reply with one tool call")
        is_over = self.num_tokens > self.limits.max_tokens
        if is_over and reply.call.name != SUBMIT_TOOL.name:
            raise UnusableGrade("max_tokens", f"{self.num_tokens} tokens used")
        return reply.call

    async def _ask(self) -> MindReply:
        dialogue = Dialogue(
            self.tools.workspace.files["TASK.md"],
            (*self.tools.specs, SUBMIT_TOOL),
            tuple(self.exchanges),
            self.seed,
        )
        try:
            async with asyncio.timeout(self.limits.reply_s):
                reply = await self.session.reply(dialogue)
        except TimeoutError:
            raise UnusableGrade("timeout", "no reply in time") from None
        except Exception as error:
            # the kind of error only: its text may quote a key or a candidate
            raise UnusableGrade("crash", type(error).__name__) from None
        if not is_reply(reply):
            raise UnusableGrade("malformed_call", "the reply is no call of a tool")
        return reply


def is_reply(reply: object) -> bool:
    """Whether a mind kept to its protocol; whatever it does, training goes on."""
    if not isinstance(reply, MindReply) or type(reply.num_tokens) is not int:
        return False
    call = reply.call
    if call is None:
        return reply.problem in ("no_tool_call", "malformed_call")
    return isinstance(call.name, str) and isinstance(call.arguments, Mapping)
