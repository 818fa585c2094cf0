"""This package beside TRL, vLLM and `generate`, on the same weights and the same work.

    make bench-peers

Each way of doing the work has a process of its own, in the environment that it needs
(`peer_workers`), and all stay up: a round of one follows a round of the other, so that
what else the machine does falls on all of them. Given are medians over rounds, the
first of which warms up. Times that count are processor seconds; of these, the ratios.
Parts can be measured one at a time: the others stay in the file as they are.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

WORKERS = Path(__file__).with_name("peer_workers.py")


@dataclass(frozen=True)
class Part:
    """Ways to do one piece of work by name, ours first."""

    title: str
    ways: dict[str, str]


STEP = "a training step, 8 prompts of 64 tokens, 8 completions of 64 tokens each, fp32"
PARTS = {
    "step_llama": Part(
        f"{STEP}, a Llama of 3.7M (vocabulary 2048)",
        {"gagar_mini": "our_step:llama", "TRL GRPOTrainer": "trl_step:llama"},
    ),
    "step_tiny": Part(
        f"{STEP}, the tiny policy (.9M, vocabulary 512)",
        {"gagar_mini": "our_step:tiny", "TRL GRPOTrainer": "trl_step:tiny"},
    ),
    "turns_tiny": Part(
        "64 conversations of 6 turns of 16 sampled tokens, the tiny architecture, fp32",
        {
            "gagar_mini": "torch_turns:tiny",
            "vLLM for CPUs": "vllm_turns:tiny",
            "generate, cache kept": "cached_turns:tiny",
        },
    ),
    "turns_smol": Part(
        "8 conversations of 3 turns of 16 sampled tokens, SmolLM2-135M, bf16",
        {
            "gagar_mini": "torch_turns:smol",
            "vLLM for CPUs": "vllm_turns:smol",
            "generate, fresh prefill": "fresh_turns:smol",
        },
    ),
}


@dataclass(frozen=True)
class Options:
    parts: tuple[str, ...] = tuple(PARTS)
    """What to measure; nothing only writes the table anew."""
    repeats: int = 3
    """Rounds that count, after one that warms up."""
    threads: int = 1
    trl_python: Path = Path(".venv-trl/bin/python")
    vllm_python: Path = Path(".venv-vllm/bin/python")
    out: Path = Path("data/results/bench_peers")
    """Two files: .json and .md."""


def main(options: Options) -> None:
    path = options.out.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in options.parts:
        found = measured(PARTS[name], options)
        report = json.loads(path.read_text()) if path.is_file() else {}
        report[name] = found
        report = {known: report[known] for known in PARTS if known in report}
        path.write_text(json.dumps(report, indent=1) + "\n")
    text = as_text(json.loads(path.read_text()))
    options.out.with_suffix(".md").write_text(text)
    print(text)


def measured(part: Part, options: Options) -> dict[str, object]:
    """Rounds of all ways in turn."""
    workers = {name: Worker(name, way, options) for name, way in part.ways.items()}
    load_before = os.getloadavg()[0]
    try:
        for _ in range(options.repeats + 1):
            for worker in workers.values():
                worker.run_round()
        found = {name: worker.finish() for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.process.kill()
    versions = {k: v for worker in workers.values() for k, v in worker.versions.items()}
    return {
        "work": part.title,
        "rounds": options.repeats,
        "threads": options.threads,
        "versions": {"python": platform.python_version(), **versions},
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [load_before, os.getloadavg()[0]],
        "ways": found,
        "ours_over": ratios(found),
    }


class Worker:
    """A process that runs a round when it is told to."""

    def __init__(self, name: str, way: str, options: Options):
        self.name, self.rounds = name, []
        kind = way.partition("_")[0]
        python = {"trl": options.trl_python, "vllm": options.vllm_python}.get(kind)
        self.process = subprocess.Popen(
            [python or sys.executable, str(WORKERS), way],
            env=os.environ | {"OMP_NUM_THREADS": str(options.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.versions = self.hear()["versions"]

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def run_round(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.rounds.append(self.hear())
        cpu = {k: round(s[0], 2) for k, s in self.rounds[-1]["seconds"].items()}
        print(f"{self.name}: CPU s {cpu}", file=sys.stderr, flush=True)

    def finish(self) -> dict[str, object]:
        self.process.stdin.close()
        return summary(self.rounds[1:]) | self.hear()


def summary(rounds: Sequence[dict]) -> dict[str, object]:
    """Tokens per second of each phase, and of all of them."""
    phases = list(rounds[0]["seconds"])
    seconds = {phase: [r["seconds"][phase] for r in rounds] for phase in phases}
    seconds["all"] = [
        [sum(s) for s in zip(*r["seconds"].values(), strict=True)] for r in rounds
    ]
    num_tokens = rounds[0]["tokens"]
    speed = {
        phase: [num_tokens / statistics.median(kind) for kind in zip(*s, strict=True)]
        for phase, s in seconds.items()
    }
    return {
        "tokens": num_tokens,
        "tokens_per_cpu_s": {phase: cpu for phase, (cpu, _) in speed.items()},
        "tokens_per_s": {phase: wall for phase, (_, wall) in speed.items()},
        "cpu_and_wall_s": seconds,
    }


def ratios(found: dict[str, dict]) -> dict[str, dict[str, float]]:
    """Our tokens per CPU second over those of each peer, and our memory."""
    ours, *_ = found.values()
    memory = "peak_above_imports_mb"
    return {
        name: {
            phase: ours["tokens_per_cpu_s"][phase] / speed
            for phase, speed in peer["tokens_per_cpu_s"].items()
        }
        | {"memory": ours[memory] / peer[memory]}
        for name, peer in found.items()
        if peer is not ours
    }


def as_text(report: dict[str, dict]) -> str:
    lines = [
        "# Beside TRL, vLLM and `generate`",
        "",
        "Written by `make bench-peers`. Memory is the most that a process held, in all",
        "and above what its imports took. vLLM's weights are unpacked, as syncs want.",
        "",
    ]
    for part in report.values():
        versions = ", ".join(f"{k} {v}" for k, v in part["versions"].items())
        load = " to ".join(f"{value:.1f}" for value in part["load"])
        lines += [f"## {part['work'][0].upper()}{part['work'][1:]}", ""]
        lines += [
            f"{versions}; {part['machine']}, {part['cores']} cores, load {load}; "
            f"threads {part['threads']}; medians of {part['rounds']} rounds."
        ]
        lines += ["", *table(part), ""]
    return "\n".join(lines)


def table(part: dict) -> list[str]:
    """A row for each way: speed by phase, ours over it, and memory."""
    ours, *_ = part["ways"].values()
    phases = [p for p in ours["tokens_per_cpu_s"] if p != "all"]
    phases += ["all"] if len(phases) > 1 else []
    header = ["", *(f"{p}: tokens/CPU s" for p in phases), "tokens/s"]
    header += ["ours over it", "memory, MiB"]
    rows = [header, ["---"] * len(header)]
    for name, way in part["ways"].items():
        beside = part["ours_over"].get(name)
        rows.append(
            [name]
            + [f"{way['tokens_per_cpu_s'][p]:,.0f}" for p in phases]
            + [f"{way['tokens_per_s']['all']:,.0f}"]
            + [f"{beside['all']:.2f}" if beside else ""]
            + [f"{way['peak_mb']:.0f}, {way['peak_above_imports_mb']:.0f}"]
        )
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    main(tyro.cli(Options))
