"""One process and several: seconds of a step by part, and bytes of a rank.

    python tests/benchmarks/bench_scale.py

Seconds are those of a preset's own runs, started as users start them, by torchrun; the
first step, which warms up, is left out. Ranks on one machine share its cores, so what
they gain is bounded by those (`cores`), and by what else runs there (`load`).

Bytes are those of an update of a larger policy with random weights, so that weights
matter: the most that a rank held at a time, above what it held before. Tensors come
straight from the system (MALLOC_MMAP_THRESHOLD_), as the heap's gaps are not the
program's. Beside them stands what `gagar_mini.cost` expects.
"""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.cost import Lengths, estimate_memory, model_size
from gagar_mini.learn.batching import TokenBatch, split_minibatches
from gagar_mini.learn.parallel import Ranks, joined_ranks, shard
from gagar_mini.learn.state import make_optimizer
from gagar_mini.learn.update import accumulate_gradient, take_update
from gagar_mini.model.policy import PolicyConfig, TinyPolicy
from gagar_mini.records import read_metrics

SIZES = PolicyConfig(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
)
LENGTH, ACTIONS, NUM_GROUPS = 256, 32, 8
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Options:
    preset: str = "tiny"
    steps: int = 3
    ranks: tuple[int, ...] = (1, 2)
    """Processes of the timed runs."""
    memory_ranks: tuple[int, ...] = (1, 2, 4)
    out: Path = Path("data/results/bench_scale.json")
    worker: str = ""
    """Internal: measure one update in these ranks, and write the result here."""
    sharded: bool = False
    keep_steps: bool = False
    """Measure memory again, and keep the seconds that the file holds."""


def main(options: Options) -> None:
    if options.worker:
        measure_update(options)
        return
    known = json.loads(options.out.read_text()) if options.keep_steps else {}
    report = {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": known.get("load", os.getloadavg()[0]),
        "preset": options.preset,
        "steps": known.get("steps")
        or [timed_steps(options, size) for size in options.ranks],
        "memory": [
            measured_memory(size, sharded=sharded)
            for size in options.memory_ranks
            for sharded in ((False, True) if size > 1 else (False,))
        ],
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")


def launch(size: int, arguments: list[str], **environment: str) -> None:
    subprocess.run(
        [*TORCHRUN, f"--nproc-per-node={size}", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        check=True,
        timeout=900,
    )


def timed_steps(options: Options, size: int) -> dict[str, object]:
    """Seconds of the parts of a step, mean over the steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        steps = ["--steps", str(options.steps + 1), "--run-dir", str(run_dir)]
        launch(size, ["-m", "gagar_mini", "train", *steps])
        lines = read_metrics(run_dir)[1:]
    names = ("rollout_s", "credit_s", "update_s", "sync_s", "step_s", "cpu_s")
    means = {n: sum(line[f"time/{n}"] for line in lines) / len(lines) for n in names}
    found = {"ranks": size, "num_steps": len(lines)} | means
    print(found, flush=True)
    return found


def measured_memory(size: int, *, sharded: bool) -> dict[str, object]:
    """Bytes of the fullest rank, by part as expected and as measured in all."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bytes.json"
        flags = ["--sharded"] if sharded else []
        own_mapping = {"MALLOC_MMAP_THRESHOLD_": "65536"}
        launch(size, [__file__, "--worker", str(out), *flags], **own_mapping)
        measured = max(json.loads(out.read_text()))
    config = update_config(sharded=sharded)
    written = dataclasses.asdict(SIZES) | {"model_type": "llama"}
    estimate = estimate_memory(
        model_size(written | {"tie_word_embeddings": True}),
        config,
        ranks=size,
        lengths=Lengths(LENGTH, ACTIONS),
        has_own_engine=False,
    )
    found = {
        "ranks": size,
        "sharded": sharded,
        "measured": measured,
        "expected": estimate.total,
        "parts": dataclasses.asdict(estimate),
    }
    print(found, flush=True)
    return found


# --- inside a rank --------------------------------------------------------------------


def update_config(*, sharded: bool) -> RunConfig:
    return with_overrides(
        RunConfig(),
        {
            "rollout.max_context_tokens": LENGTH,
            "rollout.group_size": 2,
            "sampling.groups_per_step": NUM_GROUPS,
            "optim.num_minibatches": 1,
            "optim.micro_batch_tokens": 2 * LENGTH,
            "optim.sharded": sharded,
        },
    )


def measure_update(options: Options) -> None:
    """Two updates of a random policy on random tokens: the second has moments."""
    torch.set_num_threads(1)
    config = update_config(sharded=options.sharded)
    with joined_ranks() as ranks:
        # libraries load on first use
        take_updates(PolicyConfig(num_hidden_layers=1), config, ranks)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        take_updates(SIZES, config, ranks)
        found = ranks.gather(resident("VmHWM") - before)
    if ranks.is_first:
        Path(options.worker).write_text(json.dumps(found))


def take_updates(sizes: PolicyConfig, config: RunConfig, ranks: Ranks) -> None:
    policy = TinyPolicy(sizes)
    if config.optim.sharded:
        shard(policy, ranks)
    state = SimpleNamespace(
        config=config,
        policy=policy,
        ranks=ranks,
        optimizer=make_optimizer(policy, config),
        engine=SimpleNamespace(weight_version=0),
        num_updates=0,
    )
    (minibatch,) = split_minibatches(
        random_batch(sizes.vocab_size), 1, aggregation="token-mean", seed=0
    )
    for _ in range(2):
        accumulate_gradient(state, minibatch)
        take_update(state)


def random_batch(vocab_size: int) -> TokenBatch:
    """Groups of two, a pass and a failure, all of one length."""
    num = 2 * NUM_GROUPS
    generator = torch.Generator().manual_seed(0)
    action_mask = torch.zeros(num, LENGTH, dtype=torch.bool)
    action_mask[:, -ACTIONS:] = True
    return TokenBatch(
        ids=torch.randint(vocab_size, (num, LENGTH), generator=generator),
        action_mask=action_mask,
        behaviour_logprobs=torch.zeros(num, LENGTH),
        advantages=torch.tensor([0.5, -0.5] * NUM_GROUPS),
        group_index=torch.arange(num) // 2,
        lengths=torch.full((num,), LENGTH),
        weight_versions=torch.zeros(num, dtype=torch.long),
        token_weights=torch.zeros(num, LENGTH),
    )


def resident(name: str) -> int:
    """Bytes of this process now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main(tyro.cli(Options))
