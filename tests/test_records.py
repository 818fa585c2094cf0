"""A run folder: nothing is overwritten, nothing half written is believed."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from synthetic import FAIL, INFRA, PASS, make_grade, make_group

from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.records import (
    group_arrays,
    group_from_record,
    group_record,
    open_run,
    read_config,
    read_metrics,
    read_rollouts,
)
from gagar_mini.types import Flag

CONFIG = with_overrides(RunConfig(), {"steps": 4})


def save(run, step, content=b"weights"):
    run.save_checkpoint(
        step, {"note": step}, lambda folder: (folder / "w.bin").write_bytes(content)
    )


def listing(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_a_folder_with_content_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="is not empty"):
        open_run(tmp_path, CONFIG)
    assert listing(tmp_path) == ["thesis.txt"]


def test_resuming_nothing_is_refused_and_creates_nothing(tmp_path):
    with pytest.raises(ValueError, match="no run to resume"):
        open_run(tmp_path / "new", CONFIG, resume=True)
    assert listing(tmp_path) == []


def test_resuming_with_another_config_names_what_differs(tmp_path):
    open_run(tmp_path, CONFIG).close()
    other = with_overrides(CONFIG, {"seed": 3, "rollout.group_size": 4, "steps": 9})
    with pytest.raises(ValueError, match="seed was 0 and is now 3, rollout"):
        open_run(tmp_path, other, resume=True)
    with pytest.raises(ValueError, match="steps was 4 and is now 3"):
        open_run(tmp_path, replace(CONFIG, steps=3), resume=True)
    open_run(tmp_path, replace(CONFIG, steps=9), resume=True).close()
    assert read_config(tmp_path).steps == 9


def test_a_second_process_is_refused(tmp_path):
    program = (
        "import sys; from gagar_mini.records import open_run, read_config\n"
        "try: open_run(sys.argv[1], read_config(sys.argv[1]), resume=True)\n"
        "except ValueError as error: print(error)"
    )
    with open_run(tmp_path, CONFIG):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": "."},
        )
    assert done.stdout.startswith("another process is writing"), done.stderr


def test_metrics_and_rollouts_are_cut_back_to_the_checkpoint(tmp_path):
    with open_run(tmp_path, CONFIG) as run:
        run.begin_session(0)
        for step in range(4):
            run.write_rollouts(step, [{"step": step}])
            run.append_metrics(step, {"reward/pass_rate": None, "x": step / 3})
            if step == 1:
                save(run, 2)
        run.write_summary({"steps": 4})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "x"')  # killed in mid-line
    with open_run(tmp_path, CONFIG, resume=True) as run:
        checkpoint = run.latest_checkpoint()
        run.begin_session(checkpoint.step)
    assert checkpoint.step == 2
    assert checkpoint.state["note"] == 2
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert read_metrics(tmp_path)[1]["x"] == 1 / 3
    assert len(list((tmp_path / "rollouts").iterdir())) == 2
    assert read_rollouts(tmp_path, 1) == [{"step": 1}]
    assert not (tmp_path / "summary.json").exists()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [session["step"] for session in manifest["sessions"]] == [0, 2]


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    with open_run(tmp_path, CONFIG) as run:
        for step in (1, 2, 3):
            save(run, step)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_00002", "step_00003"]


def damage_content(folder):
    (folder / "w.bin").write_bytes(b"weighty")


def damage_state(folder):
    state = folder / "state.json"
    state.write_bytes(state.read_bytes()[:20])


def damage_presence(folder):
    (folder / "w.bin").unlink()


@pytest.mark.parametrize("damage", [damage_content, damage_state, damage_presence])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, damage):
    with open_run(tmp_path, CONFIG) as run:
        run.begin_session(0)
        save(run, 1)
        save(run, 2)
        (run.path / "checkpoints" / ".tmp_step_00003").mkdir()  # killed while saving
        damage(run.path / "checkpoints" / "step_00002")
        with pytest.warns(UserWarning, match=r"step_00002.*is damaged"):
            checkpoint = run.latest_checkpoint()
        assert checkpoint.step == 1
        run.begin_session(1)
        assert os.listdir(run.path / "checkpoints") == ["step_00001"]
        damage(run.path / "checkpoints" / "step_00001")
        with pytest.raises(ValueError, match=r"no checkpoint.*is damaged"):
            run.latest_checkpoint()


def test_groups_survive_the_round_trip():
    grade = make_grade({"g/1": "T2", "g/0": "T1"})
    flag = Flag("noise", "a print is left", "a.py:3")
    graded = replace(grade.grades["g/1"], flags=(flag,))
    grade = replace(grade, grades={**grade.grades, "g/1": graded})
    group = make_group([PASS, PASS, FAIL, INFRA], grade=grade)
    record = json.loads(json.dumps(group_record(group)))
    copy = group_from_record(record, group_arrays(group), group.task)
    assert copy.grade == group.grade
    assert copy.outcomes == group.outcomes
    for old, new in zip(group.trajectories, copy.trajectories, strict=True):
        assert new.patch == old.patch  # bytes that are no UTF-8 included
        assert new.turns == old.turns
        assert np.array_equal(new.behaviour_logprobs, old.behaviour_logprobs)


@pytest.mark.parametrize(
    "state", [b"[]", b"3", b'{"step": 1, "files": 3}', b'{"step": 1, "files": {}}']
)
def test_a_state_that_is_none_is_damage(tmp_path, state):
    with open_run(tmp_path, CONFIG) as run:
        save(run, 1)
        (tmp_path / "checkpoints" / "step_00001" / "state.json").write_bytes(state)
        with pytest.raises(ValueError, match=r"no checkpoint.*is damaged"):
            run.latest_checkpoint()


@pytest.mark.parametrize("line", ["[]", "3", "{}", '{"step": 0, "x": "y"}', "x"])
def test_a_line_that_is_no_metrics_is_named(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)
