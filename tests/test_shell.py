"""Shell commands of an agent: a tree in, a tree out, and nothing that is no tree."""

import asyncio
import base64
import json
from dataclasses import replace

import pytest

from gagar_mini.agent.dialect import MalformedCall
from gagar_mini.agent.loop import Workspace, run_agent
from gagar_mini.agent.scripted import ScriptedEngine
from gagar_mini.config import RolloutConfig
from gagar_mini.types import HiddenTest, Status, StopReason, Target, Task, ToolCall
from gagar_mini.world import shell
from gagar_mini.world.sandbox.base import episode
from gagar_mini.world.shell import read_report, run_shell, told
from gagar_mini.world.verifier import verify

FILES = {"maths.py": b"def twice(n):\n    return n + 3\n", "sub/data": b"\xff\0\r\n"}
TASK = Task(
    id="core-train-00000",
    family="core",
    split="train",
    statement="twice adds three",
    files={**FILES, "check.py": b"from maths import twice\nassert twice(2) == 4\n"},
    visible_check="check.py",
    targets=(Target("maths.py", "twice"),),
    allowed_paths=("maths.py",),
    hidden_tests=(HiddenTest("t", "maths.py", "twice", cases=(((5,), 10),)),),
    gold_patch=b"",
)


@pytest.fixture(
    scope="module",
    params=["sandbox", pytest.param("docker_sandbox", marks=pytest.mark.docker)],
)
def room(request):
    with episode(request.getfixturevalue(request.param)) as opened:
        yield opened


def test_edited_new_and_deleted_files_come_back_as_bytes(room):
    command = """
sed -i 's/n + 3/n * 2/' maths.py
rm sub/data; mkdir -p a/b; printf '\\0\\377\\r\\n' > 'a/b/new name'; : > empty
cat maths.py
"""
    result = run_shell(room, FILES, command)
    assert dict(result.files) == {
        "maths.py": b"def twice(n):\n    return n * 2\n",
        "a/b/new name": b"\0\xff\r\n",
        "empty": b"",
    }
    assert result.output == result.files["maths.py"] and result.returncode == 0
    assert (result.problem, result.skipped) == ("", {})


def test_commands_are_stateless_and_begin_with_the_tree(room):
    run_shell(room, FILES, "cd sub; export X=1; touch /tmp/left; (sleep 60 &)")
    result = run_shell(room, FILES, "pwd; echo $X; ls; ls /tmp; ls -a sub")
    lines = result.output.decode().split()
    assert lines == ["/w", "maths.py", "sub", ".", "..", "data"]


def test_what_is_told(room):
    result = run_shell(room, {}, "echo out; echo err >&2; exit 3")
    assert told(result) == "out\nerr\n[exit status 3]"
    assert told(run_shell(room, {}, "true")) == "[exit status 0]"
    assert told(run_shell(room, {}, "kill -9 $$")) == "[exit status -9]"
    assert "not found" in told(run_shell(room, {}, "no-such-command"))


def test_what_is_no_regular_file_is_left_out_and_named(room):
    command = """
ln -s /etc/passwd link; ln -s /etc folder; mkfifo pipe; ln maths.py twin
rm sub/data; ln -s ../maths.py sub/data
mkdir .git __pycache__; echo x > .git/config; echo x > __pycache__/a.pyc
echo kept > kept
"""
    result = run_shell(room, {**FILES, "b": b"b"}, command)
    assert dict(result.files) == {"b": b"b", "kept": b"kept\n"}
    assert result.skipped == {
        "link": "a symbolic link",
        "folder": "a symbolic link",
        "pipe": "no regular file",
        "maths.py": "a file with several names",
        "twin": "a file with several names",
        "sub/data": "a symbolic link",
    }
    assert "'folder' is not kept: a symbolic link" in told(result)


def test_a_command_that_hangs_is_ended_and_its_files_are_kept(room):
    result = run_shell(room, FILES, "echo a > a; sleep 60", wall_s=0.5)
    assert result.is_timeout and result.files["a"] == b"a\n"
    assert told(result) == "[the command took too long and was ended]"


def test_output_and_changes_have_caps(room, monkeypatch):
    monkeypatch.setattr(shell, "MAX_CHANGED_BYTES", 1000)
    monkeypatch.setattr(shell, "MAX_OUTPUT_BYTES", 10)
    result = run_shell(room, FILES, "yes; true", wall_s=0.5)
    assert result.output == b"y\n" * 5
    result = run_shell(room, FILES, "head -c 2000 /dev/zero > a; rm maths.py")
    assert result.files == FILES and "1000 bytes" in result.problem


def test_a_command_that_ends_its_supervisor_changes_nothing(room):
    for command in ("touch a; kill -9 $PPID; sleep 9", "touch a; kill -9 -1; sleep 9"):
        result = run_shell(room, FILES, command)
        assert result.files == FILES and "watched over it" in told(result)


def forged(**changes):
    report = {"returncode": 0, "output": "", "is_timeout": False, "changed": {}}
    report |= {"deleted": [], "skipped": {}, "is_too_much": False, **changes}
    return json.dumps(report).encode()


def test_a_forged_report_is_held_to_the_same_rules(monkeypatch):
    text = base64.b64encode(b"x").decode()
    for path in ("/etc/x", "../x", "a/../../x", ".git/config", "maths.py/x", "a\0b"):
        result = read_report(FILES, forged(changed={path: text}))
        assert result.files == FILES and result.problem
    monkeypatch.setattr(shell, "MAX_FILES", 10)
    many = {f"f{number}": text for number in range(10)}
    assert "10 files" in read_report(FILES, forged(changed=many)).problem
    for bad in (
        b"",
        b"{}",
        b"[" * 10**5,
        forged(changed={"a": "?"}),
        forged(changed={"a": 1}),
        forged(returncode="0"),
        forged(output=None),
    ):
        with pytest.raises(ValueError, match="watched over"):
            read_report(FILES, bad)


class ShellDialect:
    """Text as code points, one command in each completion: the least there is."""

    stop_ids = (0,)

    def prompt_ids(self, task):
        return [ord(letter) for letter in task.statement]

    def parse(self, ids, context):
        text = "".join(map(chr, ids[:-1]))
        if not text:
            raise MalformedCall("no command")
        return ToolCall("submit", {}) if text == "submit" else bash(text)

    def observation_ids(self, call, text, *, is_finished=True):
        return [ord(letter) for letter in text]

    def call_ids(self, call, context):
        return [ord(letter) for letter in call.arguments.get("command", "submit")] + [0]


def bash(command):
    return ToolCall("bash", {"command": command})


def play(room, calls, tools="bash"):
    dialect = ShellDialect()
    limits = RolloutConfig(
        tools=tools, max_new_tokens=500, max_action_tokens=2000, max_context_tokens=9000
    )
    script = [dialect.call_ids(call, []) for call in calls]
    engine = ScriptedEngine([script])
    run = run_agent(TASK, engine, dialect, room, limits, trajectory_id="t", seed=0)
    return asyncio.run(run)


def test_an_agent_repairs_a_repository_by_shell_commands_alone(room):
    trajectory = play(
        room,
        [
            bash("python check.py"),
            bash("sed -i 's/n + 3/n * 2/' maths.py && python check.py && echo fine"),
            ToolCall("submit", {}),
        ],
    )
    said = [turn.observation for turn in trajectory.turns]
    assert "AssertionError" in said[0] and said[1:] == ["fine", ""]
    assert trajectory.stop_reason is StopReason.SUBMITTED
    assert verify(TASK, trajectory.patch, room, seed=1).status is Status.PASS


def test_without_the_tool_there_is_none(room):
    workspace = Workspace(replace(TASK), room)
    assert workspace.act(bash("ls")) == "error: there is no tool bash"
