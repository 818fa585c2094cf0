"""Degradation ladders, clean ways, and the candidates of known quality that ship."""

import gzip
import itertools
import json
import random
import re
from collections import Counter

import pytest

from gagar_mini.grader.clean_ways import CLEAN_WAYS
from gagar_mini.grader.known import is_rankable
from gagar_mini.grader.ladders import (
    DEGRADATIONS,
    HELD_OUT_KINDS,
    SCOPE_KINDS,
    T3_KINDS,
    TRAINED_KINDS,
    UNCOUNTED_KINDS,
    is_worse,
    known_by_kinds,
    spoil,
)
from gagar_mini.grader.measures import is_clean, measure, measure_process, measure_tree
from gagar_mini.grader.rubric import score_measures, tier_of
from gagar_mini.grader.sites import gold_files
from gagar_mini.learn.grader_data import (
    build_ladder_pool,
    known_groups,
    load_pools,
    patch_length,
    templates_of,
)
from gagar_mini.learn.ladder_groups import sign
from gagar_mini.learn.ladder_turns import add_slip, direct_calls
from gagar_mini.learn.pools import Pool, Replay, decode_pool, encode_pool
from gagar_mini.paths import find_data
from gagar_mini.types import Candidate, Outcome, Status, Tier
from gagar_mini.world.patches import make_patch
from gagar_mini.world.tasks import load_tasks
from gagar_mini.world.verifier import verify

TASKS = [*load_tasks("core", "train")[600:606], *load_tasks("full", "train")[600:606]]
LADDERS = ("ladders_eval", "ladders_seen")


def applied(name):
    """(task, tree) where the degradation or the clean way fits, for some tasks."""
    change = CLEAN_WAYS[name] if name in CLEAN_WAYS else DEGRADATIONS[name].spoil
    for task in (*TASKS, *load_tasks("full", "train")[50:100]):
        files = change(random.Random(f"{name} {task.id}"), task, gold_files(task))
        if files is not None:
            yield task, files


def passes(task, files, sandbox):
    patch = make_patch(task.files, files)
    return verify(task, patch, sandbox, seed=1).status is Status.PASS


@pytest.mark.parametrize("kind", DEGRADATIONS)
def test_a_degradation_passes_and_shows_where_it_should(kind, sandbox):
    degradation = DEGRADATIONS[kind]
    fitting = (
        (task, files)
        for task, files in applied(kind)
        if degradation.is_seen(measure_tree(task, files))
    )
    for task, files in itertools.islice(fitting, 2):
        # a detour may leave the type or the result as it was, or not
        assert kind == "roundabout" or passes(task, files, sandbox), task.id
        measures = measure_tree(task, files)
        scores, flags = score_measures(measures)
        assert bool(flags) == (kind not in UNCOUNTED_KINDS)
        assert is_clean(measures) or kind not in T3_KINDS
        is_t3 = tier_of(scores, flags) is Tier.T3
        assert is_t3 == (kind in T3_KINDS) or kind in SCOPE_KINDS


@pytest.mark.parametrize("way", CLEAN_WAYS)
def test_a_clean_way_is_clean(way, sandbox):
    task, files = next(applied(way))
    assert files != gold_files(task) and passes(task, files, sandbox), task.id
    measures = measure_tree(task, files)
    assert is_clean(measures)
    assert score_measures(measures) == ((5, 5, 5, 5, 5), ())


def test_a_print_can_be_joined_to_the_repaired_line():
    task = next(t for t in TASKS if b"+    return" in t.gold_patch)
    gold = gold_files(task)
    for seed in range(8):
        joined = spoil(
            task, gold, ["joined_print"], {"joined_print": random.Random(seed)}
        )
        patch = make_patch(task.files, joined)
        assert (
            measure(task, patch).changed_lines
            == measure(task, task.gold_patch).changed_lines
        )
        assert b"print" in patch


def test_what_is_worse_follows_from_the_sets():
    assert is_worse(("comment",), ())
    assert is_worse(("comment", "todo"), ("todo",))
    assert not is_worse(("comment",), ("todo",)) and not is_worse((), ())
    assert is_worse(("rewrite",), ("comment", "todo"))  # T3 and no T3
    assert not is_worse(("rewrite",), ("special_case",))
    assert not is_worse(("rewrite",), ("scratch_file", "notes_file"))  # may be T3, too


def test_known_order_of_a_small_group():
    task = TASKS[0]
    kinds = {"a": (), "b": (), "c": ("todo",), "d": ("comment", "todo"), "e": ()}
    statuses = dict.fromkeys("abcd", Status.PASS) | {"e": Status.FAIL}
    members = [Candidate(name, b"", Outcome(statuses[name])) for name in kinds]
    group = known_by_kinds("g", task, members, kinds)
    better = {("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("c", "d")}
    assert set(group.better) == better and group.equal == (("a", "b"),)
    assert group.tiers == {"a": Tier.T1, "b": Tier.T1}


def test_turns_lead_to_the_tree_whatever_was_wasted():
    for number, task in enumerate(TASKS):
        rng = random.Random(number)
        kinds = rng.sample(("comment", "debug_print", "dead_helper", "notes_file"), 2)
        rngs = {kind: random.Random(number) for kind in kinds}
        files = spoil(task, gold_files(task), kinds, rngs)
        calls = [c for c in direct_calls(rng, task, files) if c.name != "run_check"]
        assert measure_process(list(Replay(task).play(calls))).num_wasted == 0
        for _ in range(number % 4):
            add_slip(rng, task, calls)
        replay = Replay(task)
        turns = list(replay.play(calls))
        assert replay.workspace.files == files
        assert measure_process(turns).num_wasted >= number % 4


def test_a_pool_is_built_and_read_back_alike(sandbox):
    task = TASKS[1]
    pool, again = (
        Pool(
            task,
            tuple(
                build_ladder_pool(task, sandbox, seed=3, num_passing=5, num_failing=1)
            ),
        )
        for _ in range(2)
    )
    record = encode_pool(pool)
    assert record == encode_pool(again)
    read = decode_pool(json.loads(json.dumps(record)))
    assert encode_pool(read) == record
    for old, new in zip(pool.candidates, read.candidates, strict=True):
        assert old.candidate.turns == new.candidate.turns
        assert old.candidate.outcome.tree_hash == new.candidate.outcome.tree_hash
    statuses = Counter(m.candidate.outcome.status for m in pool.candidates)
    assert statuses == {Status.PASS: 5, Status.FAIL: 1}


@pytest.mark.parametrize("name", LADDERS)
def test_length_tells_nothing_in_the_shipped_ladders(name):
    lines, chars = [], []
    for pool, group in zip(load_pools(name), known_groups(name), strict=True):
        found = {m.candidate.id: patch_length(m) for m in pool.candidates}
        lines += [sign(found[b] - found[a]) for a, b in group.better]
        found = {m.candidate.id: patch_length(m, chars=True) for m in pool.candidates}
        chars += [sign(found[b] - found[a]) for a, b in group.better]
    assert sum(lines) == 0  # the shorter patch is the better one in half of the pairs
    assert sum(map(abs, lines)) > 0.6 * len(lines) > 100
    card = find_data("grader/README.md").read_text()
    share = 0.5 + sum(chars) / (2 * len(chars))
    share_text = f"{100 * share:.0f} % of (the pairs of )?`{name}`"
    assert re.search(share_text, card), share_text


@pytest.mark.parametrize("name", LADDERS)
def test_the_known_order_never_contradicts_the_tiers_of_the_rubric(name):
    for group in known_groups(name)[::8]:
        tiers = {
            c.id: tier_of(*score_measures(measure(group.task, c.patch)))
            for c in group.candidates
        }
        assert all(tiers[a] <= tiers[b] for a, b in group.better), group.id
        assert all(tiers[id_] is tier for id_, tier in group.tiers.items()), group.id


@pytest.mark.parametrize("name", LADDERS)
def test_shipped_ladders_are_groups_that_can_be_ranked(name):
    pools = load_pools(name)
    assert len(pools) >= 120
    kinds = HELD_OUT_KINDS if name == "ladders_eval" else TRAINED_KINDS
    for pool in pools:
        candidates = [member.candidate for member in pool.candidates]
        assert 4 <= len(candidates) <= 8 and is_rankable(candidates)
        passing = [m for m in pool.candidates if m.way != "wrong"]
        assert all(m.candidate.outcome.status is Status.PASS for m in passing)
        assert {k for m in pool.candidates for k in m.kinds} <= {*kinds}
        assert 0 < sum(not m.kinds for m in passing) < len(passing)


def test_nothing_of_the_training_is_in_the_unseen_ladders():
    lines = [json.loads(line) for line in read_lines("train")]
    seen = {
        template
        for task in load_tasks("core", "train") + load_tasks("full", "train")
        for template in templates_of(task)
    }
    unseen = {t for pool in load_pools("ladders_eval") for t in templates_of(pool.task)}
    assert unseen and not seen & unseen
    used = {kind for pool in lines for c in pool["candidates"] for kind in c["kinds"]}
    assert used == {*TRAINED_KINDS, *UNCOUNTED_KINDS[:2]}
    trained = {pool["task"] for pool in lines}
    for name in ("rollouts_eval", *LADDERS):
        assert not trained & {json.loads(line)["task"] for line in read_lines(name)}


def read_lines(name):
    return gzip.decompress(find_data(f"grader/{name}.jsonl.gz").read_bytes()).split(
        b"\n"
    )[:-1]


def test_training_pools_hold_what_the_card_says():
    manifest = json.loads(find_data("grader/manifest.json").read_text())
    pools = load_pools("train", every=20)
    assert len(read_lines("train")) == manifest["train"]["pools"]
    for pool in pools:
        ladder = [m for m in pool.candidates if m.source == "ladder"]
        trees = {m.candidate.outcome.tree_hash for m in ladder}
        assert len(trees) == len(ladder)
        sampled = [m for m in pool.candidates if m.source == "rollout"]
        assert len(sampled) in (0, 8) and (not sampled or pool.task.family == "core")
    text = find_data("grader/README.md").read_text()
    for name, facts in manifest.items():
        assert f"| {name} | {facts['pools']} | {facts['candidates']} |" in text
