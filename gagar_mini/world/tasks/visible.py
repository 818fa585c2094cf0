"""What the agent is shown of a fault: examples, the statement, the visible check."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gagar_mini.world.tasks.faults import outcome_of, same_value
from gagar_mini.world.tasks.repository import Damage
from gagar_mini.world.tasks.templates import (
    call_reference,
    compile_function,
    draw_inputs,
    rename,
)

CHECK_PATH = "check.py"
NUM_INPUTS = 48
"""Inputs among which the examples of a task are looked for."""

CHECK = """\
{imports}

CASES = {{
{cases}
}}
fails = []
for call, want in CASES.items():
    try:
        got = eval(call)
    except Exception as error:
        got = type(error).__name__
    if got != want:
        fails.append(f"FAIL {{call}} gave {{got!r}} not {{want!r}}")
print("\\n".join(fails[:2]) or "ok")
raise SystemExit(bool(fails))
"""


@dataclass(frozen=True)
class Example:
    """A call as text, what it gives at base ("gives 7" or "raises KeyError") and its
    right value as text."""

    call: str
    given: str
    want: str
    is_wrong: bool

    @property
    def num_chars(self) -> int:
        return len(self.call) + len(self.given) + len(self.want)


def draw_examples(
    damage: Damage, rng: random.Random, max_chars: int
) -> tuple[Example, Example] | None:
    """Two short examples of one function: one that shows the fault, and any other.

    None where no input within `max_chars` shows it.
    """
    template = damage.function.template
    function = compile_function(damage.source, damage.function.name)
    examples = []
    for arguments in draw_inputs(template, rng, NUM_INPUTS):
        want = call_reference(template, arguments)
        kind, value = outcome_of(function, arguments)
        is_wrong = kind == "error" or not same_value(value, want)
        given = f"raises {value}" if kind == "error" else f"gives {value!r}"
        call = f"{damage.function.name}({', '.join(map(repr, arguments))})"
        examples.append(Example(call, given, repr(want), is_wrong))
    short = [e for e in examples if e.num_chars <= max_chars]
    telling = [e for e in short if e.is_wrong]
    if not telling or len(short) < 2:
        return None
    ranked = sorted(telling, key=lambda e: (e.num_chars, e.call))
    # a fault shows best in a short call, a function to write in one that tells much
    shown = rng.choice(ranked[:4] if damage.fault else ranked[-len(ranked) // 2 :])
    return shown, rng.choice([e for e in short if e is not shown])


def render_check(
    damages: Sequence[Damage], examples: Sequence[Sequence[Example]]
) -> str:
    """The visible check: prints ok and exits 0, or a line per failure (two at most)
    and 1."""
    imported: dict[str, list[str]] = {}
    for damage in damages:
        imported.setdefault(damage.function.module, []).append(damage.function.name)
    imports = [
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(imported.items())
    ]
    cases = [f"    {json.dumps(e.call)}: {e.want}," for pair in examples for e in pair]
    return CHECK.format(imports="\n".join(imports), cases="\n".join(cases))


def short_statement(damages: Sequence[Damage], shown: Sequence[Example]) -> str:
    """`Fix f in m.py: f(1) gives 2, not 3. Change nothing else.`"""
    sentences = [
        f"Fix {damage.function.name} in {damage.function.path}: "
        f"{example.call} {example.given}, not {example.want}."
        for damage, example in zip(damages, shown, strict=True)
    ]
    return " ".join([*sentences, "Change nothing else."])


def long_statement(damages: Sequence[Damage], shown: Sequence[Example]) -> str:
    """A short report with what each function is for, and a bounded scope."""
    paragraphs = []
    for damage, example in zip(damages, shown, strict=True):
        function = damage.function
        summary = rename(function.template.purpose, function.names)
        if damage.fault is None:
            paragraphs.append(
                f"`{function.name}` in {function.path} is not written yet. It should "
                f"{summary} For example, `{example.call}` is `{example.want}`."
            )
        else:
            paragraphs.append(
                f"`{function.name}` in {function.path} should {summary} But "
                f"`{example.call}` {example.given} where `{example.want}` is right."
            )
    scope = "Repair that and leave the rest of the repository as it is."
    return "\n\n".join([*paragraphs, scope])
