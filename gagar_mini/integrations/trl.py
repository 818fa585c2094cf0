"""GAGAR in TRL's GRPOTrainer: give a grader, get redistributed advantages.

    from trl import GRPOConfig, GRPOTrainer
    from gagar_mini.grader.rubric import RubricGrader
    from gagar_mini.integrations.trl import GagarMixin

    class GagarTrainer(GagarMixin, GRPOTrainer):
        pass

    trainer = GagarTrainer(
        model, reward_funcs=tests_pass, train_dataset=tasks,
        args=GRPOConfig(scale_rewards="none", loss_type="dapo", num_generations=16),
        grader=RubricGrader(), to_task=..., to_patch=...,
    )

`loss_type="dapo"` (TRL's default) is the paper's token mean with one global
denominator. TRL has no hook for advantages, so the mixin stands before GRPOTrainer and
overrides two private methods of it; `TRL_VERSIONS` is the range for which that is
known to hold, and at each step the base advantages are compared with TRL's own.

Groups are formed over all ranks. TRL may cut a group across ranks: candidates of
gradable groups are gathered, each is graded on one rank, and the grades are gathered,
so that all ranks share the same numbers. Run it with `accelerate launch` or `torchrun`
as you run TRL; nothing else changes.

Left out: grading that overlaps rollouts (TRL generates, then scores), and masking: a
member without an outcome has no advantage, but its tokens stay in the denominator.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gagar_mini.config import CreditConfig
from gagar_mini.credit import (
    GroupCredit,
    group_advantages,
    is_gradable,
    share_rewards,
)
from gagar_mini.integrations.groups import (
    GradingJob,
    GradingResult,
    as_candidate,
    grade_all,
    task_of_text,
    text_of,
    worst_case_s,
)
from gagar_mini.types import Candidate, Grader, Task, seed_for

TRL_VERSIONS = ">=1.16,<2"
"""Others are refused. 1.16.0 is the tested one."""

Row = Mapping[str, object]
"""What TRL knows of one rollout: the columns of the dataset, what a `rollout_func`
added, and, with an `environment_factory`, its instance as `environment_instance`."""


def prompt_as_task(row: Row) -> Task:
    """A task whose statement is the prompt; there is no tree to apply a patch to."""
    return task_of_text(text_of(row["prompt"]))


def completion_as_patch(row: Row, completion: object) -> bytes:
    """The text of the completion itself."""
    return text_of(completion).encode(errors="replace")


@dataclass(frozen=True)
class Scored:
    """What one call of `_calculate_rewards` saw. `per_function` [N, F] holds the
    rewards of all ranks, NaN for None; the others are this rank's rows."""

    per_function: Tensor
    rows: Sequence[Row]
    completions: Sequence[object]


class GagarMixin:
    """Stands before `trl.GRPOTrainer` in the bases of a class; takes its arguments and

    `grader`: orders the passing members of each gradable group (`types.Grader`).
    `credit`: rule and cap. `to_task(row)` and `to_patch(row, completion)`: what the
    grader gets to see. `outcome`: the reward function whose positive values are passes,
    needed where there are several. `grading_timeout_s`: deadline per group, after which
    it keeps its GRPO advantages; falls back are counted in the metrics.

    Raises ValueError, in a sentence, for settings under which the numbers would not be
    the method's.
    """

    def __init__(
        self,
        *args: object,
        grader: Grader,
        credit: CreditConfig = CreditConfig(rule="gagar"),  # noqa: B008, it is frozen
        to_task: Callable[[Row], Task] = prompt_as_task,
        to_patch: Callable[[Row, object], bytes] = completion_as_patch,
        outcome: str | None = None,
        grading_timeout_s: float = 60.0,
        **kwargs: object,
    ):
        check_version()
        super().__init__(*args, **kwargs)
        self.grader, self.credit = grader, credit
        self.to_task, self.to_patch = to_task, to_patch
        self.grading_timeout_s = grading_timeout_s
        self._outcome_column = outcome_column(self.reward_func_names, outcome)
        self._scored: Scored | None = None
        self._check_settings()

    def _calculate_rewards(
        self,
        inputs: Sequence[Row],
        prompts: Sequence[object],
        completions: Sequence[object],
        completion_ids_list: Sequence[Sequence[int]],
    ) -> Tensor:
        per_function = super()._calculate_rewards(
            inputs, prompts, completions, completion_ids_list
        )
        self._scored = Scored(per_function, self._rows(inputs, prompts), completions)
        return per_function

    def _generate_and_score_completions(
        self, inputs: list[dict[str, object]]
    ) -> dict[str, object]:
        output = super()._generate_and_score_completions(inputs)
        scored, self._scored = self._scored, None
        # an evaluation reports rewards; nobody's opinion enters it
        if not self.model.training:
            return output
        weights = self.reward_weights.to(scored.per_function)
        rewards = (scored.per_function * weights).nansum(dim=1).double().cpu()
        outcomes = scored.per_function[:, self._outcome_column].double().cpu()
        num_rows, plain = len(scored.rows), output["advantages"]
        start = self.accelerator.process_index * num_rows
        is_scored = ~scored.per_function.isnan().all(dim=1).cpu()
        self._compare(plain, rewards, is_scored, start)
        shares = self._share(scored, rewards, outcomes)
        after = torch.cat([credit.after for credit in shares])
        output["advantages"] = after[start : start + num_rows].to(plain)
        self._replace_logged(after)
        return output

    def _share(
        self, scored: Scored, rewards: Tensor, outcomes: Tensor
    ) -> list[GroupCredit]:
        """Credit of every group of every rank, in the order of the rewards."""
        size = self.num_generations
        valid = ~outcomes.isnan()
        passed = (outcomes > 0) & valid
        members = [slice(i, i + size) for i in range(0, len(rewards), size)]
        to_grade = [
            number
            for number, group in enumerate(members)
            if is_gradable(passed[group].double(), valid[group])
        ]
        results = self._grade(scored, outcomes, to_grade)
        shares = [
            share_rewards(
                rewards[group],
                [f"m{i}" for i in range(size)],
                results[number].grade if number in results else None,
                rule=self.credit.rule,
                max_scale=self.credit.max_scale,
                valid=valid[group],
                passed=passed[group],
            )
            for number, group in enumerate(members)
        ]
        self._record([shares[i] for i in to_grade], list(results.values()))
        return shares

    def _grade(
        self, scored: Scored, outcomes: Tensor, to_grade: Sequence[int]
    ) -> dict[int, GradingResult]:
        """The result of each group of `to_grade`, the same on every rank.

        All ranks know which groups are gradable and take part in both collectives, also
        with nothing to give.
        """
        from accelerate.utils import gather_object

        own = self._members(scored, outcomes, set(to_grade))
        gathered: dict[int, tuple[Candidate, Task | None]] = dict(gather_object(own))
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        jobs = [self._job(number, gathered) for number in to_grade[rank::world]]
        results = grade_all(self.grader, jobs, self.grading_timeout_s)
        return {int(result.key): result for result in gather_object(results)}

    def _members(
        self, scored: Scored, outcomes: Tensor, to_grade: set[int]
    ) -> list[tuple[int, tuple[Candidate, Task | None]]]:
        """This rank's candidates by global position; the first of a group brings the
        task."""
        size, found = self.num_generations, []
        start = self.accelerator.process_index * len(scored.rows)
        for offset, row in enumerate(scored.rows):
            position = start + offset
            if position // size not in to_grade:
                continue
            outcome = float(outcomes[position])
            candidate = as_candidate(
                f"m{position % size}",
                self.to_patch(row, scored.completions[offset]),
                None if outcome != outcome else outcome,
            )
            task = self.to_task(row) if position % size == 0 else None
            found.append((position, (candidate, task)))
        return found

    def _job(
        self, number: int, gathered: Mapping[int, tuple[Candidate, Task | None]]
    ) -> GradingJob:
        first = number * self.num_generations
        members = [gathered[first + i] for i in range(self.num_generations)]
        seed = seed_for(self.args.seed, self.state.global_step, "grade", number)
        candidates = tuple(candidate for candidate, _ in members)
        return GradingJob(str(number), members[0][1], candidates, seed)

    def _rows(self, inputs: Sequence[Row], prompts: Sequence[object]) -> list[Row]:
        environments = self.environments or [None] * len(inputs)
        return [
            {**row, "prompt": prompt, "environment_instance": environment}
            for row, prompt, environment in zip(
                inputs, prompts, environments, strict=True
            )
        ]

    def _compare(
        self, plain: Tensor, rewards: Tensor, is_scored: Tensor, start: int
    ) -> None:
        """RuntimeError unless our base advantages are those that TRL has computed: then
        groups, weights or signs would not be what the override takes them for."""
        size = self.num_generations
        ours = torch.cat(
            [
                group_advantages(rewards[i : i + size], valid=is_scored[i : i + size])
                for i in range(0, len(rewards), size)
            ]
        )[start : start + len(plain)]
        gap = (ours - plain.double().cpu()).abs().max()
        if gap > 1e-4 * (1 + ours.abs().max()):
            raise RuntimeError(
                f"TRL's base advantages differ from reward minus group mean by {gap}: "
                "this version or subclass of GRPOTrainer groups or scales otherwise"
            )

    def _replace_logged(self, after: Tensor) -> None:
        """Let the table of completions show what trains."""
        logged = self._logs["advantages"]
        for _ in range(min(len(after), len(logged))):
            logged.pop()
        logged.extend(after.tolist())

    def _record(
        self, shares: Sequence[GroupCredit], results: Sequence[GradingResult]
    ) -> None:
        metrics = self._metrics["train"]
        metrics["gagar/gradable_groups"].append(float(len(shares)))
        if not shares:
            return
        reasons = [result.fallback_reason for result in results]
        metrics["gagar/fallback_share"].append(sum(map(bool, reasons)) / len(shares))
        for reason in sorted(set(filter(None, reasons))):
            share = reasons.count(reason) / len(shares)
            metrics[f"gagar/fallback/{reason}"].append(share)
        scales = [credit.scale for credit in shares]
        metrics["gagar/credit_scale"].append(sum(scales) / len(scales))
        num_capped = sum(credit.is_cap_hit for credit in shares)
        metrics["gagar/cap_hit_share"].append(num_capped / len(shares))

    def _check_settings(self) -> None:
        check_scaling(self.scale_rewards, self.multi_objective_aggregation, self.credit)
        num_groups = self.args.generation_batch_size // self.num_generations
        per_rank = -(-num_groups // self.accelerator.num_processes)
        longest_s = worst_case_s(per_rank, self.grading_timeout_s)
        if self.accelerator.num_processes > 1 and longest_s >= self.args.ddp_timeout:
            raise ValueError(
                f"grading may take {longest_s:.0f} s in a step, but ranks that wait "
                f"give up after ddp_timeout={self.args.ddp_timeout} s: raise it, or "
                f"lower grading_timeout_s={self.grading_timeout_s}"
            )


def check_version() -> None:
    """ValueError where the installed TRL is outside `TRL_VERSIONS`."""
    import trl
    from packaging.specifiers import SpecifierSet

    if trl.__version__ not in SpecifierSet(TRL_VERSIONS):
        raise ValueError(
            f"TRL {trl.__version__} is installed, but GagarMixin overrides private "
            f"methods that are known in trl{TRL_VERSIONS}"
        )


def check_scaling(scale_rewards: str, aggregation: str, credit: CreditConfig) -> None:
    """ValueError where advantages would not be reward minus group mean."""
    if scale_rewards != "none" or credit.scale_by_std:
        raise ValueError(
            f"scale_rewards is {scale_rewards!r} and credit.scale_by_std "
            f"{credit.scale_by_std}: GAGAR does not divide by a standard deviation; "
            'set scale_rewards="none"'
        )
    if aggregation != "sum_then_normalize":
        raise ValueError(
            f"multi_objective_aggregation is {aggregation!r}: it divides each reward "
            'by its standard deviation; set "sum_then_normalize"'
        )


def outcome_column(names: Sequence[str], outcome: str | None) -> int:
    """Which reward function tells passes from failures."""
    if outcome is None and len(names) == 1:
        return 0
    if outcome not in names:
        raise ValueError(
            f"outcome is {outcome!r}: name the reward function whose positive values "
            f"are passes, one of {', '.join(names)}"
        )
    return list(names).index(outcome)
