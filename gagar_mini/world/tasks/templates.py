"""What a function template is: a reference, and a way to draw inputs for it.

A template is the source of one pure function plus an input generator. The source
becomes a function of a micro-repository (sound, or with one changed line), and the same
source, run by the judge, gives the expected values of the hidden tests.
"""

import copy
import functools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Draw = Callable[[random.Random], tuple]
"""Arguments of one call: builtin values that JSON can hold, edge cases included."""


@dataclass(frozen=True, eq=False)
class Template:
    """One function: `source` (LF line ends, ends with one), `draw` its arguments.

    `topic` chooses the module it may live in. `renames` are further naming variants,
    word for word, beside the source's own. `is_held_out` templates occur in no training
    task. `summary` says what the function does, for statements that ask to write it.
    """

    name: str
    topic: str
    source: str
    draw: Draw
    renames: tuple[Mapping[str, str], ...] = ()
    is_held_out: bool = False
    summary: str = ""

    @property
    def purpose(self) -> str:
        """What the function should do, from "return" to the full stop."""
        if self.summary:
            return self.summary
        text = compile_function(self.source, self.name).__doc__
        assert text, f"template {self.name} has neither a summary nor a docstring"
        return text[0].lower() + text[1:]

    @property
    def variants(self) -> tuple[Mapping[str, str], ...]:
        """Naming variants; the first changes nothing."""
        return ({}, *self.renames)


def rename(text: str, names: Mapping[str, str]) -> str:
    """`text` with whole words replaced."""
    if not names:
        return text
    words = "|".join(map(re.escape, names))
    return re.sub(rf"\b({words})\b", lambda match: names[match[0]], text)


@functools.cache
def compile_function(source: str, name: str) -> Callable[..., object]:
    """The function `name` of a trusted source, cached by text."""
    namespace: dict[str, object] = {}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    function = namespace[name]
    assert callable(function)
    return function


def draw_inputs(template: Template, rng: random.Random, num_cases: int) -> list[tuple]:
    """`num_cases` argument tuples, distinct as far as 8 draws for each allow."""
    inputs: dict[str, tuple] = {}
    for _ in range(8 * num_cases):
        arguments = template.draw(rng)
        inputs.setdefault(repr(arguments), arguments)
        if len(inputs) == num_cases:
            return list(inputs.values())
    return list(inputs.values())


def call_reference(template: Template, arguments: tuple) -> object:
    """What the sound function returns; the arguments stay as they are."""
    function = compile_function(template.source, template.name)
    return function(*copy.deepcopy(arguments))
