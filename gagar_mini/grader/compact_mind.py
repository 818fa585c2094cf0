"""The tiny agentic grader: a model of a million parameters as a grading mind.

It grades through the same loop, tools and checks as any other mind; `dialect` turns
what it reads and says into tokens. Decoding is greedy: the same workspace, the same
grade.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from gagar_mini.grader.agentic import Dialogue, MindReply
from gagar_mini.grader.dialect import GraderDialect, MalformedAction, Reading
from gagar_mini.model.policy import load_policy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.types import Conversation, Engine, SamplingParams

MAX_ACTION_TOKENS = 64


class CompactMind:
    """A mind over an engine that speaks the compact grader dialect."""

    def __init__(self, engine: Engine, dialect: GraderDialect, version: str):
        self.version = version
        self.engine = engine
        self._dialect = dialect

    def session(self) -> "CompactSession":
        return CompactSession(self.engine.conversation(), self._dialect)


@dataclass
class CompactSession:
    """One grading: an append-only context, and what its tags stand for."""

    conversation: Conversation
    dialect: GraderDialect
    ids: list[int] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    num_seen: int = 0

    async def reply(self, dialogue: Dialogue) -> MindReply:
        """Read what is new, then sample one action."""
        start = len(self.ids)
        if not self.ids:
            self.ids += self.dialect.prompt_ids(dialogue.task)
        for exchange in dialogue.exchanges[self.num_seen :]:
            call = exchange.call if exchange.is_data else None
            self.ids += self.dialect.observation_ids(
                call, exchange.output, self.reading
            )
        self.num_seen = len(dialogue.exchanges)
        sampling = SamplingParams(0.0, MAX_ACTION_TOKENS, self.dialect.stop_ids)
        said = await self.conversation.complete(self.ids, sampling, dialogue.seed)
        action = said.ids.tolist()
        self.ids += action
        num_tokens = len(self.ids) - start
        try:
            return MindReply(self.dialect.parse(action, self.reading), num_tokens)
        except MalformedAction:
            return MindReply(None, num_tokens, "malformed_call")

    def __enter__(self) -> "CompactSession":
        self.conversation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.conversation.__exit__(kind, error, trace)


def load_compact_mind(folder: Path, *, device: str = "cpu") -> CompactMind:
    """The mind of a checkpoint folder (Hugging Face layout).

    Raises ValueError, in one sentence, where there is none, or another model's.
    """
    policy, tokenizer = load_policy(folder)
    weights = (Path(folder) / "model.safetensors").read_bytes()
    version = f"compact {hashlib.sha256(weights).hexdigest()[:12]}"
    engine = TorchEngine(policy, max_rows=32, device=device)
    return CompactMind(engine, GraderDialect(tokenizer), version)
