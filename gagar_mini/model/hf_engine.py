"""The engine for any causal language model of transformers, and one that replays.

Token in, token out, one completion after the other. Each conversation keeps its
key-value cache across its turns, so a turn costs its new tokens only, and what is
sampled depends on its context and seed alone, never on its neighbours. `batch_engine`
samples many conversations at once, where the architecture lets it.
"""

import asyncio
import importlib.util
import inspect
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from gagar_mini.model.fetching import MODELS, fetch_model
from gagar_mini.model.torch_engine import sample, uniforms
from gagar_mini.paths import find_checkpoint
from gagar_mini.records import parse_json
from gagar_mini.types import Completion, SamplingParams

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN_LORA = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
}
"""What an adapter's config must say, where it says anything."""
PREFILL_TOKENS = 1024  # new tokens read in one pass: bounds the memory it takes


def load_chat_model(
    name: str, *, device: str = "", dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, from a folder, by an id of the hub, or by a name of
    `models fetch`. A folder may hold an adapter of peft alone, which is merged into the
    model that it names.

    device "" is the GPU where there is one; the default dtype is bf16 there and fp32 on
    a CPU. Raises ValueError, in one sentence, for what cannot be loaded.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if dtype is None:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    name = str(fetch_model(name) if name in MODELS else find_checkpoint(name))
    if (Path(name) / ADAPTER).is_file():
        return load_adapted_model(Path(name), device, dtype)
    is_local = Path(name).is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_local)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, local_files_only=is_local
        )
    except Exception as error:
        raise unloadable(name, error) from error
    return model.to(device), tokenizer


def unloadable(name: str, error: Exception) -> ValueError:
    """A sentence for the many kinds of error that the library raises."""
    told = " ".join(str(error).split()).split(". ")[0][:200]
    return ValueError(
        f"the model {name!r} cannot be loaded ({told}): give the folder of a causal "
        "language model in Hugging Face layout, or an id where the hub can be reached; "
        "`gagar-mini models fetch smol` makes a folder without a hub"
    )


def load_adapted_model(
    folder: Path, device: str, dtype: torch.dtype
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_adapters(folder, device)
    merged = model.merge_and_unload().requires_grad_(True)
    for weight in merged.parameters():  # not `to`: it would round rotary angles, too
        weight.data = weight.data.to(dtype)
    return merged, tokenizer


def load_adapters(
    folder: Path, device: str, *, is_trainable: bool = False
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A model in fp32 with the adapters of a folder (peft). The model that they are for
    may come from the hub, the adapters only from the folder.

    Raises ValueError for what does not fit, and for more than plain LoRA.
    """
    require("peft", "an adapter")
    from peft import PeftModel

    written, name = read_adapter_config(folder), base_name(folder)
    for key, plain in PLAIN_LORA.items():
        if (written.get(key) or plain) != plain:
            raise ValueError(
                f"the adapter {str(folder)!r} has {key} {written[key]!r}: plain LoRA "
                "on linear layers is what can be merged and trained here"
            )
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"the adapter {str(folder)!r} lacks {ADAPTER_WEIGHTS}")
    model, tokenizer = load_chat_model(name, device=device, dtype=torch.float32)
    model.name_or_path = name
    try:
        adapted = PeftModel.from_pretrained(
            model, str(folder.resolve()), is_trainable=is_trainable
        )
    except Exception as error:
        told = " ".join(str(error).split()).split(". ")[0][:200]
        raise ValueError(
            f"the adapter {str(folder)!r} does not fit its model ({told})"
        ) from error
    return adapted, tokenizer


def require(package: str, purpose: str) -> None:
    """ValueError, in a sentence, where an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{purpose} needs {package}: pip install 'gagar-mini[smol]'")


def base_name(folder: Path) -> str:
    """The model that the adapter in a folder is for, as it is named there."""
    name = read_adapter_config(folder).get("base_model_name_or_path")
    is_itself = isinstance(name, str) and Path(name).resolve() == folder.resolve()
    if not isinstance(name, str) or not name or is_itself:
        raise ValueError(f"{folder / ADAPTER} does not say for which model it is")
    return name


def read_adapter_config(folder: Path) -> dict[str, object]:
    path = folder / ADAPTER
    written = parse_json(path.read_bytes(), str(path))
    if not isinstance(written, dict):
        raise ValueError(f"{path} is no adapter's config")
    return written


def read_model_config(name: str) -> dict[str, object]:
    """The config of a model, by any of its names, before anything else of it is read.

    Raises ValueError, in one sentence, where there is none.
    """
    path = Path(fetch_model(name) if name in MODELS else find_checkpoint(name))
    if (path / ADAPTER).is_file():
        return read_model_config(base_name(path))
    try:
        return AutoConfig.from_pretrained(
            str(path), local_files_only=path.is_dir()
        ).to_dict()
    except Exception as error:
        raise unloadable(str(path), error) from error


class HuggingFaceEngine:
    """Samples from a causal language model (protocol: `types.Engine`).

    The engine owns `model`: give it a copy where the original is trained. Ids that the
    tokenizer does not have are never sampled, although some models have logits for
    them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_context: int | None = None,
        weight_version: int = 0,
    ):
        self.model = model.eval()
        self.device = model.device
        self.num_tokens = max(tokenizer.get_vocab().values()) + 1
        longest = model.config.get_text_config().max_position_embeddings
        if max_context is not None and not 0 < max_context <= longest:
            raise ValueError(
                f"max_context is {max_context}: it must lie in 1..{longest}, the "
                "context of the model"
            )
        self.max_context = max_context or longest
        self.weight_version = weight_version
        self.num_open = 0
        # the name of this argument differs between versions of transformers
        accepted = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._settings = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="hf-engine")

    def conversation(self) -> "HuggingFaceConversation":
        """Open an empty context. Use it in a `with`: that is what frees its cache."""
        return HuggingFaceConversation(self)

    async def sync_weights(self, policy: nn.Module, version: int) -> None:
        """Sample from the weights of `policy` as they are now, as number `version`.

        RuntimeError while a conversation is open: its cache is of the old weights.
        """
        self.require_no_conversation("weights cannot change")
        await self.in_turn(self.load, policy)
        self.weight_version = version

    async def sleep(self) -> None:
        """Move the weights off the device until `wake`."""
        self.require_no_conversation("the engine cannot sleep")
        await self.in_turn(self.model.to, "cpu")
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        await self.in_turn(self.model.to, self.device)

    async def close(self) -> None:
        self.require_no_conversation("the engine cannot close")
        self.executor.shutdown()

    async def in_turn(self, work: Callable[..., object], *arguments: object) -> None:
        """Run `work` in the engine's thread, after what it does at the moment."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self.executor, work, *arguments)

    def require_no_conversation(self, consequence: str) -> None:
        if self.num_open:
            raise RuntimeError(f"{consequence} while a conversation is open")

    def load(self, policy: nn.Module) -> None:
        copy_weights(policy, self.model.to(self.device))

    @torch.inference_mode()
    def generate(
        self,
        cache: DynamicCache,
        fresh: list[int],
        sampling: SamplingParams,
        draws: Float[np.ndarray, " num"],
        is_cancelled: threading.Event,
    ) -> tuple[list[int], list[float]]:
        """What follows once `fresh` is read behind `cache`: ids and log-probs. The last
        sampled token stays unread."""
        sampled: list[int] = []
        logprobs: list[float] = []
        for number in draws.tolist():
            if is_cancelled.is_set():
                break
            logits = self.read(cache, fresh)
            token, logprob = sample(logits, [sampling.temperature], [number])
            sampled.append(int(token))
            logprobs.append(float(logprob))
            if sampled[-1] in sampling.stop_ids:
                break
            fresh = sampled[-1:]
        return sampled, logprobs

    def read(self, cache: DynamicCache, ids: list[int]) -> Float[Tensor, "1 vocab"]:
        """Logits of the token after `ids`, in fp32, which join the cache."""
        for chunk in torch.tensor([ids], device=self.device).split(PREFILL_TOKENS, 1):
            output = self.model(
                input_ids=chunk,
                use_cache=True,
                **{self._cache_name: cache},
                **self._settings,
            )
        logits = output.logits[:, -1].float()
        logits[:, self.num_tokens :] = -torch.inf
        return logits


class HuggingFaceConversation:
    """One append-only context and its key-value cache."""

    def __init__(self, engine: HuggingFaceEngine):
        self.engine = engine
        self.is_open = True
        self.is_busy = False
        self.context = np.zeros(0, dtype=np.int64)
        self.num_read = 0
        self.cache = DynamicCache(config=engine.model.config)
        engine.num_open += 1

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
        fresh = context[self.num_read :].tolist()
        is_cancelled = threading.Event()
        self.is_busy = True
        try:
            sampled, logprobs = await asyncio.get_running_loop().run_in_executor(
                self.engine.executor,
                self.engine.generate,
                self.cache,
                fresh,
                sampling,
                uniforms(seed, num_new),
                is_cancelled,
            )
        except BaseException:  # cancelled, or broken: the cache is unknown
            is_cancelled.set()
            self.close()
            raise
        self.is_busy = False
        self.context = np.concatenate([context, np.array(sampled, dtype=np.int64)])
        self.num_read = len(self.context) - 1
        return as_completion(sampled, logprobs, sampling, version)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.cache = None
            self.engine.num_open -= 1

    def __enter__(self) -> "HuggingFaceConversation":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the weights by name; tied ones are there once."""
    new = getattr(source, "export_weights", source.state_dict)()
    for name, parameter in target.named_parameters():
        parameter.copy_(new[name])


def check_appended(known: np.ndarray, context: np.ndarray) -> None:
    """AssertionError where a context does not begin with what went before."""
    assert np.array_equal(context[: len(known)], known), "the past has changed"
    assert len(context) > 0, "there is nothing to continue"


def as_completion(
    ids: Sequence[int],
    logprobs: Sequence[float],
    sampling: SamplingParams,
    version: int,
) -> Completion:
    return Completion(
        np.array(ids, dtype=np.int64),
        np.array(logprobs, dtype=np.float32),
        len(ids) > 0 and ids[-1] in sampling.stop_ids,
        version,
    )


Script = Callable[[Sequence[int]], Sequence[int]]
"""The whole context -> the ids that follow."""


class ReplayEngine:
    """Says what a script says, in tokens: for tests, lessons, and to force a known
    answer through all that a model's answer goes through.

    A completion is cut as a model's would be, behind its first stop token or at its
    limit. Log-probs are 0: what is certain has probability 1.
    """

    def __init__(self, script: Script, weight_version: int = 0):
        self.script = script
        self.weight_version = weight_version

    def conversation(self) -> "ReplayConversation":
        return ReplayConversation(self)

    async def sync_weights(self, policy: object, version: int) -> None:
        self.weight_version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None: ...


class ReplayConversation:
    """One append-only context of a script."""

    def __init__(self, engine: ReplayEngine):
        self.engine = engine
        self.context = np.zeros(0, dtype=np.int64)

    async def complete(
        self, ids: Sequence[int], sampling: SamplingParams, seed: int
    ) -> Completion:
        context = np.array(ids, dtype=np.int64)
        check_appended(self.context, context)
        said: list[int] = []
        for token in self.engine.script(context.tolist())[: sampling.max_new_tokens]:
            said.append(token)
            if token in sampling.stop_ids:
                break
        self.context = np.concatenate([context, np.array(said, dtype=np.int64)])
        zeros = [0.0] * len(said)
        return as_completion(said, zeros, sampling, self.engine.weight_version)

    def __enter__(self) -> "ReplayConversation":
        return self

    def __exit__(self, *exc_info: object) -> None: ...
