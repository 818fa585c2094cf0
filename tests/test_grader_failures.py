"""Graders that die, hang, lie or babble, each in a real training run: training ends as
if there were no grader, and the counters say why.

Sampling is replaced by groups made by hand, so that every run sees the same ones; one
slow test repeats the claim on the tiny preset from end to end.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bandit import SIZES, TOKENIZER
from grader_world import NOTES, REPRO, TASK, candidate, patch, printed
from matplotlib.figure import Figure
from synthetic import make_trajectory
from torch.testing import assert_close

from gagar_mini.config import RunConfig, tiny, with_overrides
from gagar_mini.cpu_meter import tree_cpu_s
from gagar_mini.grader.agentic import AgenticGrader, Dialogue, GradingLimits, MindReply
from gagar_mini.grader.background import BackgroundGrader, take_costs
from gagar_mini.grader.controls import RandomGrader, make_grader
from gagar_mini.grader.minds import ScriptedMind, look_then_judge
from gagar_mini.grader.rubric import RubricGrader
from gagar_mini.grader.tools import GraderCall
from gagar_mini.grader.transcript import grading_row
from gagar_mini.learn.collecting import TaskSampler, collect
from gagar_mini.learn.rl import open_state, run_to_the_end
from gagar_mini.learn.state import TrainState, make_optimizer
from gagar_mini.learn.stopping import Stopper
from gagar_mini.learn.telemetry import covered_s
from gagar_mini.model.policy import TinyPolicy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.records import open_run, read_gradings, read_metrics, read_rollouts
from gagar_mini.types import (
    CRITERIA,
    CandidateGrade,
    Grader,
    GroupGrade,
    RolloutGroup,
    Status,
    Task,
    Tier,
    UnusableGrade,
)
from gagar_mini.view.compare import read_runs
from gagar_mini.view.grading_plots import (
    count_gradings,
    plot_grader_share,
    plot_gradings,
    save_grading,
)

CONFIG = with_overrides(
    tiny(),
    {
        "steps": 2,
        "credit.rule": "gagar",
        "grader.name": "rubric",
        "grader.timeout_s": 60.0,
        "sampling.tasks_per_round": 4,
        "sampling.groups_per_step": 4,
        "sampling.max_rounds": 1,
    },
)
IMPATIENT = with_overrides(CONFIG, {"grader.timeout_s": 0.3})
CLEAN = candidate("clean", patch())
PRINT = candidate("print", patch(ranges__py=printed()))
FILES = candidate("files", patch(notes__md=NOTES, repro__py=REPRO))
FAILING = candidate("failing", b"", status=Status.FAIL)
ONE_TREE = (CLEAN, replace(CLEAN, id="twin"), FAILING)
GROUP = (CLEAN, PRINT, FILES, FAILING)
NUM_RANKABLE = 3
"""Of the four groups of each step; the fourth has a single passing tree."""


def make_group(group_id: str) -> RolloutGroup:
    number = int(group_id[-6:])
    members = ONE_TREE if number % 4 == 3 else GROUP
    rng = np.random.default_rng(number)
    trajectories = tuple(
        make_trajectory(
            f"{group_id}/{member.id}",
            TASK,
            rng.integers(0, SIZES.vocab_size, 9),
            2,
            np.full(7, -np.log(SIZES.vocab_size)),
            patch=member.patch,
        )
        for member in members
    )
    outcomes = tuple(member.outcome for member in members)
    return RolloutGroup(group_id, TASK, trajectories, outcomes)


async def sample_group(task: Task, group_id: str, seed: int) -> RolloutGroup:
    return make_group(group_id)


def train_with(grader: Grader | None, path: Path, config: RunConfig = CONFIG) -> Path:
    """A run with this grader, behind the same thread as in `train`."""
    policy = TinyPolicy(SIZES)
    with contextlib.ExitStack() as stack:
        if grader is not None:
            grader = stack.enter_context(BackgroundGrader(grader))
        state = TrainState(
            config=config,
            run=stack.enter_context(open_run(path, config)),
            policy=policy,
            tokenizer=TOKENIZER,
            optimizer=make_optimizer(policy, config),
            engine=TorchEngine(policy, max_rows=1),
            sampler=TaskSampler((TASK,), seed=0),
            sample_group=sample_group,
            grader=grader,
        )
        asyncio.run(run_to_the_end(state, Stopper(), progress=False))
    return path


def weights(path: Path, step: int = 2) -> bytes:
    file = path / "checkpoints" / f"step_{step:05d}" / "model.safetensors"
    return file.read_bytes()


# --- graders ----------------------------------------------------------------------


LOOK = look_then_judge(
    lambda stats, diff: (
        dict.fromkeys(CRITERIA, 5)
        if "print" not in diff
        else {
            **dict.fromkeys(CRITERIA, 3),
            "flags": [{"code": "debug_print", "message": "", "evidence": PLACE}],
        }
    )
)
PLACE = "ranges.py"


def that_submits(change: Callable[[dict, Dialogue], dict]) -> AgenticGrader:
    """A grader that looks properly and then submits something else."""

    def script(dialogue: Dialogue) -> GraderCall:
        kept = tuple(e for e in dialogue.exchanges if e.is_data)
        said = LOOK(replace(dialogue, exchanges=kept))
        if said.name != "submit_grade":
            return said
        return GraderCall(said.name, change(dict(said.arguments), dialogue))

    return AgenticGrader(ScriptedMind(script))


def failing_id(dialogue: Dialogue) -> str:
    lines = dialogue.exchanges[0].output.splitlines()
    return next(line.split()[0] for line in lines if " fail:" in line)


def rank_a_failure(said: dict, dialogue: Dialogue) -> dict:
    forged = {"id": failing_id(dialogue), **dict.fromkeys(CRITERIA, 5)}
    return {**said, "grades": [forged, *said["grades"]]}


def leave_one_out(said: dict, dialogue: Dialogue) -> dict:
    return {"grades": said["grades"][1:], "flags": []}


def forge_the_order(said: dict, dialogue: Dialogue) -> dict:
    first = said["grades"][0]["id"]
    return {**said, "order": [[first]] * len(said["grades"])}


class DeadMind(ScriptedMind):
    """Raises whatever it is asked."""

    def __init__(self) -> None:
        super().__init__(self.die)

    def die(self, dialogue: Dialogue) -> GraderCall:
        raise ConnectionError("nobody there")


class SlowMind(ScriptedMind):
    """Has all the time in the world, and lets others work meanwhile."""

    def __init__(self) -> None:
        super().__init__(LOOK)

    async def reply(self, dialogue: Dialogue) -> MindReply:
        await asyncio.sleep(600)
        return await super().reply(dialogue)


class BabblingMind(ScriptedMind):
    """Replies with what is no call, or with no reply at all."""

    def __init__(self) -> None:
        super().__init__(LOOK)

    async def reply(self, dialogue: Dialogue) -> object:
        return {"tier": "T1", "order": 0}


class ForgingGrader:
    """A grader of another make, which grades a failing candidate as the best."""

    async def grade(self, task, candidates, seed):
        best = CandidateGrade((5, 5, 5, 5, 5), Tier.T1, 0)
        return GroupGrade({c.id: best for c in candidates})


class BadlyRaisingGrader:
    """Says that its grade is unusable, and why in words of its own."""

    async def grade(self, task, candidates, seed):
        raise UnusableGrade("out_of_paper")


QUICK = GradingLimits(reply_s=0.2, total_s=0.2)
BROKEN = {
    "dead": (lambda: AgenticGrader(DeadMind()), "crash"),
    "slow": (lambda: AgenticGrader(SlowMind(), limits=QUICK), "timeout"),
    "slower than its caller": (lambda: AgenticGrader(SlowMind()), "timeout"),
    "ranks a failure": (lambda: that_submits(rank_a_failure), "failing_id"),
    "leaves one out": (lambda: that_submits(leave_one_out), "missing_id"),
    "forges the order": (lambda: that_submits(forge_the_order), "bad_order"),
    "babbles": (lambda: AgenticGrader(BabblingMind()), "malformed_call"),
    "forges a grade": (ForgingGrader, "failing_id"),
    "gives up": (BadlyRaisingGrader, "out_of_paper"),
}
"""Name -> (a grader, the reason that is counted)."""


# --- the claims -------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The run of plain GRPO, which no grader is part of."""
    overrides = {"credit.rule": "binary", "grader.name": "none"}
    config = with_overrides(CONFIG, overrides)
    return train_with(None, tmp_path_factory.mktemp("plain") / "run", config)


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """The run of a grader that does its work."""
    grader = AgenticGrader(ScriptedMind(LOOK))
    return train_with(grader, tmp_path_factory.mktemp("sound") / "run")


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_grader_trains_plain_grpo_and_is_counted(kind, plain, tmp_path):
    make, reason = BROKEN[kind]
    config = IMPATIENT if kind == "slower than its caller" else CONFIG
    run = train_with(make(), tmp_path / "run", config)
    # a grader of another make is asked about groups of one tree, too
    num_asked = 4 if kind in ("forges a grade", "gives up") else NUM_RANKABLE
    for line in read_metrics(run):
        assert line[f"grader/fallback/{reason}"] == num_asked
        assert line["grader/fallback_rate"] == 1.0
        assert line["groups/graded"] == 0
        assert line["groups/rankable"] == NUM_RANKABLE
        assert line["grader/not_rankable"] == 4 - num_asked
    for step in range(2):
        rows, plain_rows = read_rollouts(run, step), read_rollouts(plain, step)
        for row, plain_row in zip(rows, plain_rows, strict=True):
            after = row["credit"]["advantages_after"]
            assert after == plain_row["credit"]["advantages_after"]
            assert after == row["credit"]["advantages_before"]
    assert weights(run) == weights(plain)


def test_a_sound_grader_moves_credit_where_there_is_something_to_rank(sound, plain):
    for line in read_metrics(sound):
        assert line["groups/gradable"] == 4
        assert line["groups/graded"] == line["groups/rankable"] == NUM_RANKABLE
        assert (line["grader/fallback_rate"], line["grader/not_rankable"]) == (0, 1)
    *ranked, one_tree = read_rollouts(sound, 0)
    assert one_tree["grade"] is None and one_tree["fallback_reason"] == ""
    assert all(row["grade"] is not None for row in ranked)
    assert weights(sound) != weights(plain)


def test_the_rubric_ranks_equal_trees_by_waste_so_it_is_always_asked(tmp_path):
    line, _ = read_metrics(train_with(RubricGrader(), tmp_path / "run"))
    assert (line["groups/graded"], line["grader/not_rankable"]) == (4, 0)


def test_some_groups_broken_leave_the_others_graded(sound, tmp_path):
    """Every second grading dies: the rest has the grades of the sound run."""
    turns = []

    def script(dialogue: Dialogue) -> GraderCall:
        if not dialogue.exchanges:
            turns.append(dialogue.seed)
        if turns.index(dialogue.seed) % 2:
            raise OSError("out of luck")
        return LOOK(dialogue)

    run = train_with(AgenticGrader(ScriptedMind(script)), tmp_path / "run")
    first, second = read_metrics(run)
    assert [first["groups/graded"], second["groups/graded"]] == [2, 1]
    for row, expected in zip(
        read_rollouts(run, 0), read_rollouts(sound, 0), strict=True
    ):
        if row["grade"] is not None:
            assert row["grade"] == expected["grade"]
            assert row["credit"] == expected["credit"]


def test_a_grader_that_blocks_its_thread_blocks_nobody_else(plain, tmp_path):
    released = threading.Event()

    def block(dialogue: Dialogue) -> GraderCall:
        released.wait(60)  # no `await`: no deadline can reach it
        return LOOK(dialogue)

    started = time.monotonic()
    try:
        grader = AgenticGrader(ScriptedMind(block))
        run = train_with(grader, tmp_path / "run", IMPATIENT)
    finally:
        released.set()
    assert time.monotonic() - started < 30
    for line in read_metrics(run):
        assert line["grader/fallback/timeout"] == NUM_RANKABLE
    assert weights(run) == weights(plain)


def test_grading_one_group_overlaps_the_rollouts_of_others():
    """The first group's grading waits for the last group's rollout, which waits for
    the grading to begin: in any other order this would never end."""
    has_begun, is_sampled = threading.Event(), threading.Event()

    async def wait_for(event: threading.Event) -> None:
        assert await asyncio.to_thread(event.wait, 30)

    async def sample(task: Task, group_id: str, seed: int) -> RolloutGroup:
        if group_id.endswith("2"):
            await wait_for(has_begun)
            is_sampled.set()
        return make_group(group_id)

    class Waiting(ScriptedMind):
        async def reply(self, dialogue: Dialogue) -> MindReply:
            has_begun.set()
            await wait_for(is_sampled)
            return await super().reply(dialogue)

    async def collected(grader: Grader):
        sampler = TaskSampler((TASK,), seed=0)
        return await collect(
            CONFIG,
            0,
            surplus=[],
            sampler=sampler,
            sample_group=sample,
            grader=grader,
        )

    with BackgroundGrader(AgenticGrader(Waiting(LOOK))) as grader:
        chosen, _, collection = asyncio.run(collected(grader))
    assert sum(group.grade is not None for group in chosen) == NUM_RANKABLE
    first_grading = min(begin for begin, _ in collection.grade_spans)
    last_rollout = max(end for _, end in collection.sample_spans)
    assert first_grading < last_rollout


# --- what is written down ---------------------------------------------------------


def test_each_grading_is_recorded_in_plain_text(sound):
    rows = read_gradings(sound, 0)
    assert len(rows) == NUM_RANKABLE
    groups = {row["id"] for row in read_rollouts(sound, 0)}
    for row in rows:
        assert {id_.rpartition("/")[0] for id_ in row["shown"]} < groups
        assert row["exchanges"][0]["call"] == "list_candidates {}"
        assert row["submitted"].startswith("submit_grade {")
    (sound / "gradings" / "step_00000.jsonl").read_bytes().decode("ascii")


def test_what_a_mind_writes_is_escaped_and_cut():
    attack = "\x1b[2J\u202e" + "x" * 10_000

    def script(dialogue: Dialogue) -> GraderCall:
        return GraderCall("diff", {"id": attack, "path": {attack}})

    grader = AgenticGrader(ScriptedMind(script), limits=GradingLimits(max_turns=3))
    with pytest.raises(UnusableGrade):
        asyncio.run(grader.grade(TASK, GROUP, 0))
    row = grading_row(grader.records[-1])
    assert row["exchanges"][0]["call"] == "diff that are no JSON"
    said = replace(grader.records[-1], submitted=GraderCall("submit_grade", {"a": "x"}))
    assert grading_row(said)["submitted"] == 'submit_grade {"a": "x"}'
    long = replace(said, submitted=GraderCall(attack, {}))
    text = grading_row(long)["submitted"]
    assert len(text) < 5_000 and text.isascii() and "\x1b" not in text


def test_a_resumed_run_writes_its_gradings_again(sound, tmp_path):
    path = tmp_path / "run"
    train_with(AgenticGrader(ScriptedMind(LOOK)), path, replace(CONFIG, steps=1))
    with open_run(path, CONFIG, resume=True) as run:
        run.begin_session(0)
    assert list((path / "gradings").iterdir()) == []


def test_tokens_and_retries_are_summed_over_the_step(tmp_path):
    class Counting(ScriptedMind):
        async def reply(self, dialogue: Dialogue) -> MindReply:
            kept = tuple(e for e in dialogue.exchanges if e.is_data)
            call = LOOK(replace(dialogue, exchanges=kept))
            is_first = len(kept) == len(dialogue.exchanges)
            if call.name == "submit_grade" and is_first:
                call = None
            return MindReply(call, num_tokens=10)

    run = train_with(AgenticGrader(Counting(LOOK)), tmp_path / "run")
    # the list, two looks at each of three trees, a slip, the verdict
    for line in read_metrics(run):
        assert line["grader/tokens"] == NUM_RANKABLE * 10 * (1 + 2 * 3 + 1 + 1)
        assert line["grader/retries"] == NUM_RANKABLE
        assert line["grader/fallback_rate"] == 0


# --- what it costs ----------------------------------------------------------------


def burn(seconds: float) -> None:
    """Use the processor, for this long of this thread's own time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class BusyGrader:
    """Burns .02 s in its loop, .04 s in a worker and .02 s in a task of its own."""

    async def grade(self, task, candidates, seed):
        async def part() -> None:
            burn(0.02)

        burn(0.02)
        await asyncio.gather(part(), asyncio.to_thread(burn, 0.04), asyncio.sleep(0.05))
        raise UnusableGrade("busy")


def test_processor_time_is_the_graders_own_wherever_it_ran():
    async def grade_and_work(grader: Grader) -> None:
        gradings = [grader.grade(TASK, GROUP, seed) for seed in range(2)]
        burn(0.1)  # of the trainer
        await asyncio.gather(*gradings, return_exceptions=True)

    before = tree_cpu_s()
    with BackgroundGrader(BusyGrader()) as grader:
        asyncio.run(grade_and_work(grader))
        cpu_s = take_costs(grader).cpu_s
        assert_close(cpu_s, 2 * 0.08, atol=0.03, rtol=0)
        assert take_costs(grader).cpu_s == 0.0
    assert tree_cpu_s() - before > 0.1 + cpu_s - 0.05


def test_the_share_of_the_grader_is_a_metric(tmp_path):
    line, _ = read_metrics(train_with(BusyGrader(), tmp_path / "run"))
    assert_close(line["time/grade_cpu_s"], 4 * 0.08, atol=0.05, rtol=0)
    share = line["time/grade_cpu_s"] / line["time/cpu_s"]
    assert_close(line["time/grade_cpu_share"], share)
    assert 0 < line["time/grade_cpu_share"] < 1
    assert line["time/grade_wait_s"] <= line["time/grade_wall_s"]
    assert line["time/grade_wall_s"] <= line["time/grade_s"]


def test_overlapping_spans_count_once():
    assert covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)]) == 3.0 + 1.0
    assert covered_s([]) == 0.0


def test_the_figure_shows_why_groups_went_ungraded(plain, sound, tmp_path):
    dead = train_with(AgenticGrader(DeadMind()), tmp_path / "dead")
    runs = read_runs([plain, sound, dead])
    counts = {"graded": 2 * NUM_RANKABLE, "nothing to rank": 2}
    assert count_gradings(runs[1:2]) == counts
    ax = plot_gradings(runs, Figure().subplots())
    labels = {text.get_text() for text in ax.get_legend().get_texts()}
    assert labels == {"graded: 6", "nothing to rank: 4", "crash: 6"}
    shares = plot_grader_share(runs, Figure().subplots())
    assert shares.lines and shares.get_ylabel() == "share of the step's processor time"
    assert save_grading(runs, tmp_path / "grading.png")
    assert not save_grading(runs[:1], tmp_path / "none.png")


# --- the command line's graders ---------------------------------------------------


def test_a_missing_checkpoint_is_one_sentence():
    config = replace(CONFIG.grader, name="agentic", model="data/grader/nowhere")
    with pytest.raises(OSError, match="'grader/nowhere' is in none of"):
        make_grader(config)
    with pytest.raises(ValueError, match="no policy in"):
        make_grader(replace(config, model="nowhere"))


def test_only_graders_with_tools_run_commands(sandbox):
    with pytest.raises(ValueError, match=r"grader\.run_tool is for graders with"):
        with_overrides(CONFIG, {"grader.run_tool": True})
    pytest.importorskip("openai")
    settings = {"name": "llm", "endpoint_model": "m", "run_tool": True}
    config = replace(CONFIG.grader, **settings)
    with pytest.raises(ValueError, match="needs a sandbox"):
        make_grader(config)
    dealer = make_grader(replace(config, name="random", reference="llm"), sandbox)
    assert isinstance(dealer, RandomGrader)
    assert dealer.reference._sandbox is sandbox
    assert make_grader(replace(config, run_tool=False), sandbox)._sandbox is None


def test_a_grader_runs_programs_in_the_sandbox_of_the_run(sandbox):
    """It looks, runs the check on a candidate, and cites what it saw."""
    shown = []

    def script(dialogue: Dialogue) -> GraderCall:
        ran = [e for e in dialogue.exchanges if e.call.name == "run"]
        kept = tuple(e for e in dialogue.exchanges if e.call.name != "run")
        said = LOOK(replace(dialogue, exchanges=kept))
        if said.name == "submit_grade" and not ran:
            first = said.arguments["grades"][0]["id"]
            return GraderCall("run", {"id": first, "command": "python check.py"})
        shown.extend(e.output for e in ran)
        return said

    grader = AgenticGrader(ScriptedMind(script), sandbox=sandbox)
    with BackgroundGrader(grader) as background:
        asyncio.run(background.grade(TASK, GROUP, 0))
    assert shown == ["run 1: status 0\nok\n"]


# --- end to end -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dead", "slow", "ranks a failure", "babbles"])
def test_the_tiny_preset_trains_on_with_a_broken_grader(kind, sandbox, tmp_path):
    settings = {"sampling.tasks_per_round": 4, "sampling.groups_per_step": 3}
    config = with_overrides(CONFIG, settings)
    binary = {"credit.rule": "binary", "grader.name": "none"}
    plain = tiny_run(with_overrides(config, binary), None, tmp_path / "plain")
    make, reason = BROKEN[kind]
    run = tiny_run(config, make(), tmp_path / "run")
    lines = read_metrics(run)
    for line in lines:
        assert line["groups/graded"] == 0
        num_asked = line["groups/rankable"]
        assert line.get(f"grader/fallback/{reason}", 0) == num_asked
        assert line["grader/not_rankable"] == line["groups/gradable"] - num_asked
    assert sum(line["groups/rankable"] for line in lines) > 0
    assert weights(run) == weights(plain)


def tiny_run(config: RunConfig, grader: Grader | None, path: Path) -> Path:
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(open_state(config, path))
        if grader is not None:
            grader = stack.enter_context(BackgroundGrader(grader))
        state = replace(state, grader=grader)
        asyncio.run(run_to_the_end(state, Stopper(), progress=False))
    return path
