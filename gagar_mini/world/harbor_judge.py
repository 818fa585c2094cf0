"""The split judge as one file, for a Harbor task: `judge.py` in its tests folder.

Standard library only. Runs as root in the container in which the agent worked as
another user: copies the agent's tree, gives the program a process of a user who may
read neither this folder nor this process, asks it for every hidden call, and compares
the answers with the expected ones here. Writes 1 or 0 to the file that it is told; a
harness that fails writes nothing and exits with 1.
"""

import base64
import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import IO

HERE = Path(__file__).parent
MAX_TREE_BYTES = 8 << 20
MAX_OUTPUT_BYTES = 1 << 20
MEMORY_BYTES = 512 << 20
CPU_S, WALL_S = 20, 60
NOBODY = 65534


def main(arguments: list[str]) -> int:
    """`judge.py TREE REWARD_FILE`; the exit status."""
    if os.geteuid() != 0:
        print("judge.py must be root, to hide what it expects from the program")
        return 1
    HERE.chmod(0o700)
    tree, reward_file = map(Path, arguments)
    order = json.loads((HERE / "order.json").read_bytes())
    reason = complaint(order, tree)
    reward_file.write_text(f"{int(not reason)}\n")
    print(reason or "pass")
    return 0


def complaint(order: dict, tree: Path) -> str:
    """Why the tree is no pass, in one sentence; "" for a pass."""
    files = collect(tree)
    if files is None:
        return "the tree is too large, or no folder"
    changed = {
        path
        for path in files.keys() | order["base"].keys()
        if path not in order["allowed_paths"]
        and digest(files.get(path)) != order["base"].get(path)
    }
    attacks = sorted(path for path in changed if is_attack(order, path))
    if attacks:
        return f"{attacks[0]} attacks the tests"
    for path in changed:
        if PurePosixPath(path).name in order["settings"]:
            files.pop(path, None)
    for path, content in order["kept"].items():
        files[path] = base64.b64decode(content)
    answers = ask(order["calls"], files)
    if answers is None:
        return "the program did not end well, in time"
    expected = order["expected"]
    wrong = [n for n, want in enumerate(expected) if answers[n : n + 1] != [want]]
    if wrong:
        return f"{len(wrong)} of {len(expected)} answers are wrong or missing"
    if len(answers) != len(expected):
        return "more came than answers"
    return ""


def digest(content: bytes | None) -> str | None:
    return None if content is None else hashlib.sha256(content).hexdigest()


def is_attack(order: dict, path: str) -> bool:
    """As `verifier.find_tampering`, with its names."""
    name = PurePosixPath(path)
    return (
        path == order["visible_check"]
        or name.name in order["hooks"]
        or name.suffix in order["compiled"]
    )


def collect(tree: Path) -> dict[str, bytes] | None:
    """Regular files below `tree` by relative path; links, pipes and devices are left
    out, and so is what the interpreter itself compiled."""
    if tree.is_symlink() or not tree.is_dir():
        return None
    files, size = {}, 0
    for root, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        for name in names:
            path = Path(root, name)
            try:
                opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                continue
            with os.fdopen(opened, "rb") as file:
                if not stat.S_ISREG(os.fstat(opened).st_mode):
                    continue
                content = file.read(MAX_TREE_BYTES + 1)
            size += len(content)
            if size > MAX_TREE_BYTES:
                return None
            files[path.relative_to(tree).as_posix()] = content
    return files


def ask(calls: list, files: dict[str, bytes]) -> list | None:
    """What the program answers to the calls; None where it ended badly. What is no
    answer, or comes out of turn, ends the list."""
    folder = Path(tempfile.mkdtemp(prefix="judge-"))
    try:
        for path, content in files.items():
            target = folder / "tree" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        with open(folder / "answers", "w+b") as output:
            is_well = run((HERE / "answering.py").read_text(), calls, folder, output)
            output.seek(0)
            lines = output.read(MAX_OUTPUT_BYTES).split(b"\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return parse(lines) if is_well else None


def run(program: str, calls: list, folder: Path, output: IO[bytes]) -> bool:
    """Run the program as nobody, with limits; whether it ended well."""
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", program],
        cwd=folder / "tree",
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "HOME": "/nonexistent"},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.DEVNULL,
        preexec_fn=limit,
        start_new_session=True,
        **user,
    )
    try:
        process.communicate(json.dumps(calls).encode(), timeout=WALL_S)
        return process.returncode == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES))


def parse(lines: list[bytes]) -> list:
    *lines, rest = lines
    answers = []
    for line in lines:
        try:
            number, kind, form = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            return [*answers, None]
        if type(number) is not int or number != len(answers) or kind != "ok":
            return [*answers, None]
        answers.append(form)
    return [*answers, None] if rest else answers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
