"""A task as a folder for Harbor: statement, image, hidden tests, solution.

    instruction.md      the statement
    task.toml           limits; the agent is not root, the verifier is
    environment/        Dockerfile, and the repository as app/
    solution/           solve.sh puts the repaired files in place
    tests/              test.sh runs judge.py, the split judge (`harbor_judge`)

Harbor uploads tests/ when the agent has ended. The hidden inputs are those of one seed,
since a folder is judged again and again the same: make several to vary them.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from gagar_mini.types import Task
from gagar_mini.world.answering import encode
from gagar_mini.world.patches import apply_patch
from gagar_mini.world.pytest_runner import suite_of
from gagar_mini.world.tasks import draw_cases
from gagar_mini.world.verifier import (
    COMPILED_SUFFIXES,
    STARTUP_FILES,
    TEST_HOOKS,
    TEST_SETTINGS,
)

IMAGE = "python:3.11-slim"
DOCKERFILE = f"""FROM {IMAGE}
RUN useradd --create-home agent
COPY --chown=agent:agent app/ /app/
RUN chown agent:agent /app
WORKDIR /app
"""
TASK_TOML = """schema_version = "1.1"

[task]
name = {name}
description = {description}

[metadata]
family = {family}
split = {split}
seed = {seed}

[agent]
timeout_sec = 600.0
user = "agent"

[verifier]
timeout_sec = 120.0
user = "root"

[environment]
build_timeout_sec = 600.0
cpus = 1
memory_mb = 1024
"""
TEST_SH = """#!/bin/sh
exec python3 -I /tests/judge.py /app /logs/verifier/reward.txt
"""


def export_harbor(task: Task, out: Path, *, seed: int = 0) -> Path:
    """Write the task to a new folder of its name in `out`; the folder.

    Raises ValueError for a task that is judged by a test suite, and where the folder is
    there already.
    """
    if suite_of(task) is not None:
        raise ValueError(f"task {task.id} has a test suite: only calls can be exported")
    folder = out / task.id
    if folder.exists():
        raise ValueError(f"{folder} exists: choose another folder")
    files = {f"environment/app/{path}": text for path, text in task.files.items()}
    files |= {
        "instruction.md": instruction(task).encode(),
        "task.toml": task_toml(task, seed).encode(),
        "environment/Dockerfile": DOCKERFILE.encode(),
        "tests/order.json": json.dumps(judge_order(task, seed)).encode(),
        "tests/test.sh": TEST_SH.encode(),
        **solution(task),
    }
    for name, source in (("judge", "harbor_judge"), ("answering", "answering")):
        program = Path(__file__).with_name(f"{source}.py")
        files[f"tests/{name}.py"] = program.read_bytes()
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if target.suffix == ".sh" else 0o644)
    return folder


def instruction(task: Task) -> str:
    check = task.visible_check and f"\n`python3 {task.visible_check}` is a first check."
    return f"{task.statement.strip()}\n\nThe repository is in /app.{check}\n"


def task_toml(task: Task, seed: int) -> str:
    name = "gagar-mini/" + re.sub(r"[^a-z0-9._-]+", "-", task.id.lower())
    return TASK_TOML.format(
        name=json.dumps(name),
        description=json.dumps(task.statement.splitlines()[0]),
        family=json.dumps(task.family),
        split=json.dumps(task.split),
        seed=seed,
    )


def judge_order(task: Task, seed: int) -> Mapping[str, object]:
    """What the judge must know: calls, expected forms, and what is protected."""
    cases = [
        (test, arguments, expected)
        for test in task.hidden_tests
        for arguments, expected in draw_cases(test, seed)
    ]
    if not cases:
        raise ValueError(f"task {task.id} has no hidden case: it would pass anything")
    kept = [path for path in task.files if path.split("/")[-1] in TEST_SETTINGS]
    return {
        "calls": [
            {
                "path": test.path,
                "function": test.function,
                "arguments": encode(tuple(arguments)),
            }
            for test, arguments, _ in cases
        ],
        "expected": [encode(expected) for _, _, expected in cases],
        "base": {
            path: hashlib.sha256(content).hexdigest()
            for path, content in task.files.items()
        },
        "allowed_paths": task.allowed_paths,
        "visible_check": task.visible_check,
        "hooks": (*STARTUP_FILES, *TEST_HOOKS),
        "compiled": COMPILED_SUFFIXES,
        "settings": TEST_SETTINGS,
        "kept": {path: base64.b64encode(task.files[path]).decode() for path in kept},
    }


def solution(task: Task) -> dict[str, bytes]:
    """The repaired files and a script that puts them in place."""
    gold = apply_patch(task.files, task.gold_patch)
    changed = {
        path: text for path, text in gold.items() if task.files.get(path) != text
    }
    gone = sorted(task.files.keys() - gold.keys())
    lines = ["#!/bin/sh", "set -e", "cd /app", "cp -R /solution/files/. ."]
    lines += [f"rm -- {shlex.quote(path)}" for path in gone]
    files = {f"solution/files/{path}": text for path, text in changed.items()}
    return files | {"solution/solve.sh": "\n".join([*lines, ""]).encode()}
