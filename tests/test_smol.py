"""The preset smol as a newcomer starts it: a real pretrained model on a CPU.

The model comes from the package index, so these tests need it, and some minutes.
"""

import json
import subprocess
import sys

import pytest

from gagar_mini.config import PRESETS
from gagar_mini.model.self_check import BF16_MEAN

pytestmark = pytest.mark.slow


def test_two_steps_train_within_the_memory_that_was_told(tmp_path):
    run = tmp_path / "run"
    command = ["train", "--preset", "smol", "--steps", "2", "--run-dir", str(run)]
    done = subprocess.run(
        [sys.executable, "-m", "gagar_mini", *command],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "memory: about" in done.stdout
    lines = [json.loads(s) for s in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    trained = [line for line in lines if line["policy/updates"]]
    assert trained, "no group of two steps was mixed"
    for line in lines:
        assert line["rollout/turns"] > 2 and line["memory/peak_mb"] < 8000
        assert line["rollout/malformed_rate"] < 0.2
    for line in trained:
        assert abs(line["policy/loss"]) < 1 and line["policy/grad_norm"] > 0
        assert line["policy/sampler_drift"] < BF16_MEAN
    assert PRESETS["smol"]().optim.lora_rank  # a checkpoint is an adapter, and small
    (checkpoint,) = (run / "checkpoints").glob("step_00002/adapter_model.safetensors")
    assert checkpoint.stat().st_size < 20e6
