"""Members of ladders: trees that are the gold one, clean or spoiled, or wrong."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gagar_mini.grader.clean_ways import CLEAN_WAYS
from gagar_mini.grader.ladders import DEGRADATIONS, TRAINED_KINDS, spoil
from gagar_mini.grader.measures import is_clean, measure_tree
from gagar_mini.grader.rubric import score_measures, tier_of
from gagar_mini.grader.sites import gold_files
from gagar_mini.types import Files, Task, Tier


@dataclass(frozen=True)
class Member:
    """A tree of a ladder, before anybody verified it."""

    files: Files
    kinds: tuple[str, ...]
    way: str


def draw_member(
    rng: random.Random,
    task: Task,
    kinds: Sequence[str],
    way: str,
    *,
    seed: float | None = None,
) -> Member | None:
    """The gold tree, or a clean way to it, with `kinds` applied. None where something
    does not fit. Members of one `seed` have the same wording of a kind."""
    files = gold_files(task)
    for name in way.split("+") if way != "gold" else ():
        changed = CLEAN_WAYS[name](rng, task, files)
        if changed is None:
            return None
        files = changed
    seeds = {k: rng.random() if seed is None else f"{seed}/{k}" for k in kinds}
    rngs = {kind: random.Random(seeds[kind]) for kind in kinds}
    spoiled = spoil(task, files, kinds, rngs)
    ordered = tuple(kind for kind in DEGRADATIONS if kind in kinds)
    return spoiled and Member(spoiled, ordered, way)


def draw_way(rng: random.Random) -> str:
    """The gold tree, or one or two clean ways."""
    how_many = rng.choice((0, 0, 1, 1, 1, 2))
    return "+".join(rng.sample(list(CLEAN_WAYS), how_many)) or "gold"


def draw_ladder(rng: random.Random, task: Task, size: int) -> Iterator[Member]:
    """Members for training, without end in sight: the gold tree and clean ways, single
    kinds, pairs and triples, none of a held-out kind."""
    yield Member(gold_files(task), (), "gold")
    for number in range(10 * size):
        how_many = (0, 1, 1, 0, 2, 2, 3)[number % 7]
        kinds = rng.sample(TRAINED_KINDS, how_many)
        member = draw_member(rng, task, kinds, draw_way(rng))
        if member is not None:
            yield member


def draw_failing(rng: random.Random, task: Task) -> Iterator[Member]:
    """Trees with a wrong line where the gold one belongs, or with one bug left."""
    gold = gold_files(task)
    bugs = json.loads(task.metadata["bugs"])
    seen = set()
    for _ in range(6):
        bug = rng.choice(bugs)
        wrong = [*bug["wrong"], *([bug["buggy"]] if len(bugs) > 1 else [])]
        text = gold[bug["path"]].decode()
        if wrong and text.count(bug["gold"]) == 1:
            text = text.replace(bug["gold"], rng.choice(wrong))
            if text in seen:
                continue
            seen.add(text)
            yield Member({**gold, bug["path"]: text.encode()}, (), "wrong")


def shows_its_kinds(task: Task, member: Member) -> bool:
    """Whether a clean member is clean and T1, and each kind shows where it should."""
    if member.way == "wrong":
        return True
    measures = measure_tree(task, member.files)
    if not member.kinds:
        scores, flags = score_measures(measures)
        return is_clean(measures) and tier_of(scores, flags) is Tier.T1
    return all(DEGRADATIONS[kind].is_seen(measures) for kind in member.kinds)
