"""What is left to do of an experiment, and what a failed run says."""

import json
import sys
from threading import Event

import pytest

from gagar_mini.learn.experiment import Experiment, commands, publish, run_logged

EXPERIMENT = Experiment(("binary", "gagar"), (0,), steps=5, budgets=((9, 99), (7, 77)))


def finish(folder, num_evaluations):
    folder.mkdir()
    summary = {"status": "finished", "steps_done": EXPERIMENT.steps}
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"max_turns": turns, "max_tokens": tokens, "split": "eval", "step": 5}
        for turns, tokens in EXPERIMENT.budgets[:num_evaluations]
    ]
    lines.append({"max_turns": 7, "max_tokens": 77, "split": "train", "step": 5})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "eval.jsonl").write_text(text)


def test_a_new_run_is_trained_and_then_evaluated_under_every_budget(tmp_path):
    train, evaluate = commands(EXPERIMENT, "gagar", 0, tmp_path / "run")
    assert train[train.index("--grader") + 1] == "rubric"
    assert evaluate[evaluate.index("--max-turns") + 1 :][:2] == ["9", "7"]


def test_what_is_done_is_not_done_again(tmp_path):
    finish(tmp_path / "half", num_evaluations=1)
    (evaluate,) = commands(EXPERIMENT, "binary", 0, tmp_path / "half")
    assert evaluate[-4:] == ["--max-turns", "7", "--max-tokens", "77"]
    finish(tmp_path / "whole", num_evaluations=2)
    assert commands(EXPERIMENT, "binary", 0, tmp_path / "whole") == []


def test_a_stopped_run_goes_on(tmp_path):
    finish(tmp_path / "run", num_evaluations=0)
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"status": "stopped"}))
    assert "train" in commands(EXPERIMENT, "binary", 0, tmp_path / "run")[0]


def test_a_longer_experiment_trains_a_finished_run_on(tmp_path):
    finish(tmp_path / "run", num_evaluations=2)
    longer = Experiment(("binary",), (0,), steps=6, budgets=EXPERIMENT.budgets)
    train, evaluate = commands(longer, "binary", 0, tmp_path / "run")
    assert "train" in train and evaluate[-2:] == ["99", "77"]


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="no arm 'gaga'"):
        Experiment(("gaga",), (0,), steps=5, budgets=())


def test_a_failed_run_shows_the_end_of_its_log(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('the disk is full')"]
    with pytest.raises(RuntimeError, match="the disk is full"):
        run_logged(command, tmp_path / "log", Event())


def test_a_stopped_experiment_ends_its_runs(tmp_path):
    stop = Event()
    stop.set()
    run_logged([sys.executable, "-c", "input()"], tmp_path / "log", stop)


def test_only_the_small_files_of_a_run_are_published(tmp_path):
    run = tmp_path / "binary-s0"
    finish(run, num_evaluations=1)
    for name in ("config.yaml", "metrics.jsonl", "big.bin"):
        (run / name).write_text("x")
    publish([run], tmp_path / "results")
    published = {path.name for path in (tmp_path / "results" / "binary-s0").iterdir()}
    assert published == {"config.yaml", "metrics.jsonl", "eval.jsonl"}
