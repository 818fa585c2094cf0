"""The check that a GPU gets, at toy size everywhere and whole where there is a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).with_name("check.py")


def checked(out, *flags, timeout_s):
    """The report of a check that ran to its end."""
    command = [sys.executable, str(CHECK), "--out", str(out), *flags]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert [step["updates"] for step in report["steps"]] == [2, 2, 2]
    assert all(step["grad_norm"] > 0 for step in report["steps"])
    assert report["self_check"]["num_tokens"] == 32
    return report


@pytest.mark.slow
def test_the_check_runs_at_toy_size(sandbox, tmp_path):
    report = checked(tmp_path / "toy.json", "--toy", timeout_s=600)
    assert report["all_reduce"]["ranks"] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_of_half_a_billion_trains(tmp_path):
    report = checked(tmp_path / "whole.json", timeout_s=720)
    assert report["parameters"] == 494_032_768  # Qwen2.5-0.5B
    measured, expected = report["measured_bytes"], report["expected_bytes"]
    assert measured["allocated"] < 1.2 * expected["total"]
