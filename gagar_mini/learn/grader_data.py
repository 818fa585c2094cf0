"""Pools of candidates for training and testing graders, verified and written down.

A pool holds candidates of one task: members of degradation ladders, whose patches are
made and then verified like any other, and rollouts of a policy. Ladder members get
turns that could have led to them. Which calls were wasted there is drawn apart from the
patch, so that the process says nothing about the tree.
"""

import asyncio
import contextlib
import functools
import hashlib
import itertools
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from gagar_mini.agent.dialect import CompactDialect
from gagar_mini.agent.rollouts import Harness, evaluate
from gagar_mini.config import PRESETS
from gagar_mini.grader.known import KnownGroup, known_by_oracle
from gagar_mini.grader.ladders import (
    HELD_OUT_KINDS,
    TRAINED_KINDS,
    UNCOUNTED_KINDS,
    known_by_kinds,
)
from gagar_mini.learn.ladder_groups import (
    Balance,
    Rung,
    choose_rungs,
    draw_rungs,
)
from gagar_mini.learn.ladder_members import (
    Member,
    draw_failing,
    draw_ladder,
    draw_member,
    draw_way,
    shows_its_kinds,
)
from gagar_mini.learn.ladder_turns import NUM_SLIPS, CheckedWorkspace, draw_turns
from gagar_mini.learn.pools import Pool, PoolCandidate, load_pools, write_pools
from gagar_mini.model.policy import load_policy
from gagar_mini.model.torch_engine import TorchEngine
from gagar_mini.paths import find_data
from gagar_mini.types import Candidate, RolloutGroup, Status, Task, seed_for
from gagar_mini.world.patches import make_patch, tree_hash
from gagar_mini.world.sandbox import Sandbox, open_sandbox
from gagar_mini.world.tasks import find_task, load_tasks
from gagar_mini.world.verifier import verify

__all__ = ["Pool", "PoolCandidate", "load_pools", "write_pools"]

ROLLOUT_SEED = 5
"""Added to the seed where rollouts are sampled."""


def known_groups(name: str) -> list[KnownGroup]:
    """The groups of a data file made for tests, with what is known of their order: of
    ladders by construction, of rollouts by the oracle. Blocking."""
    groups = []
    for pool in load_pools(name):
        task, members = pool.task, pool.candidates
        candidates = [member.candidate for member in members]
        if all(member.source == "ladder" for member in members):
            kinds = {m.candidate.id: m.kinds for m in members}
            groups.append(known_by_kinds(task.id, task, candidates, kinds))
        else:
            groups.append(known_by_oracle(task.id, task, candidates))
    return groups


def build_ladder_pool(
    task: Task, sandbox: Sandbox, *, seed: int, num_passing: int, num_failing: int
) -> list[PoolCandidate]:
    """Verified ladder members with distinct trees, as many as asked for if so many fit;
    passing ones first."""
    rng = random.Random(seed_for(seed, "ladder", task.id))
    members: list[PoolCandidate] = []
    trees = {tree_hash(task.files)}
    wanted = {
        Status.PASS: (draw_ladder(rng, task, num_passing), num_passing),
        Status.FAIL: (draw_failing(rng, task), num_failing),
    }
    checked = CheckedWorkspace(task, sandbox)
    for status, (drawn, how_many) in wanted.items():
        kept = 0
        while kept < how_many and (member := next(drawn, None)):
            tree = tree_hash(member.files)
            if tree in trees:
                continue
            trees.add(tree)
            made = make_candidate(
                rng,
                task,
                member,
                sandbox=sandbox,
                checked=checked,
                id_=f"ladder/{len(members)}",
                seed=seed,
            )
            if is_(made, status):
                members.append(made)
                kept += 1
    return members


def make_candidate(
    rng: random.Random,
    task: Task,
    member: Member,
    *,
    sandbox: Sandbox,
    checked: CheckedWorkspace,
    id_: str,
    seed: int,
) -> PoolCandidate | None:
    """The verified member with turns. None where a kind does not show."""
    if not shows_its_kinds(task, member):
        return None
    patch = make_patch(task.files, member.files)
    outcome = verify(task, patch, sandbox, seed=seed_for(seed, "hidden", task.id))
    turns = draw_turns(rng, task, member.files, rng.choice(NUM_SLIPS), checked)
    candidate = Candidate(id_, patch, outcome, turns)
    return PoolCandidate(candidate, member.kinds, "ladder", member.way)


def rollout_candidates(group: RolloutGroup) -> list[PoolCandidate]:
    """The members of a sampled group whose harness did not fail."""
    return [
        PoolCandidate(
            Candidate(f"rollout/{number}", c.patch, c.outcome, c.turns), (), "rollout"
        )
        for number, c in enumerate(group.candidates)
        if c.outcome.status is not Status.INFRA
    ]


def build_uncounted_pool(
    task: Task, sandbox: Sandbox, *, seed: int, num_passing: int = 7
) -> list[PoolCandidate]:
    """Verified members with a degradation that no count shows, now and then with one
    that does."""
    rng = random.Random(seed_for(seed, "uncounted", task.id))
    trees, members = {tree_hash(task.files)}, []
    checked = CheckedWorkspace(task, sandbox)
    for number in range(16):
        kinds = [UNCOUNTED_KINDS[number % 2]]  # the last kind is never trained
        if number % 4 == 3:
            kinds.append(rng.choice(TRAINED_KINDS))
        member = draw_member(rng, task, kinds, draw_way(rng))
        if member is None or tree_hash(member.files) in trees:
            continue
        trees.add(tree_hash(member.files))
        made = make_candidate(
            rng,
            task,
            member,
            sandbox=sandbox,
            checked=checked,
            id_=f"uncounted/{len(members)}",
            seed=seed,
        )
        if is_(made, Status.PASS):
            members.append(made)
        if len(members) == num_passing:
            break
    return members


def build_many(
    build: Callable[[Task, Sandbox], list[PoolCandidate]],
    tasks: Sequence[Task],
    *,
    processes: int,
) -> dict[str, list[PoolCandidate]]:
    """Task id -> what `build` makes of the task, the same for any number of
    processes."""
    ids = [task.id for task in tasks]
    parts = [ids[i : i + 5] for i in range(0, len(ids), 5)]
    built = {}
    with (
        ProcessPoolExecutor(processes) as pool,
        tqdm(total=len(ids), desc="ladders", unit="task") as progress,
    ):
        for part in pool.map(functools.partial(build_some, build), parts):
            built |= part
            progress.update(len(part))
    return built


def build_some(
    build: Callable[[Task, Sandbox], list[PoolCandidate]], ids: Sequence[str]
) -> dict[str, list[PoolCandidate]]:
    """As `build_many`, in this process."""
    with contextlib.closing(open_sandbox("bubblewrap")) as sandbox:
        return {id_: build(find_task(id_), sandbox) for id_ in ids}


def sample_rollouts(
    tasks: Sequence[Task], *, seed: int, samples: int = 8
) -> dict[str, list[PoolCandidate]]:
    """Task id -> a whole group of rollouts of the shipped start policy."""
    policy, tokenizer = load_policy(find_data("policy/tiny"))
    with (
        contextlib.closing(open_sandbox("bubblewrap")) as sandbox,
        tqdm(total=len(tasks), desc="rollouts", unit="task") as progress,
    ):
        harness = Harness(TorchEngine(policy), CompactDialect(tokenizer), sandbox)
        groups = asyncio.run(
            evaluate(
                harness,
                tasks,
                PRESETS["tiny"]().rollout,
                samples_per_task=samples,
                seed=ROLLOUT_SEED + seed,
                on_group=lambda group: progress.update(),
            )
        )
    return {group.task.id: rollout_candidates(group) for group in groups}


def build_groups(
    tasks: Sequence[Task], kinds: Sequence[str], *, seed: int, num_groups: int = 120
) -> list[Pool]:
    """A balanced group of verified ladder members a task, with one or two failures;
    ids and places say nothing of what is what. Ends with the first group from
    `num_groups` on with which the balance by lines is even."""
    pools, owed = [], (0, 0)
    with contextlib.closing(open_sandbox("bubblewrap")) as sandbox:
        for task in tqdm(tasks, desc="ladders", unit="task"):
            rng = random.Random(seed_for(seed, "group", task.id))
            checked = CheckedWorkspace(task, sandbox)
            verified = functools.partial(
                make_candidate,
                rng,
                task,
                sandbox=sandbox,
                checked=checked,
                id_="",
                seed=seed,
            )
            failing = first_failing(
                draw_failing(rng, task), rng.choice((1, 1, 2)), verified
            )
            rungs = draw_rungs(rng, task, kinds, num_sets=10)
            passing, debt = choose_passing(rng, rungs, owed, verified)
            if passing and failing:
                members = [*passing, *failing]
                rng.shuffle(members)
                pools.append(
                    Pool(task, tuple(map(renamed, members, itertools.count())))
                )
                owed = debt
                if len(pools) >= num_groups and owed[0] == 0:
                    break
    return pools


def first_failing(
    drawn: Iterator[Member],
    how_many: int,
    verified: Callable[[Member], PoolCandidate | None],
) -> list[PoolCandidate]:
    made = map(verified, drawn)
    failing = (member for member in made if is_(member, Status.FAIL))
    return list(itertools.islice(failing, how_many))


def choose_passing(
    rng: random.Random,
    rungs: list[Rung],
    owed: Balance,
    verified: Callable[[Member], PoolCandidate | None],
) -> tuple[list[PoolCandidate], Balance]:
    """The passing members of a group and the balance with them; none where there is no
    such choice."""
    while True:
        chosen, debt = choose_rungs(rng, rungs, owed)
        members = [verified(rung.member) for rung in chosen]
        bad = {
            id(rung)
            for rung, made in zip(chosen, members, strict=True)
            if not is_(made, Status.PASS)
        }
        if not bad:
            return members, debt
        rungs = [rung for rung in rungs if id(rung) not in bad]


def is_(member: PoolCandidate | None, status: Status) -> bool:
    return member is not None and member.candidate.outcome.status is status


def renamed(member: PoolCandidate, number: int) -> PoolCandidate:
    return replace(member, candidate=replace(member.candidate, id=f"c{number}"))


def build_train(*, seed: int = 0, processes: int = 2) -> list[Pool]:
    """The training pools: ladders of 500 tasks of core and 200 of full, with rollouts
    for the first 300; every second ladder has members that no count shows as
    spoiled."""
    core, full = load_tasks("core", "train")[:500], load_tasks("full", "train")[:200]
    tasks = [*core, *full]
    ladder = functools.partial(
        build_ladder_pool, seed=seed, num_passing=25, num_failing=2
    )
    ladders = build_many(ladder, tasks, processes=processes)
    uncounted = build_many(
        functools.partial(build_uncounted_pool, seed=seed),
        [*core[::2], *full[::2]],
        processes=processes,
    )
    rollouts = sample_rollouts(core[:300], seed=seed)
    return [
        Pool(
            task,
            (
                *ladders[task.id],
                *uncounted.get(task.id, ()),
                *rollouts.get(task.id, ()),
            ),
        )
        for task in tasks
    ]


def build_ladders_eval(*, seed: int = 0) -> list[Pool]:
    """Functions and kinds that no grader was trained on."""
    return build_groups(alternating("eval_unseen"), HELD_OUT_KINDS, seed=seed)


def build_ladders_seen(*, seed: int = 0) -> list[Pool]:
    """Functions and kinds of the training, on other tasks."""
    return build_groups(alternating("eval"), TRAINED_KINDS, seed=seed)


def alternating(split: str) -> list[Task]:
    """The tasks of a split, core and full by turns."""
    pairs = zip(load_tasks("core", split), load_tasks("full", split), strict=True)
    return [task for pair in pairs for task in pair]


def build_rollouts_eval(*, seed: int = 0) -> list[Pool]:
    """The start policy on 256 held-out tasks."""
    tasks = load_tasks("core", "eval")
    rollouts = sample_rollouts(tasks, seed=seed)
    return [Pool(task, tuple(rollouts[task.id])) for task in tasks]


BUILDERS = {
    "train": build_train,
    "rollouts_eval": build_rollouts_eval,
    "ladders_eval": build_ladders_eval,
    "ladders_seen": build_ladders_seen,
}
"""Data file -> who builds it from a seed."""


def build_data(
    out: Path, names: Sequence[str] = tuple(BUILDERS), *, seed: int = 0
) -> dict[str, dict[str, object]]:
    """Write the data files into `out`, the same bytes for the same seed, and what they
    hold into its manifest; returns that. Other entries of the manifest stay."""
    path = out / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    for name in names:
        pools = BUILDERS[name](seed=seed)
        write_pools(out / f"{name}.jsonl.gz", pools)
        content = (out / f"{name}.jsonl.gz").read_bytes()
        manifest[name] = describe(pools) | {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    path.write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def describe(pools: Sequence[Pool]) -> dict[str, object]:
    """What the card says of a data file: counts, and lengths in changed lines."""
    members = [member for pool in pools for member in pool.candidates]
    passing = [m for m in members if is_(m, Status.PASS)]
    lengths = {
        "clean": [patch_length(m) for m in passing if m.way and not m.kinds],
        "spoiled": [patch_length(m) for m in passing if m.kinds],
        "rollout": [patch_length(m) for m in passing if m.source == "rollout"],
    }
    kinds = Counter(kind for member in passing for kind in member.kinds)
    ways = Counter(way for m in passing if m.way for way in m.way.split("+"))
    return {
        "pools": len(pools),
        "candidates": len(members),
        "ladder": sum(m.source == "ladder" for m in members),
        "rollout": sum(m.source == "rollout" for m in members),
        "passing": len(passing),
        "templates": len({name for pool in pools for name in templates_of(pool.task)}),
        "median_changed_lines": {
            what: statistics.median(found) for what, found in lengths.items() if found
        },
        "kinds": dict(sorted(kinds.items())),
        "ways": dict(sorted(ways.items())),
    }


def patch_length(member: PoolCandidate, *, chars: bool = False) -> int:
    """Lines that a patch adds and removes, or their characters without line breaks."""
    lines = [
        line[1:]
        for line in member.candidate.patch.splitlines()
        if line[:1] in (b"+", b"-") and line[:3] not in (b"+++", b"---")
    ]
    return sum(map(len, lines)) if chars else len(lines)


def templates_of(task: Task) -> set[str]:
    """The function templates whose repair a task asks for."""
    return {bug["template"] for bug in json.loads(task.metadata["bugs"])}
