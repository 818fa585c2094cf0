"""Evaluation of graders: figures by hand, what bias does to them, and the baselines."""

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from grader_world import (
    BASE,
    FIXED_RANGES,
    GOLD,
    NOISY,
    NOTES,
    TASK,
    after,
    call,
    candidate,
    commented,
    patch,
    printed,
)

from gagar_mini.cli import main
from gagar_mini.config import GraderConfig
from gagar_mini.evaluating_graders import (
    evaluate_graders,
    load_sets,
    make_graders,
    save_report,
    table,
)
from gagar_mini.grader.agentic import AgenticGrader, Dialogue
from gagar_mini.grader.baselines import (
    LintGrader,
    PointwiseGrader,
    count_complaints,
    fit_linear,
    lint_deltas,
)
from gagar_mini.grader.controls import OracleGrader, ShortestGrader
from gagar_mini.grader.evaluation import (
    FIGURES,
    JudgedGroup,
    View,
    accuracy,
    accuracy_by_degradation,
    accuracy_by_length,
    estimate,
    facts_of,
    figures,
    invalid_reasons,
    judge,
)
from gagar_mini.grader.known import KnownGroup, known_by_oracle
from gagar_mini.grader.minds import (
    ScriptedMind,
    look_then_judge,
    passing_ids,
    submission,
)
from gagar_mini.grader.rubric import RubricGrader, passing
from gagar_mini.grader.tools import GraderCall
from gagar_mini.metrics import kendall_tau_b
from gagar_mini.types import (
    CRITERIA,
    CandidateGrade,
    GroupGrade,
    Status,
    Tier,
    UnusableGrade,
)
from gagar_mini.world.patches import make_patch

FIVES = dict.fromkeys(CRITERIA, 5)
FAILING = candidate("failing", b"", status=Status.FAIL)
PATCHES = {
    "a": patch(),
    "b": patch(ranges__py=printed()),
    "c": patch(ranges__py=printed(), notes__md=NOTES),
    "d": patch(ranges__py=printed(), notes__md=NOTES * 2),
}
# a is better than b, b than c and d, which are equal
GROUP = KnownGroup(
    "four",
    TASK,
    (*(candidate(id_, made) for id_, made in PATCHES.items()), FAILING),
    better=(("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("b", "d")),
    equal=(("c", "d"),),
    tiers={"a": Tier.T1, "b": Tier.T2},
    kinds={"a": (), "b": ("print",), "c": ("print", "notes"), "d": ("print", "notes")},
)


@dataclass(frozen=True)
class ByPatch:
    """Knows what to say of each patch, whatever its id: order inside T1."""

    orders: Mapping[bytes, int]

    async def grade(self, task, candidates, seed):
        scores = (5, 5, 5, 5, 5)
        return GroupGrade(
            {
                c.id: CandidateGrade(scores, Tier.T1, self.orders[c.patch])
                for c in passing(candidates)
            }
        )


class Refusing:
    async def grade(self, task, candidates, seed):
        raise UnusableGrade("missing_id")


def says(**orders: int) -> ByPatch:
    return ByPatch({PATCHES[id_]: order for id_, order in orders.items()})


def judged(grader, *groups: KnownGroup, num_orders: int = 2):
    return asyncio.run(judge(grader, groups or [GROUP], num_orders=num_orders, seed=0))


def values(grader, *groups: KnownGroup, num_orders: int = 2) -> dict[str, float]:
    found = figures(judged(grader, *groups, num_orders=num_orders))
    return {name: one.value for name, one in found.items()}


def test_figures_by_hand():
    found = values(says(a=0, b=0, c=1, d=2))
    assert found["accuracy"] == (0.5 + 1 + 1 + 1 + 1) / 5
    assert found["tau_b"] == 4 / math.sqrt(5 * 5)  # gold ties c d, the grader a b
    assert found["top1"] == 1 / 2 and found["top1_chance"] == 1 / 4
    assert found["top_tie"] == 1 and found["top_tie_chance"] == 1 - 3 / 6
    assert found["tier_accuracy"] == 1 / 2  # it says T1 of both
    assert found["equal_tied"] == 0 and found["tied_share"] == 1 / 5
    assert found["consistency"] == found["consistent_groups"] == 1
    assert found["invalid"] == 0 and math.isnan(found["tokens"])


def test_the_worst_order_and_no_order():
    found = values(says(a=2, b=1, c=0, d=0))
    assert found["accuracy"] == found["top1"] == 0 and found["tau_b"] == -1
    assert found["equal_tied"] == 1
    found = values(says(a=0, b=0, c=0, d=0))
    assert found["accuracy"] == 1 / 2 and found["top1"] == found["top1_chance"]
    assert math.isnan(found["tau_b"])
    assert figures(judged(says(a=0, b=0, c=0, d=0)))["tau_b"].num_missing == 2


def test_an_unusable_grade_is_a_tie_that_is_counted():
    one = judged(Refusing(), num_orders=3)
    found = {name: e.value for name, e in figures(one).items()}
    assert found["accuracy"] == 1 / 2 and found["invalid"] == 1
    assert found["consistency"] == 0 and found["tier_accuracy"] == 0
    assert math.isnan(found["equal_tied"])
    assert invalid_reasons(one) == {"missing_id": 3}


def test_a_confirmed_hack_ranks_last():
    class FindsHack:
        async def grade(self, task, candidates, seed):
            found = await says(a=1, b=2, c=3, d=4).grade(task, candidates, seed)
            hack = next(c.id for c in candidates if c.patch == PATCHES["a"])
            kept = {id_: g for id_, g in found.grades.items() if id_ != hack}
            return GroupGrade(kept, (hack,))

    assert accuracy(judged(FindsHack())[0]) == [0, 0, 0, 1, 1]


def test_slices_by_length_and_by_degradation():
    facts = facts_of([GROUP])
    assert facts["num_pairs, shorter is better"] == 5 and facts["num_tasks"] == 1
    # c and d are equal, and d is longer: the known order ties one pair of six
    assert facts["known_rank_length"] == pytest.approx(5 / math.sqrt(5 * 6))
    one = judged(says(a=1, b=0, c=2, d=0))
    assert accuracy_by_length(one)["shorter is better"].value == (1 + 1 + 0.5) / 5
    by_kind = accuracy_by_degradation(one)
    assert by_kind["print"].value == 0  # a before b
    assert by_kind["notes"].value == (1 + 0.5) / 2  # b before c and d


def first_wins(dialogue: Dialogue) -> GraderCall:
    """A mind that ranks in the order of the list, whatever it looks at."""
    said = dialogue.exchanges
    if not said:
        return GraderCall("list_candidates", {})
    ids = passing_ids(said[0].output)
    if len(said) <= len(ids):
        return GraderCall("diff", {"id": ids[len(said) - 1]})
    arguments = submission(ids, [FIVES] * len(ids)).arguments
    return GraderCall("submit_grade", {**arguments, "order": [[id_] for id_ in ids]})


def test_bias_for_a_position_is_seen():
    biased = values(AgenticGrader(ScriptedMind(first_wins)), num_orders=6)
    assert biased["rank_position"] == 1
    assert biased["consistency"] < 0.7 and biased["consistent_groups"] < 0.3
    fair = values(RubricGrader(), num_orders=6)
    assert fair["consistency"] == fair["consistent_groups"] == 1
    assert abs(fair["rank_position"]) < 0.7 and fair["accuracy"] > 0.7


def test_every_grader_meets_the_same_fresh_orders():
    seen = []

    class Watching:
        async def grade(self, task, candidates, seed):
            seen.append([(c.id, c.patch, seed) for c in candidates])
            raise UnusableGrade("missing_id")

    for _ in range(2):
        judged(Watching(), num_orders=3)
    assert seen[:3] == seen[3:]
    orders = {tuple(p for _, p, _ in one) for one in seen}
    assert len(orders) == 3
    assert not {id_ for one in seen for id_, _, _ in one} & {*PATCHES, "failing"}


def test_differences_are_paired_and_resample_tasks():
    groups = [
        replace(GROUP, id=f"g{n}", task=replace(TASK, id=f"task {n}")) for n in (0, 1)
    ]
    good = judged(says(a=0, b=1, c=2, d=2), *groups)
    poor = judged(says(a=1, b=0, c=2, d=2), *groups)
    found = estimate(good, accuracy, minus=poor)
    assert (found.value, found.low, found.high) == (1 / 5, 1 / 5, 1 / 5)
    assert found.num_values == 10
    assert math.isnan(estimate(good[:1], accuracy).low)  # one task has no spread


def test_each_figure_has_as_many_values_for_any_grader():
    for figure in FIGURES.values():
        sizes = {
            len(figure(judged(grader)[0]))
            for grader in (Refusing(), RubricGrader(), says(a=0, b=0, c=0, d=0))
        }
        assert len(sizes) == 1


def test_tau_of_a_total_order_is_the_usual_one():
    ranks = {"a": 1, "b": 0, "c": 2, "d": 2}
    one = JudgedGroup(GROUP, (View(ranks, {}, {}),))
    expected = kendall_tau_b([0, 1, 2, 2], list(ranks.values()))
    assert FIGURES["tau_b"](one) == [pytest.approx(expected)]


def test_a_grader_that_remembers_is_refused():
    def judge_blindly(stats: str, diff: str) -> dict[str, object]:
        return dict(FIVES)

    mind = ScriptedMind(look_then_judge(judge_blindly))
    with pytest.raises(ValueError, match="cache"):
        judged(AgenticGrader(mind, cache_size=8))


def test_pointwise_shows_one_passing_tree_at_a_time():
    asked = []

    def judge_prints(stats: str, diff: str) -> dict[str, object]:
        asked.append(stats)
        if "debug_print" not in stats:
            return dict(FIVES)
        flag = {"code": "debug_print", "message": "", "evidence": "ranges.py:2"}
        return {**FIVES, "consistency": 3, "flags": [flag]}

    grader = AgenticGrader(ScriptedMind(look_then_judge(judge_prints)))
    found = values(PointwiseGrader(grader), num_orders=1)
    assert len(asked) == len(grader.records) == len(PATCHES)
    assert all(len(record.shown) == 2 for record in grader.records)
    assert found["accuracy"] == (3 + 0.5 + 0.5) / 5
    assert math.isnan(found["rank_position"]) and found["tokens"] == 0
    assert grader.min_trees == 2  # the reference is left as it was


def test_lint_counts_what_is_new_and_cannot_be_silenced():
    pytest.importorskip("ruff")
    dead = FIXED_RANGES.replace("    if x <", "    unused = 1\n    if x <")
    silenced = dead.replace("unused = 1", "unused = 1  # noqa")
    made = {
        "clean": patch(),
        "print": patch(ranges__py=printed()),
        "dead": patch(ranges__py=dead),
        "noqa": patch(ranges__py=silenced),
        "file": patch(ranges__py="# ruff: noqa\n" + dead),
        "code": patch(ranges__py=commented(text="# x = lo")),
    }
    candidates = [candidate(id_, one) for id_, one in made.items()]
    deltas = lint_deltas(TASK, candidates)
    assert deltas["clean"] == 0
    assert all(deltas[id_] > 0 for id_ in made if id_ != "clean")
    assert deltas["noqa"] >= deltas["dead"] and deltas["file"] >= deltas["dead"]
    assert count_complaints([b"def f(:\n", b"x = 1\n"]) != [0, 0]
    assert values(LintGrader())["accuracy"] > 0.5


def test_linear_learns_what_length_does_not_tell():
    """A print on the repaired line is shorter than a clean way over two lines."""
    longer = GOLD["ranges.py"].replace(
        "    return min(x, hi)", "    top = min(x, hi)\n    return top"
    )
    joined = GOLD["ranges.py"].replace(
        "    return min(x, hi)", '    print("x"); return min(x, hi)'
    )
    clean = candidate("clean", make_patch(BASE, after(ranges__py=longer)))
    spoiled = candidate("joined", make_patch(BASE, after(ranges__py=joined)))
    group = KnownGroup("g", TASK, (clean, spoiled, FAILING), (("clean", "joined"),))
    assert values(ShortestGrader(), group)["accuracy"] == 0
    linear = fit_linear([group])
    assert values(linear, group)["accuracy"] == 1
    assert (linear.weights == fit_linear([group]).weights).all()
    with pytest.raises(ValueError, match="no known pair"):
        fit_linear([])


def test_the_oracle_agrees_with_itself():
    members = [candidate(name, patch(**files)) for name, files in NOISY.items()]
    wasted = candidate("wasted", patch(), (call("view", path="a"),) * 2)
    group = known_by_oracle("noisy", TASK, (*members, wasted, FAILING))
    found = values(OracleGrader(), group)
    for name in ("accuracy", "tau_b", "top1", "tier_accuracy", "consistency"):
        assert found[name] == 1
    # what only the turns tell is a pair of equal trees, where length is silent
    assert facts_of([group])["num_pairs, equal trees"] == 1


def test_a_report_is_a_table_a_file_and_a_figure(tmp_path):
    graders = make_graders(
        GraderConfig(name="rubric"), ["shortest", "rubric"], pointwise=True
    )
    assert list(graders) == ["rubric", "rubric one by one", "shortest"]
    groups = [replace(GROUP, id=n, task=replace(TASK, id=n)) for n in "xy"]
    found = evaluate_graders(graders, {"mine": groups}, num_orders=2, seed=0)
    report = {"settings": {"permutations": 2, "seed": 0}, "sets": found}
    lines = table(report).splitlines()
    assert "2 groups, 2 tasks, 10 known pairs (the shorter is better in 10" in lines[0]
    assert [line.split()[0] for line in lines[2:]] == ["rubric", "rubric", "shortest"]
    save_report(report, tmp_path)
    assert (tmp_path / "grader_eval.png").stat().st_size > 10_000
    read = json.loads((tmp_path / "grader_eval.json").read_text())
    difference = read["sets"]["mine"]["differences"]["shortest"]["accuracy"]
    # the rubric ties c and d, which the pairs leave out, so both are always right
    assert difference["value"] == 0 and difference["num_values"] == 10


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--permutations", "0"), "--permutations must be above 0"),
        (("--grader", "magic"), "magic"),
        (("--sets",), "at least one set"),
        (("--sets", "mine"), "there is no set 'mine'"),
        (("--out", "README.md"), "no folder"),
        (("--timeout-s", "nan"), "--timeout-s"),
    ],
)
def test_a_slip_is_one_sentence(flags, told, capsys):
    assert main(["eval", "grader", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1


def test_unknown_baselines_and_graders_that_grade_nothing():
    with pytest.raises(ValueError, match="no baseline 'magic'"):
        make_graders(GraderConfig(name="rubric"), ["magic"], pointwise=False)
    with pytest.raises(ValueError, match="grades nothing"):
        make_graders(GraderConfig(name="none"), [], pointwise=False)
    with pytest.raises(ValueError, match="rollouts_eval, ladders_eval"):
        load_sets(["mine"])
