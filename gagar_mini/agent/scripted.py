"""An engine that plays fixed completions: for tests, lessons and demonstrations by
hand."""

from collections.abc import Sequence

import numpy as np

from gagar_mini.types import Completion, SamplingParams


class ScriptedEngine:
    """Plays `scripts[k]`, one list of completions (token ids), in the k-th
    conversation.

    Conversations beyond the scripts start again from the first. The log-probability of
    every token is 0: a script is certain of what it does.
    """

    def __init__(self, scripts: Sequence[Sequence[Sequence[int]]]):
        self.weight_version = 0
        self._scripts = scripts
        self._num_opened = 0

    def conversation(self) -> "ScriptedConversation":
        script = self._scripts[self._num_opened % len(self._scripts)]
        self._num_opened += 1
        return ScriptedConversation(script, self.weight_version)

    async def sync_weights(self, policy: object, version: int) -> None:
        self.weight_version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class ScriptedConversation:
    """One conversation with a `ScriptedEngine`; a script that ran out is an
    IndexError."""

    def __init__(self, script: Sequence[Sequence[int]], weight_version: int):
        self._completions = iter(script)
        self._weight_version = weight_version

    def __enter__(self) -> "ScriptedConversation":
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    async def complete(
        self, ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> Completion:
        completion = next(self._completions, None)
        if completion is None:
            raise IndexError(f"the script has no completion after {len(ids)} tokens")
        kept = np.array(completion[: sampling.max_new_tokens], dtype=np.int64)
        return Completion(
            ids=kept,
            logprobs=np.zeros(len(kept), dtype=np.float32),
            is_finished=len(kept) > 0 and int(kept[-1]) in sampling.stop_ids,
            weight_version=self._weight_version,
        )
