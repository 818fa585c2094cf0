"""The same engine on servers: vLLM on GPUs of its own, over its OpenAI-compatible API.

Token ids in, token ids and log-probs out; a conversation stays at one server, which has
its prefix. New weights go through a folder that trainer and servers see. Start each
server so, with the trainer's dtype:

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server \\
      --model FOLDER --dtype float32 --logprobs-mode processed_logprobs \\
      --generation-config vllm --host 127.0.0.1 --port 8000 \\
      --worker-extension-cls gagar_mini.model.vllm_server.ReloadExtension

On a CPU add --no-enable-chunked-prefill: a seeded request that is read in chunks ends
vLLM 0.32 there. The development mode opens what reloads weights to all who reach the
port: keep it to this machine, or to a network of your own.
"""

import asyncio
import importlib.util
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from gagar_mini.model.vllm_engine import (
    ConversationEngine,
    WriteFolder,
    barred_ids,
    checked_context,
    reload_folder,
)
from gagar_mini.types import SamplingParams

TIMEOUT_S = 600.0  # of one completion, waiting its turn included


class ReloadExtension:
    """What vLLM's workers learn through --worker-extension-cls."""

    def reload_folder(self, folder: str) -> None:
        reload_folder(self, folder)


class VllmServerEngine(ConversationEngine):
    """Samples at vLLM servers of one model (protocol: `types.Engine`).

    `urls` are like http://127.0.0.1:8000. `num_tokens` is one more than the last id of
    the tokenizer and `vocab_size` the number of the model's logits. `write_folder`
    writes weights below `exchange`, a folder that the servers see by the same path.
    Raises ValueError where a server does not answer.
    """

    def __init__(
        self,
        urls: Sequence[str],
        num_tokens: int,
        vocab_size: int,
        *,
        write_folder: WriteFolder,
        exchange: Path,
        max_context: int | None = None,
        weight_version: int = 0,
    ):
        if importlib.util.find_spec("httpx") is None:
            raise ValueError("a server needs httpx: pip install 'gagar-mini[endpoint]'")
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        served = [served_model(url) for url in self.urls]
        self.names = [str(model["id"]) for model in served]
        longest = min(int(model["max_model_len"]) for model in served)
        super().__init__(checked_context(max_context, longest), weight_version)
        self.barred = barred_ids(num_tokens, vocab_size)
        self.write_folder, self.exchange = write_folder, exchange
        self.loop: asyncio.AbstractEventLoop | None = None

    async def sample(
        self, ids: list[int], sampling: SamplingParams, seed: int, conversation: int
    ) -> tuple[list[int], list[float]]:
        server = conversation % len(self.urls)
        request = {
            "model": self.names[server],
            "prompt": ids,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_ids),
            "ignore_eos": True,
            "seed": seed,
            "logprobs": 0,
            "logit_bias": {str(id_): bias for id_, bias in self.barred.items()},
            "return_token_ids": True,
        }
        answer = await self.post(self.urls[server], "/v1/completions", request)
        choice = answer["choices"][0]
        if choice["finish_reason"] not in ("stop", "length"):
            raise RuntimeError(
                f"vLLM ended a completion with {choice['finish_reason']!r}"
            )
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    async def sync_weights(self, policy: nn.Module, version: int) -> None:
        """Sample from the weights of `policy` as they are now, as number `version`.

        RuntimeError while a conversation is open, or where a server refuses.
        """
        self.require_no_conversation("weights cannot change")
        folder = self.exchange / f"weights-{version:05d}"
        await asyncio.to_thread(self.write_folder, policy, folder)
        try:
            await asyncio.gather(*(self.reload(url, folder) for url in self.urls))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.weight_version = version

    async def reload(self, url: str, folder: Path) -> None:
        call = {"method": "reload_folder", "args": [str(folder)]}
        await self.post(url, "/collective_rpc", call)
        if not (await self.post(url, "/reset_prefix_cache", {}))["success"]:
            raise RuntimeError(f"{url} still holds keys and values of the old weights")

    async def sleep(self) -> None:
        """Nothing: a server has its GPU to itself."""

    async def wake(self) -> None: ...

    async def close(self) -> None:
        """The servers stay."""
        self.require_no_conversation("the engine cannot close")
        if self.loop is asyncio.get_running_loop():
            await self.client.aclose()

    async def post(
        self, url: str, path: str, content: Mapping[str, object]
    ) -> dict[str, object]:
        """What a server answers. RuntimeError, with its words, where it refuses."""
        import httpx

        loop = asyncio.get_running_loop()
        if self.loop is not loop:  # connections belong to a loop
            self.loop = loop
            no_limit = httpx.Limits(max_connections=None)
            self.client = httpx.AsyncClient(timeout=TIMEOUT_S, limits=no_limit)
        try:
            answer = await self.client.post(url + path, json=content)
        except httpx.HTTPError as error:
            raise RuntimeError(f"{url}{path}: {error!r}") from error
        if answer.status_code != 200:
            raise RuntimeError(f"{url}{path}: {answer.text[:300]}")
        return answer.json()


def served_model(url: str) -> dict[str, object]:
    """The model that a server offers, by its name and longest context."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            return json.load(answer)["data"][0]
    except (urllib.error.URLError, OSError, ValueError, LookupError) as error:
        raise ValueError(f"no vLLM server answers at {url!r} ({error})") from error
