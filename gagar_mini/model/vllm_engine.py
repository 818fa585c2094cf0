"""The engine for models that outgrow plain torch: vLLM, in this process.

Token in, token out. One thread steps vLLM, which batches whatever conversations wait;
a new turn finds the keys and values of its earlier ones in the prefix cache. What a
completion samples depends on its context and seed, and on its company by rounding only:
runs repeat nearly, not bit by bit as with the torch engine. Weights come from the
trainer by name, in memory, or through a folder. Servers are in `vllm_server`.

vLLM (0.32) is imported when an engine opens: pip install 'gagar-mini[vllm]'.
"""

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from gagar_mini.cpu_meter import MeteredExecutor
from gagar_mini.model.hf_engine import as_completion, check_appended
from gagar_mini.model.torch_engine import checked_context
from gagar_mini.types import Completion, SamplingParams

BARRED = -100.0
"""Added to the logits of ids without a token: odds of e^-100, and a server takes it."""
MAX_BARRED = 1024  # what the GPU's sampler takes
MAX_CPU_CACHE = 4 << 30  # bytes
PREFILL_TOKENS = 2048  # read in one pass, on a CPU
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in memory
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer and tools need cores, too
}
"""vLLM reads its settings from the environment; what is set there already stays."""

WriteFolder = Callable[[nn.Module, Path], None]
"""Writes a policy as a Hugging Face folder."""


class ConversationEngine(ABC):
    """Counts open conversations, which hold no cache of their own here."""

    def __init__(self, max_context: int, weight_version: int):
        self.max_context = max_context
        self.weight_version = weight_version
        self.num_open = self.num_opened = 0

    def conversation(self) -> "VllmConversation":
        """Open an empty context. Use it in a `with`: that is what closes it."""
        return VllmConversation(self)

    @abstractmethod
    async def sample(
        self, ids: list[int], sampling: SamplingParams, seed: int, conversation: int
    ) -> tuple[list[int], list[float]]:
        """What follows `ids`, and its log-probs, in the conversation opened as number
        `conversation`."""

    def require_no_conversation(self, consequence: str) -> None:
        if self.num_open:
            raise RuntimeError(f"{consequence} while a conversation is open")


class VllmConversation:
    """One append-only context."""

    def __init__(self, engine: ConversationEngine):
        self.engine = engine
        self.is_open = True
        self.is_busy = False
        self.context = np.zeros(0, dtype=np.int64)
        self.number = engine.num_opened
        engine.num_open += 1
        engine.num_opened += 1

    async def complete(
        self, ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> Completion:
        """Sample what follows `ids`, which begin with all that went before.

        Ends unfinished, possibly empty, where the context is full. Cancelling the call
        closes the conversation.
        """
        context = np.array(ids, dtype=np.int64)
        check_appended(self.context, context)
        assert self.is_open and not self.is_busy, "one completion at a time"
        num_new = min(sampling.max_new_tokens, self.engine.max_context - len(context))
        version = self.engine.weight_version
        if num_new <= 0:
            return as_completion([], [], sampling, version)
        self.is_busy = True
        try:
            sampled, logprobs = await self.engine.sample(
                context.tolist(),
                replace(sampling, max_new_tokens=num_new),
                seed,
                self.number,
            )
        except BaseException:  # cancelled, or broken
            self.close()
            raise
        self.is_busy = False
        self.context = np.concatenate([context, np.array(sampled, dtype=np.int64)])
        return as_completion(sampled, logprobs, sampling, version)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.engine.num_open -= 1

    def __enter__(self) -> "VllmConversation":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True)
class VllmOptions:
    """How vLLM runs a model.

    `max_rows` conversations are sampled at once and more wait. On a GPU vLLM takes
    `memory_share` of its memory, weights included, and a trainer beside it the rest. On
    a CPU its cache has room for all rows, up to 4 GiB.
    """

    dtype: Literal["float32", "bfloat16"] = "float32"
    max_rows: int = 64
    max_context: int | None = None
    memory_share: float = 0.35
    sleep_level: Literal[1, 2] = 1
    """What `sleep` leaves: 1 keeps the weights in main memory, 2 drops them, and the
    next `sync_weights` brings them back."""
    write_folder: WriteFolder | None = None
    """Writes weights for a sync through the disk, the way of a model whose parameters
    have other names in its checkpoint, so that they cannot be handed over by name."""
    uses_disk: bool = False
    """Sync through the disk from the start."""


class VllmEngine(ConversationEngine):
    """Samples with vLLM from the model in a folder (protocol: `types.Engine`).

    `num_tokens` is one more than the last id of the tokenizer: ids from there on are
    never sampled, although some models have logits for them. With a `policy` the
    weights are its own, and the folder needs a config alone.
    """

    def __init__(
        self,
        folder: str | Path,
        num_tokens: int,
        options: VllmOptions | None = None,
        *,
        policy: nn.Module | None = None,
        weight_version: int = 0,
    ):
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "the engine vllm needs vLLM: pip install 'gagar-mini[vllm]'"
            )
        self.options = options or VllmOptions()
        config = AutoConfig.from_pretrained(folder).get_text_config()
        longest = config.max_position_embeddings
        context = checked_context(self.options.max_context, longest)
        super().__init__(context, weight_version)
        self.barred = barred_ids(num_tokens, config.vocab_size)
        self.is_running = self.is_asleep = False
        self.uses_disk = self.options.uses_disk
        self.num_requests = 0
        self.answers: dict[str, asyncio.Future] = {}
        self.arrived: deque[tuple[str, list[int], object]] = deque()
        self.dropped: deque[str] = deque()
        # a thread of its own: busy tools must not keep the engine waiting
        self.executor = MeteredExecutor(1, thread_name_prefix="vllm")
        arguments = engine_arguments(str(folder), self.options, context)
        if not torch.cuda.is_available():
            arguments |= cpu_arguments(config, self.options, context)
        if policy is not None:
            arguments["load_format"] = "dummy"
        self.core = self.executor.submit(start_vllm, arguments).result()
        if policy is not None:
            self.executor.submit(self.load, policy).result()

    async def sample(
        self, ids: list[int], sampling: SamplingParams, seed: int, conversation: int
    ) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams as VllmSampling

        name = str(self.num_requests)
        self.num_requests += 1
        wanted = VllmSampling(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_ids),
            ignore_eos=True,
            seed=seed,
            logprobs=0,  # of the sampled token alone
            logit_bias=self.barred or None,
            detokenize=False,
        )
        answer = asyncio.get_running_loop().create_future()
        self.answers[name] = answer
        self.arrived.append((name, ids, wanted))
        if not self.is_running:
            self.is_running = True
            self.pump = asyncio.create_task(self.run())
        try:
            found = await answer
        except BaseException:
            del self.answers[name]  # first, or the other thread could still add it
            self.dropped.append(name)
            raise
        del self.answers[name]
        return found

    async def run(self) -> None:
        """Hand out answers as long as somebody waits for one."""
        try:
            while self.answers or self.dropped:
                for name, found in (await self.in_turn(self.advance)).items():
                    if name in self.answers and not self.answers[name].done():
                        self.answers[name].set_result(found)
                await asyncio.sleep(0)  # those who got one may leave
        except Exception as error:
            for answer in self.answers.values():
                if not answer.done():
                    answer.set_exception(error)
        finally:
            self.is_running = False

    def advance(self) -> dict[str, tuple[list[int], list[float]]]:
        """Step until a completion is done, or there is news for vLLM."""
        self.drop()
        while self.arrived:
            name, ids, wanted = self.arrived.popleft()
            if name in self.answers:
                self.core.add_request(name, {"prompt_token_ids": ids}, wanted)
        found = {}
        while self.core.has_unfinished_requests() and not (
            found or self.arrived or self.dropped
        ):
            for output in self.core.step():
                if output.finished:
                    found[output.request_id] = sampled_part(output.outputs[0])
        return found

    def drop(self) -> None:
        """Forget what nobody waits for any more."""
        self.core.abort_request(
            [self.dropped.popleft() for _ in range(len(self.dropped))]
        )

    async def sync_weights(self, policy: nn.Module, version: int) -> None:
        """Sample from the weights of `policy` as they are now, as number `version`.

        Wakes a sleeping engine. RuntimeError while a conversation is open.
        """
        self.require_no_conversation("weights cannot change")
        await self.in_turn(self.load, policy)
        self.weight_version = version

    def load(self, policy: nn.Module) -> None:
        self.drop()
        if self.is_asleep:  # before the cache, which needs the memory that is left
            self.core.wake_up(["weights"])
        weights = finite_weights(policy)
        if not self.uses_disk:
            self.load_by_name(weights)
        if self.uses_disk:
            self.load_from_disk(policy, self.options.write_folder)
        if not self.core.reset_prefix_cache():
            raise RuntimeError("vLLM still holds keys and values of the old weights")
        if self.is_asleep:
            self.core.wake_up(["kv_cache"])
            self.is_asleep = False
        give_back_freed_memory()

    def load_by_name(self, weights: dict[str, Tensor]) -> None:
        """Hand weights over in memory, or find that they have other names."""
        try:
            self.core.apply_model(lambda model: hand_over(weights, model))
        except (KeyError, ValueError) as error:
            if self.options.write_folder is None:
                raise
            told = " ".join(str(error).split())[:200]
            warnings.warn(f"weights go to vLLM through the disk ({told})", stacklevel=2)
            self.uses_disk = True

    def load_from_disk(self, policy: nn.Module, write_folder: WriteFolder) -> None:
        with tempfile.TemporaryDirectory() as folder, unpacked_weights():
            write_folder(policy, Path(folder))
            self.core.collective_rpc(reload_folder, args=(folder,))

    async def sleep(self) -> None:
        """Give GPU memory back until `wake` or `sync_weights`; a CPU keeps it."""
        self.require_no_conversation("the engine cannot sleep")
        if torch.cuda.is_available() and not self.is_asleep:
            await self.in_turn(self.drop)
            await self.in_turn(self.core.sleep, self.options.sleep_level)
            self.is_asleep = True

    async def wake(self) -> None:
        """RuntimeError after a sleep of level 2: there are no weights to wake."""
        if not self.is_asleep:
            return
        if self.options.sleep_level == 2:
            raise RuntimeError("weights were dropped in sleep: call sync_weights")
        await self.in_turn(self.core.wake_up)
        self.is_asleep = False

    async def close(self) -> None:
        self.require_no_conversation("the engine cannot close")
        await self.in_turn(self.stop)
        self.executor.shutdown()

    def stop(self) -> None:
        """End vLLM; among several ranks with the process, as its end would be that of
        the trainer's process group."""
        if "RANK" not in os.environ:
            self.core.engine_core.shutdown()
            del self.core

    async def in_turn(self, work: Callable[..., object], *arguments: object) -> object:
        """Run `work` in the engine's thread, after what it does at the moment."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.executor, work, *arguments)


def barred_ids(num_tokens: int, vocab_size: int) -> dict[int, float]:
    """Ids that a model has logits for and the tokenizer no token, with their bias."""
    if vocab_size - num_tokens > MAX_BARRED:
        raise ValueError(
            f"the model has {vocab_size} logits and the tokenizer {num_tokens} tokens: "
            f"vLLM can bar {MAX_BARRED} ids at most; use the engine torch"
        )
    return dict.fromkeys(range(num_tokens, vocab_size), BARRED)


def sampled_part(output: object) -> tuple[list[int], list[float]]:
    """Ids and log-probs of what vLLM calls a completion output."""
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
    ids = list(output.token_ids)
    logprobs = [
        position[token].logprob
        for position, token in zip(output.logprobs, ids, strict=True)
    ]
    return ids, logprobs


def engine_arguments(
    folder: str, options: VllmOptions, max_context: int
) -> dict[str, object]:
    """What vLLM's `EngineArgs` are given."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        "model": folder,
        # under torchrun every rank has an engine of its own, on its own device
        "distributed_executor_backend": "external_launcher" if num_ranks > 1 else None,
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "max_model_len": max_context,
        "max_num_seqs": options.max_rows,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of what is sampled from
        "gpu_memory_utilization": options.memory_share,
        "enable_sleep_mode": torch.cuda.is_available(),
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",  # not what the model's folder says of top-p
    }


def cpu_arguments(
    config: PretrainedConfig, options: VllmOptions, max_context: int
) -> dict[str, object]:
    """Room for the keys and values of all rows at full length, and of a row more, or
    the most there may be: beyond it vLLM computes rows twice."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    item = getattr(torch, options.dtype).itemsize
    row = max_context * 2 * config.num_hidden_layers * heads * width * item
    return {
        "kv_cache_memory_bytes": min((options.max_rows + 1) * row, MAX_CPU_CACHE),
        "enforce_eager": True,
        # a seeded request that is read in chunks ends vLLM 0.32 on a CPU
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(PREFILL_TOKENS, max_context),
    }


def start_vllm(arguments: dict[str, object]) -> object:
    """vLLM's `LLMEngine`, without processes of its own."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor import Executor

    set_num_threads = torch.set_num_threads
    try:
        config = EngineArgs(**arguments).create_engine_config()
        with unpacked_weights():
            return LLMEngine(config, Executor.get_class(config), log_stats=False)
    finally:
        torch.set_num_threads = set_num_threads  # vLLM disables it on a CPU


@contextlib.contextmanager
def unpacked_weights() -> Iterator[None]:
    """Keep a CPU's vLLM from packing the weights that it loads: into what is packed no
    new weight can be loaded, and a tied head would stay that of the old ones."""
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    packs = _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    try:
        yield
    finally:
        _custom_ops._supports_onednn, utils.check_cpu_sgl_kernel = packs


def give_back_freed_memory() -> None:
    """Have glibc, where it is, return what was freed: a step's buffers of ever other
    sizes leave gaps, which look like a leak."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def finite_weights(policy: nn.Module) -> dict[str, Tensor]:
    """The weights by the names of the model itself. ValueError for a NaN among them."""
    weights = getattr(policy, "export_weights", policy.state_dict)()
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise ValueError(f"weight {name} is not finite: nothing to sample from")
    return {name: weight.detach() for name, weight in weights.items()}


def reload_folder(worker: object, folder: str) -> None:
    """Have a worker of vLLM load the weights in a folder, a tied head included."""
    worker.reload_weights(weights_path=folder)
    for module in worker.get_model().modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedEmbeddingMethod":
            # on a CPU the head has a packed copy of its own, which went stale
            method.process_weights_after_loading(module)


def hand_over(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Load weights into vLLM's model. ValueError unless they fill all of it."""
    loaded = model.load_weights(weights.items())
    missing = {name for name, _ in model.named_parameters()} - loaded
    if missing:
        raise ValueError(
            f"vLLM's {min(missing)} gets no weight from this policy: parameters may "
            "have other names than those of its checkpoint"
        )
