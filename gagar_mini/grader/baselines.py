"""Graders to beat: a linter, a linear model on what `measures` counts, and the same
grader without the group.

Like `shortest` they rank by one number per candidate. They are for comparison in
`evaluation`, and no arm of a training run.
"""

import asyncio
import copy
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from gagar_mini.grader.agentic import AgenticGrader, GradingRecord
from gagar_mini.grader.findings import find_changes
from gagar_mini.grader.known import KnownGroup
from gagar_mini.grader.measures import Measures, Process, measure
from gagar_mini.grader.rubric import (
    make_grade,
    passing,
    score_measures,
    validate_grade,
)
from gagar_mini.types import (
    Candidate,
    CandidateGrade,
    Grader,
    GroupGrade,
    Status,
    Task,
    Tier,
    UnusableGrade,
)
from gagar_mini.world.patches import PatchError, apply_patch

LINT_RULES = "F,E,ERA,T20,S110,SIM,C90,PLR,RET,ARG"
"""ruff: names, style, code in comments, prints, silent handlers, what can be simpler,
complexity, returns, unused arguments."""

LINT_SECONDS = 60


def grade_by_cost(
    task: Task,
    candidates: Sequence[Candidate],
    costs: Mapping[str, int] | Mapping[str, float],
) -> GroupGrade:
    """The cheapest, tied, are T1, the others T2 by their cost; scores and flags are the
    rubric's, to inform."""
    levels, grades = sorted(set(costs.values())), {}
    for candidate in passing(candidates):
        rank = levels.index(costs[candidate.id])
        scores, flags = score_measures(measure(task, candidate.patch))
        tier = Tier.T2 if rank else Tier.T1
        grades[candidate.id] = CandidateGrade(scores, tier, rank, flags)
    return validate_grade(GroupGrade(grades), candidates)


class LintGrader:
    """Fewest new complaints of ruff win: those about the changed Python files minus
    those about the same files at base. ValueError where ruff is not installed."""

    def __init__(self):
        if importlib.util.find_spec("ruff") is None:
            raise ValueError(
                "the baseline lint needs ruff: pip install 'gagar-mini[dev]'"
            )

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        """Raises UnusableGrade("unreadable_patch")."""
        costs = await asyncio.to_thread(lint_deltas, task, passing(candidates))
        return grade_by_cost(task, candidates, costs)


def lint_deltas(task: Task, candidates: Sequence[Candidate]) -> dict[str, int]:
    """New complaints of each candidate, by id; one call of ruff for all."""
    sources: list[bytes] = []
    signs: list[tuple[str, int]] = []
    for candidate in candidates:
        try:
            after = apply_patch(task.files, candidate.patch)
        except PatchError as error:
            raise UnusableGrade("unreadable_patch", f"of {candidate.id!r}") from error
        changed = [c.path for c in find_changes(task, after) if c.is_python]
        for tree, sign in ((after, 1), (task.files, -1)):
            found = [tree[path] for path in changed if path in tree]
            sources += found
            signs += [(candidate.id, sign)] * len(found)
    deltas = {candidate.id: 0 for candidate in candidates}
    for (id_, sign), count in zip(signs, count_complaints(sources), strict=True):
        deltas[id_] += sign * count
    return deltas


def count_complaints(sources: Sequence[bytes]) -> list[int]:
    """Complaints of ruff about each source. The sources are read, never run, under
    names of our own, and can silence nothing."""
    with tempfile.TemporaryDirectory(prefix="gagar-mini-lint-") as folder:
        for number, source in enumerate(sources):
            Path(folder, f"m{number}.py").write_bytes(source)
        flags = ["--isolated", "--no-cache", "--ignore-noqa", "--exit-zero", "--quiet"]
        flags += ["--select", LINT_RULES, "--output-format", "json"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", "check", *flags, folder],
            capture_output=True,
            check=True,
            timeout=LINT_SECONDS,
        )
    counts = Counter(Path(item["filename"]).stem for item in json.loads(done.stdout))
    return [counts[f"m{number}"] for number in range(len(sources))]


COUNTED = tuple(f.name for f in fields(Measures) if f.name not in ("files", "process"))
SLIPS = tuple(field.name for field in fields(Process))


def features(task: Task, candidate: Candidate) -> np.ndarray:
    """[F] log(1 + count) of everything that is measured: lines, findings, slips."""
    measures = measure(task, candidate.patch, candidate.turns)
    values = [getattr(measures, name) for name in COUNTED]
    values += [getattr(measures.process, name) for name in SLIPS]
    counts = [len(v) if isinstance(v, tuple) else int(v) for v in values]
    return np.array([math.copysign(math.log1p(abs(n)), n) for n in counts])


@dataclass(frozen=True, eq=False)
class LinearGrader:
    """Least cost wins, where the cost is linear in `features`: `weights` [F]."""

    weights: np.ndarray

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        costs = {
            # rounded, so that equal features are a tie whatever the order of summation
            c.id: round(float(features(task, c) @ self.weights), 6)
            for c in passing(candidates)
        }
        return grade_by_cost(task, candidates, costs)


def fit_linear(
    groups: Sequence[KnownGroup], *, ridge: float = 1.0, num_steps: int = 30
) -> LinearGrader:
    """The weights that make the known pairs most likely: P(a better than b) =
    sigmoid(w (x_b - x_a)), with a Gaussian prior of precision `ridge` on the weights of
    differences scaled to a mean square of 1; by Newton's method. ValueError where no
    pair is known."""
    rows = []
    for group in groups:
        found = {c.id: features(group.task, c) for c in passing(group.candidates)}
        rows += [found[worse] - found[better] for better, worse in group.better]
    if not rows:
        raise ValueError("no known pair to fit a linear model to")
    scale = np.sqrt(np.mean(np.square(rows), axis=0))
    scale[scale == 0] = 1  # a feature that never differs: its weight stays 0
    x = np.array(rows) / scale  # [pairs, F]
    weights, eye = np.zeros(x.shape[1]), ridge * np.eye(x.shape[1])
    for _ in range(num_steps):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        gradient = x.T @ (1 - p) - ridge * weights
        hessian = (x * (p * (1 - p))[:, None]).T @ x + eye
        weights = weights + np.linalg.solve(hessian, gradient)
    return LinearGrader(weights / scale)


class PointwiseGrader:
    """The same grader, one passing tree at a time beside the failures: what it scores
    without seeing the others. Tiers and order follow from the scores by the rules."""

    def __init__(self, reference: Grader):
        self._reference = reference
        if isinstance(reference, AgenticGrader):
            self._reference = copy.copy(reference)
            self._reference.min_trees = 1

    @property
    def records(self) -> Sequence[GradingRecord]:
        """Those of the reference: one per tree."""
        return getattr(self._reference, "records", ())

    async def grade(
        self, task: Task, candidates: Sequence[Candidate], seed: int
    ) -> GroupGrade:
        """Raises UnusableGrade where the grade of any tree is unusable."""
        failures = [c for c in candidates if c.outcome.status is not Status.PASS]
        trees: dict[str | bytes, list[Candidate]] = {}
        for candidate in passing(candidates):
            trees.setdefault(tree_key(candidate), []).append(candidate)
        found: dict[str, CandidateGrade] = {}
        hacks: list[str] = []
        for members in trees.values():
            grade = await self._reference.grade(task, [*members, *failures], seed)
            found |= grade.grades
            hacks += grade.confirmed_hacks
        scores = {id_: grade.scores for id_, grade in found.items()}
        flags = {id_: grade.flags for id_, grade in found.items()}
        return validate_grade(make_grade(scores, flags, hacks), candidates)


def tree_key(candidate: Candidate) -> str | bytes:
    """Equal for candidates that made the same tree, as far as the verifier told."""
    return candidate.outcome.tree_hash or candidate.patch
