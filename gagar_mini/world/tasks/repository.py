"""From placed functions to the files of a micro-repository, sound or damaged."""

import ast
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gagar_mini.types import Files
from gagar_mini.world.tasks.faults import Fault, mutated_source
from gagar_mini.world.tasks.templates import Template, rename

MISSING = "    raise NotImplementedError"


@dataclass(frozen=True, eq=False)
class Placed:
    """A template in a module of a repository, under one of its naming variants."""

    template: Template
    path: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.names.get(self.template.name, self.template.name)

    @property
    def source(self) -> str:
        return rename(self.template.source, self.names)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py")

    @property
    def test_id(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False)
class Damage:
    """What is wrong with one function: one line, or (without a fault) the whole
    body."""

    function: Placed
    fault: Fault | None

    @property
    def key(self) -> str:
        """The same for the same fault of the same template, whatever the names."""
        return (
            self.fault.key if self.fault else f"{self.function.template.name}:missing"
        )

    @property
    def operator(self) -> str:
        return self.fault.mutation.operator if self.fault else "missing"

    @property
    def line(self) -> int:
        """First damaged line of the function's source, from 0."""
        if self.fault:
            return self.fault.mutation.line
        return body_lines(self.function.template)[0]

    @property
    def source(self) -> str:
        """The function as it stands at base."""
        template, names = self.function.template, self.function.names
        if self.fault:
            return rename(mutated_source(template, self.fault.mutation), names)
        lines = template.source.splitlines()
        first, last = body_lines(template)
        return rename("\n".join([*lines[:first], MISSING, *lines[last:]]) + "\n", names)

    @property
    def buggy(self) -> str:
        """The damaged text: one line."""
        return self.source.splitlines()[self.line]

    @property
    def gold(self) -> str:
        """The sound text in its place: one line, or the lines of the body."""
        last = self.line + 1 if self.fault else body_lines(self.function.template)[1]
        return "\n".join(self.function.source.splitlines()[self.line : last])

    def wrong(self, faults: Sequence[Fault]) -> tuple[str, ...]:
        """Plausible wrong repairs, none of them right; `faults` are the template's."""
        names = self.function.names
        if self.fault:
            return tuple(rename(text, names) for text in self.fault.wrong)
        first, last = body_lines(self.function.template)
        sources = [mutated_source(self.function.template, f.mutation) for f in faults]
        bodies = ["\n".join(source.splitlines()[first:last]) for source in sources]
        sound = "\n".join(self.function.template.source.splitlines()[first:last])
        return tuple(rename(body, names) for body in bodies if body != sound)


def body_lines(template: Template) -> tuple[int, int]:
    """[first, last) line, from 0, of the template's function body without a
    docstring."""
    for node in ast.parse(template.source).body:
        if isinstance(node, ast.FunctionDef) and node.name == template.name:
            skip = int(ast.get_docstring(node) is not None)
            return node.body[skip].lineno - 1, node.end_lineno
    raise AssertionError(f"template {template.name} does not define {template.name}")


Modules = Mapping[str, Sequence[Placed]]
"""Path of a module -> its functions in order."""


def render_modules(
    modules: Modules, damages: Sequence[Damage], headers: Mapping[str, str]
) -> dict[str, bytes]:
    """The module files; functions in `damages` are damaged, all others sound."""
    damaged = {id(damage.function): damage.source for damage in damages}
    files = {}
    for path, functions in modules.items():
        blocks = [damaged.get(id(f), f.source) for f in functions]
        files[path] = (headers.get(path, "") + "\n\n".join(blocks)).encode()
    return files


def line_in_file(files: Files, damage: Damage) -> int:
    """First damaged line, from 1, in the module file of a tree at base."""
    text = files[damage.function.path].decode()
    before = text[: text.index(damage.source)]
    return before.count("\n") + damage.line + 1


def unified_patch(base: Files, files: Files) -> bytes:
    """The git diff of text files that change and neither come nor go.

    Made without git, so that the same tasks give the same bytes with every version of
    it.
    """
    parts = []
    for path in sorted(base):
        if base[path] == files[path]:
            continue
        before, after = (
            tree[path].decode().splitlines(keepends=True) for tree in (base, files)
        )
        lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
        parts += [f"diff --git a/{path} b/{path}\n", *lines]
    return "".join(parts).encode()
