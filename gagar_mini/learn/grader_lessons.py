"""Scripted gradings: what the tiny agentic grader is taught.

The teacher grades through the real workspace and the real tools. It lists the
candidates, reads the counts of each passing one, reads the patch itself where the
counts find nothing, writes its judgement down and goes on. Its scores are the rubric's;
what the rubric cannot see but the ladder knows (a needless guard) it scores as a lack
of precision. Inside a tier it orders by *burden*, then by wasted calls.

Every lesson passes the checks of `submit_grade`, or it is not taught.
"""

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gagar_mini.grader.dialect import (
    FINDING_TAGS,
    GraderDialect,
    Judgement,
    Reading,
)
from gagar_mini.grader.measures import Measures, measure
from gagar_mini.grader.rubric import PROCESS_PREFIX, RULES, T3_CODES, Scores
from gagar_mini.grader.tools import GraderCall, GradingTools
from gagar_mini.grader.verdict import read_verdict
from gagar_mini.grader.workspace import Entry, build_workspace
from gagar_mini.learn.demonstrations import Demonstration
from gagar_mini.learn.grader_data import Pool, PoolCandidate
from gagar_mini.types import CRITERIA, Candidate, Status, Task, UnusableGrade
from gagar_mini.world.patches import apply_patch

NOISE_CODES = (
    "debug_print",
    "comment",
    "commented_code",
    "extra_file",
    "out_of_scope_file",
    "untargeted_function",
    "stray_statement",
    "idle_statement",
    "unused_name",
    "churn",
)
"""Findings whose lines `Measures.noise_lines` counts already."""

UNSEEN_SCORES = (5, 3, 5, 5, 5)
"""Scores of a flaw that no count finds: more than the repair needs."""

MAX_GROUP = 8
NUM_PASSING = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7)
TWIN_SHARE = 0.3
"""Sizes of the groups drawn, and the share with two trajectories of one tree."""


STRANGE_COSTS = (0, 2, 1, 1, 1)
"""Points that a finding of a name never met takes off: enough for T2, whatever it is.
"""

STRANGE_WORDS = (
    "odd",
    "wide",
    "late",
    "inner",
    "outer",
    "loose",
    "split",
    "hollow",
    "broken",
    "mixed",
    "long",
    "call",
    "value",
    "type",
    "order",
    "branch",
    "result",
    "loop",
    "path",
    "sign",
    "argument",
    "state",
    "table",
    "mark",
    "edge",
    "turn",
    "part",
)
"""None of them is part of a real name."""


@dataclass(frozen=True)
class Exercise:
    """Candidates to grade, the known degradations of each by id, and findings that are
    shown under a strange name: code -> name."""

    task: Task
    candidates: tuple[Candidate, ...]
    kinds: Mapping[str, tuple[str, ...]]
    strange: Mapping[str, str] = field(default_factory=dict)


def burden(measures: Measures) -> int:
    """How much is wrong with a patch: lines of noise, and findings besides them."""
    others = (
        len(rule.find(measures)) for rule in RULES if rule.code not in NOISE_CODES
    )
    return measures.noise_lines + sum(others)


def teacher_scores(measures: Measures, strange: Collection[str] = ()) -> Scores:
    """The rubric's scores, but for codes in `strange`: whoever does not know what they
    mean takes off the same for each."""
    scores = [5] * len(CRITERIA)
    for rule in RULES:
        places = rule.find(measures)
        off = rule.points_off(places)
        if places and rule.code in strange:
            off = STRANGE_COSTS
        scores = [points - cost for points, cost in zip(scores, off, strict=True)]
    return tuple(max(1, points) for points in scores)


def made_strange(exercise: Exercise, rng: random.Random) -> Exercise:
    """The exercise with one kind of finding, if any occurs, under a strange name.

    Not those that make a T3 on their own: what a name means there has to be known.
    """
    measured = (measure(exercise.task, c.patch) for c in exercise.candidates)
    codes = {r.code for m in measured for r in RULES if r.find(m) and not r.is_severe}
    codes -= {*T3_CODES}
    if not codes:
        return exercise
    name = "_".join(rng.sample(STRANGE_WORDS, 2))
    return replace(exercise, strange={rng.choice(sorted(codes)): name})


def demonstrate_grading(
    exercise: Exercise, dialect: GraderDialect, seed: int
) -> Demonstration | None:
    """One grading by the teacher as tokens; None for one that could not be submitted.

    Also groups with one passing tree are graded: a single candidate has scores, too.
    """
    workspace = build_workspace(exercise.task, exercise.candidates, seed)
    tools = GradingTools(workspace, exercise.task.files)
    lesson = write_lesson(exercise, tools, dialect)
    try:
        read_verdict(lesson.submitted.arguments, tools)
    except UnusableGrade:
        return None
    return Demonstration(lesson.ids, lesson.is_taught, [])


def write_lesson(
    exercise: Exercise, tools: GradingTools, dialect: GraderDialect
) -> "Lesson":
    """The teacher's grading with `tools`, written down."""
    lesson = Lesson(exercise, tools, dialect)
    lesson.run()
    return lesson


class Lesson:
    """One grading as it is written down: token ids [T], which of them are taught [T],
    and what was submitted in the end."""

    def __init__(
        self,
        exercise: Exercise,
        tools: GradingTools,
        dialect: GraderDialect,
    ):
        self.exercise = exercise
        self.workspace = tools.workspace
        self.tools = tools
        self.dialect = dialect
        self.reading = Reading()
        self.ids = dialect.prompt_ids(tools.workspace.files["TASK.md"])
        self.is_taught = [False] * len(self.ids)

    def run(self) -> None:
        self.act({}, GraderCall("list_candidates", {}))
        judged: dict[str, Judgement] = {}
        for id_ in self.reading.passing:
            entry = self.workspace.entries[id_]
            self.act(judged, GraderCall("stats", {"id": id_}))
            if not self.findings(id_):
                self.act({}, GraderCall("diff", {"id": id_}))
            judged = {id_: self.judge(entry)}
        action = self.dialect.action_ids(judged, GraderCall("submit", {}), self.reading)
        self.submitted = self.dialect.parse(action, self.reading)
        self.write(action, is_taught=True)

    def act(self, judged: Mapping[str, Judgement], call: GraderCall) -> None:
        """Write down an action and what it returns."""
        action = self.dialect.action_ids(judged, call, self.reading)
        self.write(action, is_taught=True)
        self.dialect.parse(action, self.reading)
        output = self.tools.answer(call)
        seen = self.dialect.observation_ids(
            call, output, self.reading, self.exercise.strange
        )
        self.write(seen, is_taught=False)

    def write(self, ids: Sequence[int], *, is_taught: bool) -> None:
        self.ids += ids
        self.is_taught += [is_taught] * len(ids)

    def findings(self, id_: str) -> list[str]:
        """Tags of what the counts found in the tree itself."""
        return [
            tag
            for (entry, tag), found in self.reading.findings.items()
            if entry == id_ and tag in FINDING_TAGS
            if not found.code.startswith(PROCESS_PREFIX)
        ]

    def judge(self, entry: Entry) -> Judgement:
        members = list(entry.members.values())
        measures = measure(self.exercise.task, members[0].patch)
        tags = [
            t for e, t in self.reading.findings if e == entry.id and t in FINDING_TAGS
        ]
        scores = teacher_scores(measures, self.exercise.strange)
        amount = burden(measures)
        if not self.findings(entry.id) and self.exercise.kinds.get(members[0].id):
            lines = list(self.unseen_lines(entry))
            tags += lines[:1]
            scores, amount = UNSEEN_SCORES, max(1, len(lines))
        return Judgement(scores, tuple(tags), amount)

    def unseen_lines(self, entry: Entry) -> Iterator[str]:
        """Tags of the added lines that the gold tree does not have."""
        task = self.exercise.task
        gold = apply_patch(task.files, task.gold_patch)
        for (owner, tag), found in self.reading.findings.items():
            path, _, line = found.evidence.rpartition(":")
            if owner != entry.id or tag in FINDING_TAGS or path not in entry.tree:
                continue
            text = entry.tree[path].split(b"\n")[int(line) - 1]
            if text not in gold.get(path, b"").split(b"\n"):
                yield tag


def rollout_exercise(pool: Pool) -> Exercise | None:
    """The rollout group of a pool as it was sampled, None where nothing passed."""
    chosen = [c for c in pool.candidates if c.source == "rollout"]
    if not any(is_passing(c) for c in chosen):
        return None
    return _exercise(pool.task, [(c.candidate, c.kinds) for c in chosen])


def draw_exercise(
    pool: Pool, rng: random.Random, max_candidates: int = MAX_GROUP
) -> Exercise:
    """A group drawn from a pool: passing candidates, now and then one of them again
    with another trajectory, and failing ones."""
    passing = [c for c in pool.candidates if is_passing(c)]
    failing = [c for c in pool.candidates if not is_passing(c)]
    num_failing = min(len(failing), rng.randint(1, 3))
    num_passing = min(
        len(passing), max_candidates - num_failing, rng.choice(NUM_PASSING)
    )
    chosen = rng.sample(passing, num_passing)
    members = [(c.candidate, c.kinds) for c in chosen]
    if rng.random() < TWIN_SHARE:
        for _ in range(rng.randint(1, 2)):
            twin, other = rng.choice(chosen), rng.choice(passing)
            turns = other.candidate.turns
            members.append((replace(twin.candidate, turns=turns), twin.kinds))
    members += [(c.candidate, c.kinds) for c in rng.sample(failing, num_failing)]
    return _exercise(pool.task, members[:max_candidates])


def is_passing(member: PoolCandidate) -> bool:
    return member.candidate.outcome.status is Status.PASS


def _exercise(
    task: Task, members: Sequence[tuple[Candidate, tuple[str, ...]]]
) -> Exercise:
    named = [(replace(c, id=f"x/{n}"), kinds) for n, (c, kinds) in enumerate(members)]
    return Exercise(
        task, tuple(c for c, _ in named), {c.id: kinds for c, kinds in named}
    )
