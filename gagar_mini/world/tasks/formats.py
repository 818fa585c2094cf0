"""Task records: one JSON object a line, gzipped, the same bytes for the same tasks.

Literal hidden cases are kept as Python literals in strings, since JSON has no tuples.
"""

import ast
import base64
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from gagar_mini.types import Files, HiddenTest, Target, Task

Content = str | dict[str, str]


def encode_bytes(data: bytes) -> Content:
    """Text where it is UTF-8, else {"base64": ...}."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def decode_bytes(content: Content) -> bytes:
    if isinstance(content, str):
        return content.encode()
    return base64.b64decode(content["base64"])


def _encode_test(test: HiddenTest) -> dict[str, object]:
    record: dict[str, object] = {"id": test.id, "path": test.path}
    record["function"] = test.function
    if test.template:
        record |= {"template": test.template, "num_cases": test.num_cases}
    else:
        record["cases"] = [repr(case) for case in test.cases]
    return record


def _decode_test(record: Mapping[str, object]) -> HiddenTest:
    fields = dict(record)
    cases = fields.pop("cases", [])
    return HiddenTest(**fields, cases=tuple(map(ast.literal_eval, cases)))


def _encode_files(files: Files) -> dict[str, Content]:
    return {path: encode_bytes(files[path]) for path in sorted(files)}


def encode_task(task: Task) -> dict[str, object]:
    """The JSON object of a task."""
    return {
        "id": task.id,
        "family": task.family,
        "split": task.split,
        "statement": task.statement,
        "files": _encode_files(task.files),
        "visible_check": task.visible_check,
        "targets": [[target.path, target.function] for target in task.targets],
        "allowed_paths": list(task.allowed_paths),
        "hidden_tests": [_encode_test(test) for test in task.hidden_tests],
        "gold_patch": encode_bytes(task.gold_patch),
        "metadata": dict(task.metadata),
    }


def decode_task(record: Mapping[str, object]) -> Task:
    """The task of a JSON object. Raises KeyError or TypeError for a malformed one."""
    fields = dict(record)
    files = {path: decode_bytes(content) for path, content in fields["files"].items()}
    return Task(
        **fields
        | {
            "files": files,
            "targets": tuple(Target(*target) for target in fields["targets"]),
            "allowed_paths": tuple(fields["allowed_paths"]),
            "hidden_tests": tuple(map(_decode_test, fields["hidden_tests"])),
            "gold_patch": decode_bytes(fields["gold_patch"]),
        }
    )


def encode_tasks(tasks: Iterable[Task]) -> bytes:
    """JSON lines, one task each."""
    lines = [
        json.dumps(encode_task(task), separators=(",", ":"), ensure_ascii=True)
        for task in tasks
    ]
    return "".join(line + "\n" for line in lines).encode()


def write_tasks(path: Path, tasks: Iterable[Task]) -> None:
    """Write tasks as gzipped JSON lines; no time and no name enter the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile("", "wb", 9, buffer, mtime=0) as file:
        file.write(encode_tasks(tasks))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())


def read_tasks(path: Path) -> tuple[Task, ...]:
    """The tasks of a JSON lines file, gzipped (".gz") or plain.

    Raises ValueError, naming file and line, for a record that is no task.
    """
    data = path.read_bytes()
    if path.suffix == ".gz":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is no whole gzip file: {error}") from None
    tasks = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            tasks.append(decode_task(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} is no task record: {error}") from error
    return tuple(tasks)
