"""Trajectories in other projects' formats: valid there, and the same when read back."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
from synthetic import FAIL, INFRA, PASS, make_group, make_task

from gagar_mini.agent.atif import check, from_atif, to_atif
from gagar_mini.agent.exports import FORMATS, export_run, prediction_files
from gagar_mini.agent.members import Member, members_of, portable_patch
from gagar_mini.agent.mini_swe import command_line, from_mini_swe, to_mini_swe
from gagar_mini.config import RunConfig
from gagar_mini.records import group_record, open_run
from gagar_mini.types import Outcome, StopReason, ToolCall, Trajectory, Turn
from gagar_mini.world.patches import apply_patch, make_patch

TASK = replace(
    make_task("core-train-00007"),
    files={"a.py": b"x = 1\n", "latin.txt": b"caf\xe9\n", "blob": bytes(range(256))},
)
TREE = {**TASK.files, "a.py": b"x = 2", "new\xfc.py": b"# \xc3\xbc\r\n"}
TURNS = (
    Turn(ToolCall("view", {"path": "a.py"}), "x = 1\n", 3, 4),
    Turn(None, "error: the call has no end", 2, 4),
    Turn(
        ToolCall("edit", {"path": "a.py", "old": "x = 1", "new": "x = 'y'"}), "ok", 4, 5
    ),
    Turn(ToolCall("bash", {"command": "ls | wc -l"}), "3", 1, 5),
    Turn(ToolCall("submit", {}), "", 1, 5),
)
MASK = [0, 0, *[1] * 3, 0, *[1] * 2, 0, 0, *[1] * 4, 0, 1, 0, 1]
TRAJECTORY = Trajectory(
    id="s00003-t000001/2",
    task_id=TASK.id,
    ids=np.arange(100, 100 + len(MASK)),
    action_mask=np.array(MASK, bool),
    behaviour_logprobs=-np.array(MASK, np.float32) / 4,
    turns=TURNS,
    patch=make_patch(TASK.files, TREE),
    stop_reason=StopReason.MAX_TURNS,
    weight_version=4,
)
MEMBER = Member(TASK, TRAJECTORY, Outcome(PASS, {"f": "pass"}), "s00003-t000001")
PAIRS = {"atif": (to_atif, from_atif), "mini-swe": (to_mini_swe, from_mini_swe)}


def through_json(document):
    """As another program reads it: UTF-8 without lone surrogates."""
    return json.loads(
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    )


def same(copy, trajectory):
    assert copy.turns == trajectory.turns
    assert (copy.id, copy.task_id) == (trajectory.id, trajectory.task_id)
    assert copy.stop_reason is trajectory.stop_reason
    return apply_patch(TASK.files, copy.patch) == apply_patch(
        TASK.files, trajectory.patch
    )


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("reason", StopReason)
def test_what_is_written_is_read_back(form, reason):
    write, read = PAIRS[form]
    trajectory = replace(TRAJECTORY, stop_reason=reason)
    document = through_json(write(replace(MEMBER, trajectory=trajectory), "model"))
    assert same(read(document), trajectory)


@pytest.mark.parametrize("form", PAIRS)
@pytest.mark.parametrize("content", [b"caf\xe9 noir\n", b"\0\xff", b"\xc3\xbc", b""])
def test_every_patch_survives_as_text(form, content):
    write, read = PAIRS[form]
    patch = make_patch(TASK.files, {**TASK.files, "latin.txt": content})
    trajectory = replace(TRAJECTORY, patch=patch)
    document = through_json(write(replace(MEMBER, trajectory=trajectory), "model"))
    assert same(read(document), trajectory)
    assert portable_patch(TASK, b"\xff no diff") == "\ufffd no diff"


def test_atif_holds_the_sampled_tokens_where_they_are_known():
    document = to_atif(MEMBER, "model")
    check(through_json(document))
    first, malformed, *_ = [s for s in document["steps"] if s["source"] == "agent"]
    assert first["metrics"] == {
        "completion_tokens": 3,
        "prompt_tokens": 2,
        "completion_token_ids": [102, 103, 104],
        "logprobs": [-0.25, -0.25, -0.25],
    }
    assert malformed["metrics"]["completion_token_ids"] == [106, 107]
    assert "tool_calls" not in malformed
    assert document["final_metrics"] == {
        "total_completion_tokens": 11,
        "total_steps": 6,
    }


def test_mini_swe_has_the_command_line_and_why_it_ended():
    document = to_mini_swe(MEMBER, "model")
    assert document["info"]["exit_status"] == "LimitsExceeded"
    assert document["info"]["model_stats"]["api_calls"] == len(TURNS)
    roles = [message["role"] for message in document["messages"]]
    assert roles == ["user", *["assistant", "tool"], *["assistant", "user"],
                     *["assistant", "tool"] * 3, "exit"]  # fmt: skip
    edit = document["messages"][5]["extra"]["actions"][0]
    assert shlex.split(edit["command"]) == ["edit", "a.py", "x = 1", "x = 'y'"]
    assert command_line(TURNS[3].action) == "ls | wc -l"


def test_predictions_name_each_instance_once_a_file():
    group = make_group([PASS, FAIL, INFRA])
    files = prediction_files(members_of(group), "run-step0")
    assert list(files) == [f"predictions-{number}.jsonl" for number in range(3)]
    for rows in files.values():
        (row,) = rows
        assert row.keys() == {"instance_id", "model_name_or_path", "model_patch"}


def test_a_run_is_exported_and_nothing_overwritten(tmp_path):
    group = make_group([PASS, FAIL])
    with open_run(tmp_path / "run", RunConfig()) as run:
        run.write_rollouts(0, [group_record(group)])
        run.write_rollouts(2, [group_record(group)])
    for form in FORMATS:
        out = tmp_path / form
        files = export_run(tmp_path / "run", None, form, out, lambda _: group.task)
        assert len(files) == 2 and "run-step2" in files[0].read_text()
        with pytest.raises(ValueError, match="exists"):
            export_run(tmp_path / "run", 2, form, out, lambda _: group.task)
    for path in (tmp_path / "atif").iterdir():
        assert from_atif(json.loads(path.read_text())).task_id == group.task.id


ATIF = to_atif(MEMBER, "model")


def changed(key, value):
    document = through_json(ATIF)
    *inner, last = key.split(".")
    place = document
    for part in inner:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "no ATIF-v1.7"),
        (changed("schema_version", "ATIF-v1.9"), "no ATIF-v1.7"),
        (changed("colour", 1), "the field 'colour'"),
        (changed("steps", []), "at least one"),
        (changed("steps", [3]), "step 1 must be an object"),
        (changed("agent", {"name": "x"}), "a name and a version"),
        (changed("steps.1.step_id", 7), "ids run 1, 2, 3"),
        (changed("steps.0.metrics", {}), "is no step of the agent"),
        (changed("steps.1.metrics.tokens", 1), "the field 'tokens'"),
        (changed("steps.1.source", "tool"), "the source 'tool'"),
        (changed("steps.1.tool_calls", [{"tool_call_id": "x"}]), "lacks 'arguments'"),
        (changed("steps.1.tool_calls", 3), "has another shape"),
        (changed("steps.1.observation", [1]), "has another shape"),
        (changed("steps.1.observation", {"results": [{"source_call_id": "z"}]}),
         "answers 'z', which is no call"),
    ],
)  # fmt: skip
def test_a_slip_in_atif_is_one_sentence(document, told):
    with pytest.raises(ValueError) as error:
        from_atif(document, "x.json")
    assert told in str(error.value) and str(error.value).startswith("x.json")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("trajectory_format", "mini-swe-agent-1.0", "is no mini-swe-agent-1.1"),
        ("messages", [{}], "lacks 'role'"),
        ("messages", 3, "has another shape"),
        ("info", {}, "lacks 'exit_status'"),
    ],
)
def test_a_slip_in_mini_swe_is_one_sentence(key, value, told):
    document = through_json(to_mini_swe(MEMBER, "model")) | {key: value}
    with pytest.raises(ValueError, match=told):
        from_mini_swe(document, "x.json")


def test_a_foreign_atif_step_with_two_calls_is_two_turns():
    calls = [
        {"tool_call_id": name, "function_name": "bash", "arguments": {"n": number}}
        for number, name in enumerate("ab")
    ]
    results = [{"source_call_id": name, "content": name} for name in "ba"]
    step = {"step_id": 1, "source": "agent", "message": "hm", "tool_calls": calls}
    document = {
        "schema_version": "ATIF-v1.7",
        "agent": {"name": "other", "version": "1"},
        "steps": [step | {"observation": {"results": results}}],
    }
    first, second = from_atif(document, "x").turns
    assert (first.action.arguments, first.observation) == ({"n": "0"}, "a")
    assert (second.action.arguments, second.observation) == ({"n": "1"}, "b")
