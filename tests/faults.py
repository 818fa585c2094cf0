"""Faults that a run has to survive: each is injected, and what happened written down.

    python tests/faults.py --out data/results

The run is the bandit (bandit.py): all but the agent and the hidden tests is the real
thing. "Nothing lost" means that, resumed after the fault, it ends with the same
metrics, groups and weights, to the bit, as a run that was left alone. Orphans are
processes that a run leaves behind. A full disk needs root (a small tmpfs), and a
container that dies needs a Docker engine (`.ci/with-docker`): each is left out without.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import tyro
from bandit import CONFIG, open_bandit

from gagar_mini.cli import sentence
from gagar_mini.config import RunConfig, with_overrides
from gagar_mini.grader.background import BackgroundGrader
from gagar_mini.learn.parallel import joined_ranks
from gagar_mini.learn.rl import open_shared_run, run_to_the_end
from gagar_mini.learn.state import TrainState
from gagar_mini.learn.stopping import Stopper
from gagar_mini.records import read_metrics, read_rollouts
from gagar_mini.types import (
    Outcome,
    RolloutGroup,
    SandboxUnavailable,
    Status,
    Trajectory,
)
from gagar_mini.world.sandbox import Sandbox, open_sandbox
from gagar_mini.world.sandbox.base import episode
from gagar_mini.world.sandbox.docker_engine import OWNER, DockerEngine

FAULTY = with_overrides(CONFIG, {"steps": 6})
TIMEOUT_S = 120
CLOCKS = ("time/", "memory/")

Sabotage = Callable[[TrainState], None]


@dataclass
class Finding:
    """A fault and what came of it. `codes` are exit statuses, one a rank (negative: the
    signal that ended it), `said` is the last line of who ended by itself."""

    fault: str
    ranks: int
    codes: list[int]
    said: str
    orphans: int
    afterwards: str
    is_good: bool


@dataclass
class Run:
    """The processes of one run, each in a session of its own."""

    processes: list[multiprocessing.Process]
    logs: list[Path]
    pids: list[int] = field(default_factory=list)

    def signal(self, number: int, ranks: Sequence[int] = ()) -> None:
        for rank in ranks or range(len(self.pids)):
            if self.processes[rank].is_alive():
                os.kill(self.pids[rank], number)

    def finish(self) -> tuple[list[int], str, int]:
        """(exit statuses, what was said last, orphans), once all have ended."""
        deadline = time.monotonic() + TIMEOUT_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        is_hung = any(process.is_alive() for process in self.processes)
        orphans = members_of(self.pids)
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        lines = [line for log in self.logs for line in log.read_text().splitlines()]
        for log in self.logs:
            log.unlink()
        told = [line for line in lines if line.strip() and not line.startswith("  ")]
        said = "(hung)" if is_hung else (told or [""])[-1]
        said = re.sub(r"/\S*/(tmp\w+|[\w-]+/gagar_mini)/", "", said)
        return [process.exitcode for process in self.processes], said, len(orphans)


def start(
    path: Path,
    size: int = 1,
    *,
    config: RunConfig = FAULTY,
    resume: bool = False,
    sabotage: Sabotage = lambda state: None,
    on_begin: Callable[[], None] = lambda: None,
) -> Run:
    """Begin a run of the bandit in `size` forked processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    run = Run([], [])
    for rank in range(size):
        descriptor, name = tempfile.mkstemp(suffix=".log")
        os.close(descriptor)
        log = Path(name)
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        work = (path, config, resume, sabotage, on_begin)
        process = context.Process(target=_be, args=(log, environment, *work))
        process.start()
        run.processes.append(process)
        run.logs.append(log)
        run.pids.append(process.pid)
    return run


def _be(
    log: Path,
    environment: dict[str, str],
    path: Path,
    config: RunConfig,
    resume: bool,
    sabotage: Sabotage,
    on_begin: Callable[[], None],
) -> None:
    """One process of a run, with the exit statuses of the command line."""
    os.setsid()
    os.environ |= environment
    sys.stderr = log.open("w", buffering=1)
    torch.set_num_threads(1)
    try:
        stopper = Stopper()
        with joined_ranks() as ranks:
            run = open_shared_run(ranks, path, config, resume=resume)
            with run, stopper.listening():
                state = open_bandit(config, run, ranks)
                sabotage(state)
                stopper.run(
                    run_to_the_end(state, stopper, progress=False, on_begin=on_begin)
                )
    except (ValueError, OSError, SandboxUnavailable) as error:
        print(f"gagar-mini: {sentence(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("gagar-mini: interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)


def members_of(sessions: Sequence[int]) -> list[int]:
    """The live processes of some sessions."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = entry.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if int(session) in sessions and state != "Z":
            found.append(int(entry.parent.name))
    return found


# --- comparing ------------------------------------------------------------------------


def contents(path: Path) -> list:
    """All that must be equal in two equal runs."""
    lines = [
        {k: v for k, v in line.items() if not k.startswith(CLOCKS)}
        for line in read_metrics(path)
    ]
    groups = [read_rollouts(path, line["step"]) for line in lines]
    folder = path / "checkpoints" / f"step_{FAULTY.steps:05d}"
    names = ("model", "optimizer", "surplus")
    return [lines, groups, *((folder / f"{n}.safetensors").read_bytes() for n in names)]


class Bench:
    """Undisturbed runs by number of ranks, and how long they took."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.whole: dict[int, Path] = {}
        self.wall_s: dict[int, float] = {}
        self._numbers = itertools.count()
        for size in (1, 2):
            path, began = folder / f"whole{size}", time.monotonic()
            codes, said, _ = start(path, size).finish()
            assert codes == [0] * size, said
            self.whole[size] = path
            self.wall_s[size] = time.monotonic() - began

    def path(self) -> Path:
        return self.folder / f"run{next(self._numbers)}"

    def conclude(
        self, fault: str, run: Run, path: Path, expected: Sequence[int]
    ) -> Finding:
        """Wait for the end, resume without the fault, and compare."""
        size = len(run.processes)
        codes, said, orphans = run.finish()
        again, told, left = start(path, size, resume=path.exists()).finish()
        if again != [0] * size:
            afterwards = f"does not resume: {told}"
        elif contents(path) == contents(self.whole[size]):
            afterwards = "nothing lost"
        else:
            afterwards = "resumes to something else"
        orphans += left
        is_good = (
            afterwards == "nothing lost" and not orphans and {*codes} <= {*expected}
        )
        return Finding(fault, size, codes, said, orphans, afterwards, is_good)


# --- the faults -----------------------------------------------------------------------


def signals(bench: Bench) -> Iterator[Finding]:
    """Killed at random moments, one process or all; Ctrl-C once and twice; SIGTERM."""
    kinds = [
        (1, "kill -9", signal.SIGKILL, (0,), (-9, 0), 2),
        (2, "kill -9 of the first rank", signal.SIGKILL, (0,), (-9, 2, 0), 2),
        (2, "kill -9 of the second rank", signal.SIGKILL, (1,), (-9, 2, 0), 2),
        (1, "Ctrl-C", signal.SIGINT, (0,), (0,), 2),
        (2, "Ctrl-C", signal.SIGINT, (0, 1), (0,), 1),
        (1, "SIGTERM", signal.SIGTERM, (0,), (0,), 1),
    ]
    for size, name, number, ranks, expected, count in kinds:
        for seed in range(count):
            share = random.Random(f"{name}/{size}/{seed}").uniform(0.05, 0.95)
            path = bench.path()
            run = start(path, size)
            if number != signal.SIGKILL:  # before that the system's default ends it
                wait_until(lambda path=path: len(read_metrics(path)) > 0)
                share /= 2
            time.sleep(share * bench.wall_s[size])
            run.signal(number, ranks)
            fault = f"{name}, at {share:.0%} of the run"
            yield bench.conclude(fault, run, path, expected)
    yield impatience(bench)


def impatience(bench: Bench) -> Finding:
    """Ctrl-C twice while a rollout does not come to an end."""

    def hang(state: TrainState) -> None:
        works, calls = state.sample_group, itertools.count()

        async def sample_group(*arguments: object) -> object:
            if next(calls) >= 9:
                await asyncio.sleep(2 * TIMEOUT_S)
            return await works(*arguments)

        state.sample_group = sample_group

    path = bench.path()
    run = start(path, sabotage=hang)
    wait_until(lambda: len(read_metrics(path)) > 0)
    for _ in range(2):
        time.sleep(0.5)
        run.signal(signal.SIGINT)
    fault = "Ctrl-C twice, in a rollout that hangs"
    return bench.conclude(fault, run, path, (130,))


def breakages(bench: Bench) -> Iterator[Finding]:
    """What raises in the middle: the engine, the sandbox, a hook of the caller."""
    for at in (0, 9):

        def break_engine(state: TrainState, at: int = at) -> None:
            if not state.ranks.is_first or state.ranks.size == 1:
                fails_from(state.engine.model, "decode", at, RuntimeError("no engine"))

        for size in (1, 2):
            path = bench.path()
            run = start(path, size, sabotage=break_engine)
            fault = f"the engine dies after {at} rounds"
            yield bench.conclude(fault, run, path, (1, 2))

        def break_sandbox(state: TrainState, at: int = at) -> None:
            error = SandboxUnavailable("the sandbox has ended")
            fails_from(state, "sample_group", at, error)

        path = bench.path()
        run = start(path, sabotage=break_sandbox)
        fault = f"the sandbox dies after {at} groups"
        yield bench.conclude(fault, run, path, (2,))

    def hook() -> None:
        raise KeyError("a hook of the caller")

    path = bench.path()
    run = start(path, on_begin=hook)
    yield bench.conclude("a hook raises", run, path, (1,))


def fails_from(owner: object, name: str, at: int, error: Exception) -> None:
    """Calls of `owner.name` raise from the one numbered `at` on."""
    works, calls = getattr(owner, name), itertools.count()

    def fragile(*arguments: object) -> object:
        if next(calls) >= at:
            raise error
        return works(*arguments)

    setattr(owner, name, fragile)


def dying_sandboxes(bench: Bench) -> Iterator[Finding]:
    """Real sandboxes whose processes are killed while programs run in them."""
    yield killed_sandbox(bench, "bubblewrap", workers_of, pause_s=0.3)
    with contextlib.suppress(SandboxUnavailable):
        engine = DockerEngine()
        try:
            yield killed_sandbox(
                bench, "docker", lambda pid: rooms_of(engine, pid), pause_s=3.0
            )
        finally:
            engine.close()


def killed_sandbox(
    bench: Bench,
    name: str,
    parts_of: Callable[[int], Sequence["Part"]],
    *,
    pause_s: float,
) -> Finding:
    """One of the sandbox's parts dies at a time, three times in the run. A program is
    run once more where that happens, so no pause is as short as a program."""
    path, killed = bench.path(), []
    run = start(path, sabotage=lambda state: judge_in_sandbox(state, name))
    pid = run.pids[0]
    wait_until(lambda: len(read_metrics(path)) > 0)
    while len(killed) < 3 and run.processes[0].is_alive():
        time.sleep(pause_s)
        if parts := parts_of(pid):
            killed.append(random.Random(len(killed)).choice(parts))
            killed[-1].kill()
    seen = {part.name: part for part in [*killed, *parts_of(pid)]}
    run.processes[0].join(TIMEOUT_S)
    stayed = sum(part.is_alive() for part in seen.values())
    fault = f"{len(killed)} times a part of the {name} sandbox is killed"
    found = bench.conclude(fault, run, path, (0,))
    found.orphans += stayed
    found.is_good = found.is_good and len(killed) == 3 and not stayed
    return found


def judge_in_sandbox(state: TrainState, name: str) -> None:
    """What decides over a pass is now a program that runs for a while in a sandbox."""
    sandbox, works, closes = open_sandbox(name), state.sample_group, state.engine.close

    async def sample_group(*arguments: object) -> RolloutGroup:
        group = await works(*arguments)
        with episode(sandbox) as room:
            judged = [
                asyncio.to_thread(judge, room, trajectory)
                for trajectory in group.trajectories
            ]
            outcomes = tuple(await asyncio.gather(*judged))
        assert outcomes == group.outcomes
        return replace(group, outcomes=outcomes)

    async def close() -> None:
        sandbox.close()
        await closes()

    state.sample_group, state.engine.close = sample_group, close


def judge(sandbox: Sandbox, trajectory: Trajectory) -> Outcome:
    first = trajectory.ids[trajectory.action_mask.argmax()]
    program = f"import sys, time; time.sleep(0.1); sys.exit({first} % 2)"
    done = sandbox.run({}, ["python", "-c", program])
    return Outcome(Status.FAIL if done.returncode else Status.PASS)


@dataclass(frozen=True)
class Part:
    """A process or a container of a sandbox."""

    name: str
    kill: Callable[[], None]
    is_alive: Callable[[], bool]


def workers_of(pid: int) -> list[Part]:
    """The bubblewrap processes that a process has started itself."""
    return [
        Part(
            str(child),
            lambda child=child: os.kill(child, signal.SIGKILL),
            lambda child=child: is_running(child),
        )
        for child in children_of(pid)
    ]


def children_of(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def rooms_of(engine: DockerEngine, pid: int) -> list[Part]:
    """The containers that a process has asked for."""
    return [
        Part(
            container,
            lambda container=container: engine.remove(container),
            lambda container=container: any(
                container == other for other, _, _ in engine.containers(OWNER)
            ),
        )
        for container, owner, _ in engine.containers(OWNER)
        if owner.split("/")[2] == str(pid)
    ]


class HungGrader:
    """Never answers, and never lets go of its thread."""

    async def grade(self, task: object, candidates: object, seed: int) -> object:
        while True:
            time.sleep(0.1)


class BrokenGrader:
    """Has a bug."""

    async def grade(self, task: object, candidates: object, seed: int) -> object:
        raise ZeroDivisionError("a bug of the grader")


def graders(bench: Bench) -> Iterator[Finding]:
    """A grader that hangs or breaks costs the grades and no step."""
    config = with_overrides(FAULTY, {"grader.timeout_s": 0.2, "steps": 3})
    for grader in (HungGrader, BrokenGrader):

        def replace_grader(state: TrainState, grader: type = grader) -> None:
            state.grader = BackgroundGrader(grader())

        path = bench.path()
        run = start(path, config=config, sabotage=replace_grader)
        codes, said, orphans = run.finish()
        lines = read_metrics(path)
        num_graded = sum(line["groups/graded"] for line in lines)
        num_asked = sum(
            value
            for line in lines
            for name, value in line.items()
            if name.startswith("grader/fallback/")
        )
        afterwards = f"{len(lines)} steps, {num_asked} fallbacks, {num_graded} grades"
        is_good = codes == [0] and len(lines) == 3 and num_asked > 0 == orphans
        fault = f"{grader.__name__}: {grader.__doc__.rstrip('.').lower()}"
        yield Finding(fault, 1, codes, said, orphans, afterwards, is_good)


def damages(bench: Bench) -> Iterator[Finding]:
    """Files that a crash, a disk or a person has damaged."""

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    kinds = [
        ("cut short", "model.safetensors", cut),
        ("with one bit flipped", "optimizer.safetensors", flip),
        ("missing", "surplus.safetensors", Path.unlink),
        ("missing", "state.json", Path.unlink),
        ("empty", "state.json", lambda path: path.write_bytes(b"")),
    ]
    for how, name, damage in kinds:
        path = bench.path()
        shutil.copytree(bench.whole[1], path)
        damage(newest(path) / name)
        run = start(path, resume=True)
        yield bench.conclude(f"newest checkpoint: {name} {how}", run, path, (0,))
    path = bench.path()
    shutil.copytree(bench.whole[1], path)
    shutil.rmtree(newest(path))
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "rewa')
    run = start(path, resume=True)
    yield bench.conclude("a line of metrics cut short", run, path, (0,))
    yield all_damaged(bench, cut)


def all_damaged(bench: Bench, cut: Callable[[Path], None]) -> Finding:
    """Without a whole checkpoint the run is refused, and nothing in it is touched."""
    path = bench.path()
    shutil.copytree(bench.whole[1], path)
    for folder in (path / "checkpoints").iterdir():
        cut(folder / "model.safetensors")
    before = (path / "metrics.jsonl").read_bytes()
    codes, said, orphans = start(path, resume=True).finish()
    is_kept = (path / "metrics.jsonl").read_bytes() == before
    afterwards = "refused, records untouched" if is_kept else "records were cut"
    is_good = codes == [2] and is_kept and not orphans
    return Finding(
        "all checkpoints damaged", 1, codes, said, orphans, afterwards, is_good
    )


def newest(path: Path) -> Path:
    return max((path / "checkpoints").glob("step_*"))


def rivals(bench: Bench) -> Iterator[Finding]:
    """Two runs that want one folder."""
    for resume in (False, True):
        path = bench.path()
        first = start(path)
        wait_until(lambda path=path: len(read_metrics(path)) > 0)
        codes, said, orphans = start(path, resume=resume).finish()
        found = bench.conclude("", first, path, (0,))
        how = "resumes" if resume else "begins"
        is_good = found.is_good and codes == [2] and not orphans
        yield Finding(
            f"a second run {how} in the folder of a live one",
            1,
            codes,
            said,
            orphans + found.orphans,
            f"the first: {found.afterwards}",
            is_good,
        )


def full_disks(bench: Bench) -> Iterator[Finding]:
    """A disk of its own that fills up, and is larger when the run is resumed."""
    used = sum(f.stat().st_size for f in bench.whole[1].rglob("*") if f.is_file())
    for share in (0.02, 0.2, 0.5, 0.8):
        disk = bench.path()
        disk.mkdir()
        size_kb = max(16, int(used * share) // 1024)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            return
        try:
            run = start(disk / "run")
            for process in run.processes:
                process.join(TIMEOUT_S)
            larger = ["mount", "-o", "remount,size=64m", str(disk)]
            subprocess.run(larger, check=True)
            fault = f"the disk is full after {size_kb} kB"
            yield bench.conclude(fault, run, disk / "run", (2,))
        finally:
            subprocess.run(["umount", str(disk)], check=True)


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.002)


KINDS = (
    signals,
    breakages,
    dying_sandboxes,
    graders,
    damages,
    rivals,
    full_disks,
)


# --- the table ------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    out: Path = Path("data/results")


def main(options: Options) -> None:
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for kind in KINDS:
            for finding in kind(bench):
                findings.append(finding)
                print("ok  " if finding.is_good else "BAD ", finding, flush=True)
    write(findings, options.out)
    if not all(finding.is_good for finding in findings):
        sys.exit("some faults did harm")


def write(findings: Sequence[Finding], folder: Path) -> None:
    data = {"torch": torch.__version__, "findings": [asdict(f) for f in findings]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "faults.json").write_text(json.dumps(data, indent=1) + "\n")
    num_good = sum(finding.is_good for finding in findings)
    num_orphans = sum(finding.orphans for finding in findings)
    lines = [
        "# What a run does under faults",
        "",
        f"{len(findings)} injected faults, {num_good} of them without harm, "
        f'{num_orphans} processes left behind. "Nothing lost": resumed, the run ends '
        "with the same metrics, groups and weights to the bit as one left alone. Exit "
        "statuses one a rank, negative: the signal. Written by "
        "`python tests/faults.py`.",
        "",
        "| fault | ranks | exit | said | orphans | afterwards |",
        "|---" * 6 + "|",
    ]
    for found in findings:
        codes = ", ".join(map(str, found.codes))
        cells = [found.fault, found.ranks, codes, found.said.replace("|", "/")]
        cells += [
            found.orphans,
            found.afterwards if found.is_good else "**BAD** " + found.afterwards,
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    (folder / "faults.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Options))
