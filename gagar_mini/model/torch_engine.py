"""Many conversations sampled together in plain torch: the engine of the tiny policy,
and the rounds that any model with a cache of rows is driven in.

Each conversation owns a row of the key-value cache across its turns, so a turn costs
its new tokens only. Rollouts must not depend on how long a tool took, so work goes in
rounds behind a barrier: a round starts when every open conversation waits for the
engine, and ends when a share of them has an answer. What a round holds follows from the
order in which conversations were opened, never from who came back first.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gagar_mini.cpu_meter import MeteredExecutor
from gagar_mini.model.cached_model import CachedModel
from gagar_mini.model.policy import TinyPolicy
from gagar_mini.types import Completion, SamplingParams

SHARE_PER_ROUND = 1 / 4  # of the rows: less makes more rounds, more lets rows idle
PREFILL_TOKENS = 2048  # new tokens read in one pass: bounds the memory it takes


@runtime_checkable
class RowModel(Protocol):
    """Weights, and the keys and values of up to `max_rows` contexts of `max_context`
    tokens."""

    max_rows: int
    max_context: int

    def load(self, policy: nn.Module) -> None:
        """Copy the weights of `policy`."""
        ...

    def allocate(self) -> None:
        """Make the cache unless it is there."""
        ...

    def free(self) -> None:
        """Give its memory back."""
        ...

    def copy_row(self, source: int, targets: Sequence[int], length: int) -> None:
        """Copy the first `length` keys and values of one row to others."""
        ...

    def prefill(
        self, rows: Sequence[int], ids: Sequence[np.ndarray], starts: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Append `ids[i]` to row `rows[i]`, which holds `starts[i]` tokens; the logits
        of what follows each."""
        ...

    def decode(
        self, ids: Sequence[int], positions: Sequence[int]
    ) -> Float[Tensor, "row vocab"]:
        """Append a token to each of the rows 0, 1, ...; the logits of what follows."""
        ...


class RowEngine:
    """Samples from a `RowModel` of its own (protocol: `types.Engine`).

    Open conversations before the first `await` of their coroutines, and close each
    before waiting for anything but its own tools: an open conversation that asks for
    nothing holds back all others. Conversations beyond `max_rows` wait for a free row.
    """

    def __init__(self, model: RowModel, weight_version: int = 0):
        self.model = model
        self.max_context = model.max_context
        self.weight_version = weight_version
        self.conversations: list[TorchConversation] = []
        self.is_running = False
        # a thread of its own: busy tools must not keep the engine waiting
        self.executor = MeteredExecutor(1, thread_name_prefix="engine")

    def conversation(self) -> "TorchConversation":
        """Open an empty context. Use it in a `with`: that is what closes it."""
        conversation = TorchConversation(self)
        self.conversations.append(conversation)
        return conversation

    async def sync_weights(self, policy: nn.Module, version: int) -> None:
        """Sample from `policy` as it is now, as weights number `version`.

        RuntimeError while a conversation is open: its cache is of the old weights.
        """
        self.require_no_conversation("weights cannot change")
        await self.in_turn(self.model.load, policy)
        self.weight_version = version

    async def sleep(self) -> None:
        """Give the cache's memory back until the next completion."""
        self.require_no_conversation("the engine cannot sleep")
        await self.in_turn(self.model.free)

    async def wake(self) -> None:
        await self.in_turn(self.model.allocate)

    async def close(self) -> None:
        self.require_no_conversation("the engine cannot close")
        await self.in_turn(self.model.free)
        self.executor.shutdown()

    async def in_turn(self, work: Callable[..., None], *arguments: object) -> None:
        """Run `work` in the engine's thread, after what it does at the moment."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.executor, work, *arguments)

    def require_no_conversation(self, consequence: str) -> None:
        if self.is_running or any(c.is_open for c in self.conversations):
            raise RuntimeError(f"{consequence} while a conversation is open")

    def schedule(self) -> None:
        """Start a round soon, if the barrier lets it."""
        # not at once: tasks started together all open their conversation first
        asyncio.get_running_loop().call_soon(self.start_round)

    def start_round(self) -> None:
        self.conversations = [c for c in self.conversations if c.is_open]
        if self.is_running or any(c.request is None for c in self.conversations):
            return
        rows, moves = assign_rows(self.conversations, self.model.max_rows)
        if rows:
            self.is_running = True
            self.round_task = asyncio.create_task(self.run_round(rows, moves))

    async def run_round(
        self, rows: list["TorchConversation"], moves: list[tuple[int, int, int]]
    ) -> None:
        error = None
        try:
            await self.in_turn(self.compute_round, rows, moves)
        except Exception as caught:
            error = caught
        finally:
            self.is_running = False
        for row in rows:
            row.settle(error)
        self.schedule()

    @torch.inference_mode()
    def compute_round(
        self, rows: list["TorchConversation"], moves: list[tuple[int, int, int]]
    ) -> None:
        """Prefill what is new, then decode until a share of the rows is done."""
        self.model.allocate()
        for source, target, length in moves:
            self.model.copy_row(source, [target], length)
        requests = [row.request for row in rows]
        fresh = [row for row in rows if not row.request.sampled]
        for batch in prefill_batches(fresh):
            self.prefill(batch)
        enough = math.ceil(len(rows) * SHARE_PER_ROUND)
        while sum(request.is_done for request in requests) < enough:
            self.decode(requests)

    def prefill(self, batch: list[list["TorchConversation"]]) -> None:
        """Read the new tokens of the first row of each family; its twins copy them."""
        leaders = [family[0] for family in batch]
        logits = self.model.prefill(
            [row.slot for row in leaders],
            [row.request.ids[row.num_cached :] for row in leaders],
            [row.num_cached for row in leaders],
        )
        for leader, *twins in batch:
            slots = [twin.slot for twin in twins]
            self.model.copy_row(leader.slot, slots, len(leader.request.ids))
        source = [i for i, family in enumerate(batch) for _ in family]
        draw([row.request for family in batch for row in family], logits[source])

    def decode(self, requests: list["Request"]) -> None:
        logits = self.model.decode(
            [request.sampled[-1] for request in requests],
            [len(request.ids) + len(request.sampled) - 1 for request in requests],
        )
        draw(requests, logits)


class TorchEngine(RowEngine):
    """Samples from a private fp32 copy of a tiny policy."""

    def __init__(
        self,
        policy: TinyPolicy,
        *,
        max_rows: int = 128,
        max_context: int | None = None,
        device: str = "cpu",
        weight_version: int = 0,
    ):
        longest = policy.config.max_position_embeddings
        max_context = checked_context(max_context, longest)
        model = CachedModel(policy, max_rows, max_context, device)
        super().__init__(model, weight_version)


def checked_context(max_context: int | None, longest: int) -> int:
    """`max_context`, or the `longest` of the model. ValueError for one above it."""
    if max_context is not None and not 0 < max_context <= longest:
        raise ValueError(
            f"max_context is {max_context}: it must lie in 1..{longest}, the "
            "context of the policy"
        )
    return max_context or longest


class TorchConversation:
    """One append-only context; it owns cache row `slot` from its first round on."""

    def __init__(self, engine: RowEngine):
        self.engine = engine
        self.is_open = True
        self.slot: int | None = None
        self.context = np.zeros(0, dtype=np.int64)
        self.request: Request | None = None

    @property
    def num_cached(self) -> int:
        """Tokens in the cache: all but the last one, which was never fed back."""
        num_known = len(self.context)
        if self.request is not None and self.request.sampled:
            num_known = len(self.request.ids) + len(self.request.sampled)
        return max(0, num_known - 1)

    async def complete(
        self, ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> Completion:
        """Sample what follows `ids`, which begin with all that went before.

        Ends unfinished, possibly empty, where the context is full. Cancelling the call
        closes the conversation.
        """
        context = np.array(ids, dtype=np.int64)
        known = len(self.context)
        assert self.is_open and self.request is None, "one completion at a time"
        assert np.array_equal(context[:known], self.context), "the past has changed"
        assert len(context) > 0, "there is nothing to continue"
        num_new = min(sampling.max_new_tokens, self.engine.max_context - len(context))
        version = self.engine.weight_version
        if num_new <= 0:
            nothing = np.zeros(0, dtype=np.float32)
            return Completion(nothing.astype(np.int64), nothing, False, version)
        answer = asyncio.get_running_loop().create_future()
        self.request = Request(context, sampling, uniforms(seed, num_new), answer)
        self.engine.schedule()
        try:
            sampled, logprobs, is_finished = await answer
        except asyncio.CancelledError:
            self.close()
            raise
        return Completion(sampled, logprobs, is_finished, version)

    def settle(self, error: Exception | None) -> None:
        """After a round: hand the caller the answer, or what broke the round."""
        request = self.request
        if error is None and not request.is_done:
            return
        self.request = None
        sampled = np.array(request.sampled, dtype=np.int64)
        if error is None:
            self.context = np.concatenate([request.ids, sampled])
        if request.answer.done():
            return
        if error is not None:
            self.is_open = False
            request.answer.set_exception(error)
            return
        logprobs = np.array(request.logprobs, dtype=np.float32)
        request.answer.set_result((sampled, logprobs, request.is_finished))

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        if self.request is not None:
            self.request.answer.cancel()
        self.engine.schedule()

    def __enter__(self) -> "TorchConversation":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(eq=False)
class Request:
    """A completion on its way: its context, how to sample, and what was sampled."""

    ids: np.ndarray
    sampling: SamplingParams
    uniforms: np.ndarray
    answer: asyncio.Future
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return bool(self.sampled) and self.sampled[-1] in self.sampling.stop_ids

    @property
    def is_done(self) -> bool:
        return len(self.sampled) == len(self.uniforms) or self.is_finished


def uniforms(seed: int, num: int) -> Float[np.ndarray, " num"]:
    """The random numbers of a completion, one per token, from `seed` alone."""
    # below 1 also in fp32, so that the inverse CDF stays inside the vocabulary
    drawn = np.random.Generator(np.random.Philox(key=seed)).random(num)
    return drawn * (1 - 1e-6)


def assign_rows(
    conversations: list[TorchConversation], max_rows: int
) -> tuple[list[TorchConversation], list[tuple[int, int, int]]]:
    """Give the cache rows 0, 1, ... to open conversations, first opened first.

    Returns the conversations by row, and the moves (from row, to row, number of tokens)
    that close the gaps of those that have ended.
    """
    holders = [c for c in conversations if c.slot is not None]
    waiting = [c for c in conversations if c.slot is None]
    admitted = waiting[: max_rows - len(holders)]
    rows = holders + admitted
    free = iter(sorted(set(range(len(rows))) - {c.slot for c in holders}))
    for conversation in admitted:
        conversation.slot = next(free, None)
    moves = []
    for conversation in holders:
        if conversation.slot >= len(rows):
            source, conversation.slot = conversation.slot, next(free)
            moves.append((source, conversation.slot, conversation.num_cached))
    return sorted(rows, key=lambda c: c.slot), moves


def prefill_batches(
    rows: list[TorchConversation],
) -> list[list[list[TorchConversation]]]:
    """Batches of about `PREFILL_TOKENS` new tokens, made of families of twins.

    Members of a group start with the same prompt, so one of them reads it for all.
    """
    families: dict[bytes | int, list[TorchConversation]] = {}
    for row in rows:
        key = row.slot if row.num_cached else row.request.ids.tobytes()
        families.setdefault(key, []).append(row)
    batches, room = [], 0
    for family in families.values():
        room -= len(family[0].request.ids) - family[0].num_cached
        if room < 0:
            batches.append([])
            room = PREFILL_TOKENS
        batches[-1].append(family)
    return batches


def draw(requests: list[Request], logits: Float[Tensor, "row vocab"]) -> None:
    """Append one sampled token to every request that is not done yet."""
    temperatures = [request.sampling.temperature for request in requests]
    chosen = [
        request.uniforms[min(len(request.sampled), len(request.uniforms) - 1)]
        for request in requests
    ]
    ids, logprobs = sample(logits, temperatures, chosen)
    for request, token, logprob in zip(
        requests, ids.tolist(), logprobs.tolist(), strict=True
    ):
        if not request.is_done:
            request.sampled.append(token)
            request.logprobs.append(logprob)


def sample(
    logits: Float[Tensor, "row vocab"],
    temperatures: Sequence[float],
    uniforms: Sequence[float],
) -> tuple[Int[Tensor, " row"], Float[Tensor, " row"]]:
    """One token per row, by inverse CDF of softmax(logits / T), and its log-prob.

    At T = 0 the most likely token, with its log-prob at T = 1.
    """
    scale = [temperature or 1.0 for temperature in temperatures]
    if set(scale) != {1.0}:
        logits = logits / torch.tensor(scale, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)
    cdf = logprobs.exp().cumsum(-1)
    target = torch.tensor(uniforms, dtype=cdf.dtype, device=cdf.device)[:, None]
    ids = torch.searchsorted(cdf, target * cdf[:, -1:], right=True)
    if 0 in temperatures:
        greedy = torch.tensor(temperatures, device=logits.device)[:, None] == 0
        ids = torch.where(greedy, logits.argmax(-1, keepdim=True), ids)
    return ids[:, 0], logprobs.gather(-1, ids)[:, 0]
