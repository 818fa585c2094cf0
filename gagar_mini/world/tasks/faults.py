"""Faults that the hidden tests are known to catch: mutations of a template, verified.

Templates are the project's own code, so they run in this process. Only endless loops
need guarding against: a timer of processor time ends them, and such a mutation is
dropped.
"""

import contextlib
import copy
import functools
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

from gagar_mini.types import seed_for
from gagar_mini.world.tasks.mutations import Mutation, mutate
from gagar_mini.world.tasks.templates import (
    Template,
    call_reference,
    compile_function,
    draw_inputs,
)

NUM_CASES = 14
"""Hidden cases of one function in one grading."""
NUM_TRIALS = 64
"""Simulated gradings of each mutation; at most one of them may let it pass."""
MAX_MISSES = 1
HANG_S = 0.25
"""Processor seconds that all trials of a mutation together may take (they need .01)."""

Cases = tuple[tuple[tuple, object], ...]


class Hang(BaseException):
    """A trusted function ran out of processor time (not caught by `except
    Exception`)."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise `Hang` in this thread after `seconds` of processor time (main thread
    only)."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Hang

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def same_value(left: object, right: object) -> bool:
    """Equal values of exactly equal builtin types, at every depth (1, 1.0 and True
    differ)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same_value, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(
            same_value(left[key], right[key]) for key in left
        )
    return left == right


def outcome_of(function: Callable[..., object], arguments: tuple) -> tuple[str, object]:
    """("value", result) or ("error", name of the exception type)."""
    try:
        return "value", function(*copy.deepcopy(arguments))
    except Exception as error:
        return "error", type(error).__name__


def passes(function: Callable[..., object], cases: Cases) -> bool:
    """Whether every case gives its expected value."""
    for arguments, expected in cases:
        kind, value = outcome_of(function, arguments)
        if kind == "error" or not same_value(value, expected):
            return False
    return True


@functools.cache
def trial_cases(template: Template) -> tuple[Cases, ...]:
    """The cases of `NUM_TRIALS` gradings of a template."""
    trials = []
    for trial in range(NUM_TRIALS):
        rng = random.Random(seed_for("trial", template.name, trial))
        inputs = draw_inputs(template, rng, NUM_CASES)
        trials.append(tuple((args, call_reference(template, args)) for args in inputs))
    return tuple(trials)


def mutated_source(template: Template, mutation: Mutation) -> str:
    """The template's source with the one line changed."""
    lines = template.source.splitlines()
    lines[mutation.line] = mutation.text
    return "\n".join(lines) + "\n"


def is_plausible(function: Callable[..., object], cases: Cases) -> bool:
    """Whether at least half of the cases give a value of the right type."""
    outcomes = [(outcome_of(function, arguments), want) for arguments, want in cases]
    fitting = [
        kind == "value" and type(value) is type(want)
        for (kind, value), want in outcomes
    ]
    return 2 * sum(fitting) >= len(cases)


def is_good_fault(template: Template, mutation: Mutation) -> bool:
    """Whether a mutation is plausible and caught in all but `MAX_MISSES` trials."""
    trials = trial_cases(template)
    source = mutated_source(template, mutation)
    try:
        with processor_limit(HANG_S):
            function = compile_function(source, template.name)
            misses = sum(passes(function, cases) for cases in trials)
            return misses <= MAX_MISSES and is_plausible(function, sum(trials, ()))
    except Hang:
        return False
    except Exception:
        # a constant of the module broke, so that the file cannot even be loaded
        return False


@functools.cache
def verified_mutations(template: Template) -> tuple[Mutation, ...]:
    """The good faults among the mutations of a template, in stable order."""
    mutations = mutate(template.source)
    return tuple(m for m in mutations if is_good_fault(template, m))


@dataclass(frozen=True)
class Fault:
    """A verified mutation and, in `wrong`, the other verified versions of its line."""

    template: str
    mutation: Mutation
    wrong: tuple[str, ...]

    @property
    def key(self) -> str:
        return f"{self.template}:{self.mutation.line}:{self.mutation.text.strip()}"


@functools.cache
def faults_of(template: Template, limit: int) -> tuple[Fault, ...]:
    """At most `limit` faults of a template, spread over its lines and operators.

    Lines with a single verified mutation are left out, so that for each fault there is
    a plausible wrong repair: another mutation of the same line.
    """
    by_line: dict[int, list[Mutation]] = defaultdict(list)
    for mutation in verified_mutations(template):
        by_line[mutation.line].append(mutation)
    lines = [_spread(mutations) for mutations in by_line.values() if len(mutations) > 1]
    share = max(2, limit // max(1, len(lines)))
    chosen = {m.line: mutations[:share] for mutations in lines for m in mutations[:1]}
    return tuple(
        Fault(template.name, m, tuple(o.text for o in group if o is not m))
        for group in chosen.values()
        for m in group
    )


def _spread(mutations: list[Mutation]) -> list[Mutation]:
    """Reordered so that a prefix shows many operators: first of each, second of
    each..."""
    seen: dict[str, int] = defaultdict(int)
    keyed = []
    for mutation in mutations:
        rank = seen[mutation.operator]
        seen[mutation.operator] += 1
        keyed.append((rank, seed_for("spread", mutation.text), mutation))
    return [mutation for _, _, mutation in sorted(keyed, key=lambda item: item[:2])]
