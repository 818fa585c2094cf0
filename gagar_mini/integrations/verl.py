"""GAGAR in verl: advantage estimators for its registry, and trainers that grade.

    VERL_USE_EXTERNAL_MODULES=gagar_mini.integrations.verl \\
    python -m verl.trainer.main_ppo algorithm.adv_estimator=gagar \\
        algorithm.norm_adv_by_std_in_grpo=false trainer.v1.trainer_mode=gagar_sync ...

verl imports this module in each of its processes (the variable must reach Ray's, see
`verl_recipe.yaml` beside this file), and importing it from there registers

* the estimators `gagar` (the paper's bounded form), `gagar-exact` and `downweight`;
* the trainer modes `gagar_sync`, `gagar_colocate_async` and `gagar_separate_async`:
  verl's own, which also grade. verl hands an estimator rewards and group ids only, so
  the rollouts' fields reach it through them; a plain mode is refused in a sentence.

What an agent loop puts into `extra_fields["gagar"]` of each rollout, a dict:

* `patch` (bytes or str), and optionally `task` (`types.Task`, by default the text of
  the prompt) and `turns`: what the grader named by `gagar.grader` gets to see; or
* `tier` ("T1" to "T3"), `order` and `is_hack` where something else has graded;
* `is_valid`: False where the harness failed. Such a member is in no mean and has
  advantage 0, but its tokens stay in the denominator of the loss.

Groups are whole here: verl computes advantages in one process, after all rollouts of a
group have ended. Grading takes place there and then; it does not overlap rollouts.

On a CPU the tests take a step of it: rollouts in TransferQueue, this trainer's
advantages, verl's loss, new weights. A whole run of `main_ppo` is not among them, since
verl samples through vLLM or SGLang servers on GPUs that a Ray cluster places.
"""

import importlib.util
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gagar_mini.config import GraderConfig
from gagar_mini.credit import is_gradable, share_rewards
from gagar_mini.grader.controls import make_grader
from gagar_mini.grader.rubric import validate_grade
from gagar_mini.integrations.groups import (
    GradingJob,
    as_candidate,
    grade_all,
    task_of_text,
    text_of,
)
from gagar_mini.types import (
    Candidate,
    CandidateGrade,
    Grader,
    GroupGrade,
    Task,
    Tier,
    UnusableGrade,
    seed_for,
)

FIELD = "gagar"
"""The entry of a rollout's extra fields, and the group of the config."""

UNSCORED = (3, 3, 3, 3, 3)
"""Scores of a grade that came as tier and order only; credit does not look at them."""

Fields = Mapping[str, object]


@dataclass(frozen=True)
class Rows:
    """What is known of the rows of a batch besides their tensors.

    `fields`: the dict `gagar` of each row, or None. `sessions`: rows of one session are
    outputs of one rollout, the last of which was scored. `grades`, by group id, are set
    where a grader was asked: None for a group that falls back. `max_scale` is the cap.
    """

    fields: Sequence[Fields | None]
    sessions: Sequence[str]
    prompts: Sequence[object] = ()
    grades: Mapping[str, GroupGrade | None] | None = None
    max_scale: float = 1.5


ROWS: ContextVar[Rows | None] = ContextVar("rows", default=None)


@contextmanager
def rows_at_hand(rows: Rows) -> Iterator[None]:
    """Inside, the estimators find `rows`, which verl does not hand to them."""
    token = ROWS.set(rows)
    try:
        yield
    finally:
        ROWS.reset(token)


def estimate(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Mapping[str, object] | None = None,
    index: np.ndarray | None = None,
    *,
    rule: str,
    non_tensor_batch: Mapping[str, np.ndarray] | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both [N, T]: one value per rollout on its own tokens.

    `index` [N] names the group of each row. The signature is that of verl's registry.
    """
    check_config(config)
    rows = _rows_of(non_tensor_batch, len(index))
    rewards = token_level_rewards.sum(dim=-1).double().cpu()
    advantages = torch.zeros_like(rewards)
    for group, members in members_of(index, rows.sessions).items():
        last = [member[-1] for member in members]
        scores, valid = rewards[last], _valid(rows, last)
        candidates = _candidates(rows, last, scores, valid)
        credit = share_rewards(
            scores,
            [candidate.id for candidate in candidates],
            _grade_of(rows, group, last, candidates),
            rule=rule,
            max_scale=rows.max_scale,
            valid=valid,
        )
        for member, advantage in zip(members, credit.after, strict=True):
            advantages[member] = advantage
    spread = advantages.to(token_level_rewards).unsqueeze(-1) * response_mask
    return spread, spread


ESTIMATORS = {
    rule: partial(estimate, rule=rule)
    for rule in ("gagar", "gagar-exact", "downweight")
}
"""Value of `algorithm.adv_estimator` -> the function that verl calls."""


def members_of(
    index: Sequence[object] | np.ndarray, sessions: Sequence[str]
) -> dict[str, list[list[int]]]:
    """Group id -> its members -> the rows of each, in the order of the batch."""
    groups: dict[str, dict[str, list[int]]] = {}
    for row, (group, session) in enumerate(zip(index, sessions, strict=True)):
        groups.setdefault(str(group), {}).setdefault(session, []).append(row)
    return {group: list(members.values()) for group, members in groups.items()}


def grade_rows(
    rows: Rows,
    index: Sequence[object] | np.ndarray,
    rewards: Tensor,
    grader: Grader,
    *,
    timeout_s: float,
    seed: int,
) -> tuple[Rows, dict[str, float]]:
    """`rows` with the grade of each gradable group, and what to log."""
    jobs = []
    for group, members in members_of(index, rows.sessions).items():
        last = [member[-1] for member in members]
        scores, valid = rewards[last].double(), _valid(rows, last)
        if is_gradable(scores, valid):
            candidates = tuple(_candidates(rows, last, scores, valid))
            task = _task_of(rows, last[0], group)
            jobs.append(GradingJob(group, task, candidates, seed_for(seed, group)))
    results = grade_all(grader, jobs, timeout_s)
    metrics = {"gagar/gradable_groups": float(len(jobs))}
    for result in results:
        if result.fallback_reason:
            name = f"gagar/fallback/{result.fallback_reason}"
            metrics[name] = metrics.get(name, 0.0) + 1 / len(jobs)
    return replace(rows, grades={r.key: r.grade for r in results}), metrics


class GagarAdvantages:
    """Stands before one of verl's trainers (`PPOTrainer` of its version 1) and computes
    advantages with the rollouts' fields at hand."""

    mode = "sync"

    def __init__(self, config: Mapping[str, object]):
        check_config(config.algorithm)
        # verl compares the name of the mode in many places: it is our base's from here
        config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)
        self.grader, self.grading_timeout_s = grader_of(config)
        self.max_scale = float((config.get(FIELD) or {}).get("max_scale", 1.5))

    def _compute_advantage(self, batch: object, metrics: dict[str, float]) -> object:
        import transfer_queue

        data = transfer_queue.kv_batch_get(
            keys=batch.keys,
            partition_id=batch.partition_id,
            select_fields=["uid", "rm_scores", "extra_fields"],
        )
        extra = [_plain(value) or {} for value in data["extra_fields"]]
        rows = Rows(
            fields=[row.get(FIELD) for row in extra],
            sessions=[key.rpartition("_")[0] for key in batch.keys],
            prompts=[row.get("raw_prompt", "") for row in extra],
            max_scale=self.max_scale,
        )
        if self.grader is not None:
            rewards = torch.stack([scores.sum() for scores in data["rm_scores"]])
            index = [_plain(uid) for uid in data["uid"]]
            rows, found = grade_rows(
                rows,
                index,
                rewards.cpu(),
                self.grader,
                timeout_s=self.grading_timeout_s,
                seed=self.global_steps,
            )
            metrics.update(found)
        with rows_at_hand(rows):
            return super()._compute_advantage(batch, metrics)


def register() -> None:
    """Enter the estimators, and the trainers where verl can run them, with verl."""
    from verl.trainer.ppo.core_algos import register_adv_est

    for name, function in ESTIMATORS.items():
        register_adv_est(name)(function)
    if importlib.util.find_spec("transfer_queue"):
        register_trainers()


def register_trainers() -> None:
    """`gagar_sync` and the others; needs verl's extra `verl-core`."""
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    for mode in ("sync", "colocate_async", "separate_async"):
        name = f"{FIELD}_{mode}"
        if name not in TRAINER_REGISTRY:
            bases = (GagarAdvantages, get_trainer_cls(mode))
            register_trainer(name)(type(f"Gagar_{mode}", bases, {"mode": mode}))


def grader_of(config: Mapping[str, object]) -> tuple[Grader | None, float]:
    """The grader that `gagar.grader` asks for and its deadline in seconds.

    `gagar.grader` holds fields of `GraderConfig`, or `make`, the "module:function" that
    returns a grader. Without it the tiers are taken from the rollouts' fields.
    """
    wanted = dict((config.get(FIELD) or {}).get("grader") or {})
    known = {field.name for field in fields(GraderConfig)} | {"make"}
    if unknown := set(wanted) - known:
        raise ValueError(
            f"gagar.grader has {sorted(unknown)}: it knows {', '.join(sorted(known))}"
        )
    maker = wanted.pop("make", None)
    if "timeout_s" in wanted:
        wanted["timeout_s"] = float(wanted["timeout_s"])  # YAML reads 600 as an integer
    grader_config = GraderConfig(**wanted)
    grader = pkgutil.resolve_name(maker)() if maker else make_grader(grader_config)
    return grader, grader_config.timeout_s


def check_config(algorithm: Mapping[str, object] | None) -> None:
    """ValueError where advantages would not be reward minus group mean."""
    algorithm = algorithm or {}
    if algorithm.get("norm_adv_by_std_in_grpo", True):
        raise ValueError(
            "algorithm.norm_adv_by_std_in_grpo is true: GAGAR does not divide by a "
            "standard deviation; set it to false"
        )
    if algorithm.get("use_kl_in_reward", False):
        raise ValueError(
            "algorithm.use_kl_in_reward is true: a reward with a penalty in it no "
            "longer tells a pass; set actor_rollout_ref.actor.use_kl_loss instead"
        )


def _rows_of(non_tensor_batch: Mapping[str, np.ndarray] | None, num_rows: int) -> Rows:
    rows = ROWS.get()
    if rows is None and FIELD in (non_tensor_batch or {}):
        own = [str(row) for row in range(num_rows)]
        rows = Rows(fields=list(non_tensor_batch[FIELD]), sessions=own)
    if rows is None:
        raise ValueError(
            "the estimator has rewards but no rollout fields to find grades in: set "
            "trainer.v1.trainer_mode=gagar_sync, or call it inside `rows_at_hand`"
        )
    if rows.grades is None and not any(rows.fields):
        raise ValueError(
            f"no rollout has extra_fields[{FIELD!r}] and no gagar.grader is set: there "
            "is nothing to tell one pass from another"
        )
    if len(rows.sessions) != num_rows:
        raise ValueError(f"{len(rows.sessions)} rows of fields for {num_rows} rewards")
    return rows


def _candidates(
    rows: Rows, last: Sequence[int], scores: Tensor, valid: Tensor
) -> list[Candidate]:
    candidates = []
    for number, (row, is_valid) in enumerate(zip(last, valid.tolist(), strict=True)):
        known = rows.fields[row] or {}
        patch = known.get("patch", b"")
        candidates.append(
            as_candidate(
                f"m{number}",
                patch if isinstance(patch, bytes) else str(patch).encode(),
                float(scores[number]) if is_valid else None,
                tuple(known.get("turns", ())),
            )
        )
    return candidates


def _grade_of(
    rows: Rows, group: str, last: Sequence[int], candidates: Sequence[Candidate]
) -> GroupGrade | None:
    """The grader's grade where one was asked, else that in the fields, else None."""
    if rows.grades is not None:
        return rows.grades.get(group)
    grades, hacks = {}, []
    for candidate, row in zip(candidates, last, strict=True):
        known = rows.fields[row] or {}
        if not candidate.outcome.reward:
            continue
        if known.get("is_hack"):
            hacks.append(candidate.id)
        elif known.get("tier"):
            order = int(known.get("order", 0))
            grades[candidate.id] = CandidateGrade(UNSCORED, Tier(known["tier"]), order)
    try:
        return validate_grade(GroupGrade(grades, tuple(hacks)), candidates)
    except UnusableGrade:
        return None


def _valid(rows: Rows, last: Sequence[int]) -> Tensor:
    known = [rows.fields[row] or {} for row in last]
    return torch.tensor([bool(row.get("is_valid", True)) for row in known])


def _task_of(rows: Rows, row: int, group: str) -> Task:
    task = (rows.fields[row] or {}).get("task")
    prompt = rows.prompts[row] if rows.prompts else ""
    return task if isinstance(task, Task) else task_of_text(text_of(prompt), group)


def _plain(value: object) -> object:
    """What TransferQueue wraps in order to carry it beside tensors."""
    return getattr(value, "data", value)


# verl loads plug-ins by importing them: this is its documented way in
if "verl" in sys.modules:
    register()
