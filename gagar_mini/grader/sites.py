"""Where a gold patch repairs a Python file, and how to write there: text in, text out.

A *site* is the repaired statement of one function as it stands in some tree. Trees are
edited as text by whole lines, never by `ast.unparse` of a file, so that a patch holds
only what was meant.
"""

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from gagar_mini.grader.findings import is_debug_call
from gagar_mini.grader.syntax import (
    Function,
    changed_lines,
    is_bare_string,
    read_source,
)
from gagar_mini.types import Files, Task
from gagar_mini.world.patches import apply_patch

SIMPLE = ast.Return | ast.Assign | ast.AugAssign | ast.Expr

Place = tuple[str, str]
"""(path, function): a function that the gold patch changes."""


@dataclass(frozen=True, eq=False)
class Site:
    """The repaired statement of one function, and the lines of the file around it."""

    path: str
    lines: tuple[str, ...]
    function: Function
    statement: ast.stmt

    @property
    def parameters(self) -> list[str]:
        names = [argument.arg for argument in self.function.node.args.args]
        return [name for name in names if name != "self"]

    @cached_property
    def body(self) -> list[ast.stmt]:
        """The statements of the function without its docstring."""
        return [s for s in self.function.node.body if not is_bare_string(s)]

    @cached_property
    def words(self) -> set[str]:
        """Every word of the file: names that a new one must not be."""
        return set(re.findall(r"\w+", "\n".join(self.lines)))

    @property
    def is_branch(self) -> bool:
        """Whether the statement is an `elif`, in front of which nothing can stand."""
        return self.line(self.statement.lineno).lstrip().startswith("elif")

    @property
    def is_one_line(self) -> bool:
        """Whether it is a simple statement on a line of its own."""
        is_whole = self.statement.lineno == self.statement.end_lineno
        return isinstance(self.statement, SIMPLE) and is_whole and not self.is_joined

    @property
    def is_joined(self) -> bool:
        """Whether something else stands on its line."""
        first, last = self.statement.lineno, self.statement.end_lineno
        before = self.line(first)[: self.statement.col_offset]
        after = self.line(last)[self.statement.end_col_offset :]
        return bool(before.strip() or after.strip())

    def line(self, number: int) -> str:
        return self.lines[number - 1]

    def indent_at(self, number: int) -> str:
        line = self.line(number)
        return line[: len(line) - len(line.lstrip())]

    @property
    def indent(self) -> str:
        return self.indent_at(self.statement.lineno)

    def text(self, node: ast.AST) -> str:
        """The source of a node that stands on one line, "" of a longer one."""
        if node.lineno != node.end_lineno:
            return ""
        return self.line(node.lineno)[node.col_offset : node.end_col_offset]

    def insert(self, number: int, new: list[str]) -> list[str]:
        """The file's lines with `new` in front of line `number`."""
        return [*self.lines[: number - 1], *new, *self.lines[number - 1 :]]

    def replace(self, new: list[str]) -> list[str]:
        """The file's lines with the statement's own replaced by `new`."""
        first, last = self.statement.lineno, self.statement.end_lineno
        return [*self.lines[: first - 1], *new, *self.lines[last:]]

    def before(self, rng: random.Random) -> int:
        """A line in front of which a statement may stand: the repaired one or the
        first of the function. Its indent is that of the line itself."""
        first = self.body[0].lineno
        repaired = self.statement
        if self.is_branch:
            repaired = repaired.body[0]
        return rng.choice([first, repaired.lineno, repaired.lineno])

    def fresh(self, rng: random.Random, names: tuple[str, ...]) -> str:
        """One of `names` that the file does not hold."""
        free = [name for name in names if name not in self.words]
        return rng.choice(free or [f"{names[0]}_{len(self.words)}"])


def lines_of_file(files: Files, path: str) -> list[str]:
    return files[path].decode().split("\n")


def with_lines(files: Files, path: str, lines: list[str]) -> dict[str, bytes]:
    return {**files, path: "\n".join(lines).encode()}


def gold_files(task: Task) -> dict[str, bytes]:
    """The tree that the gold patch makes."""
    return apply_patch(task.files, task.gold_patch)


def repaired_places(task: Task) -> list[Place]:
    """The functions that the gold patch changes. A repair beside all functions has
    none."""
    gold, places = gold_files(task), []
    for path in sorted(gold):
        if path.endswith(".py") and gold[path] != task.files.get(path):
            before = read_source(task.files.get(path, b""))
            for name, function in read_source(gold[path]).functions.items():
                old = before.functions.get(name)
                if old is not None and old.shape != function.shape:
                    places.append((path, name))
    return places


def find_site(task: Task, files: Files, place: Place) -> Site | None:
    """The first added statement of a function that is no print, in the tree `files`."""
    path, name = place
    source = read_source(files[path])
    function = source.functions.get(name)
    if function is None:
        return None
    before = read_source(task.files[path])
    added, _ = changed_lines(before.lines, source.lines)
    for statement in statements_of(function):
        header = range(statement.lineno, first_of_body(statement))
        if added.intersection(header) and not is_print(statement):
            lines = tuple(lines_of_file(files, path))
            return Site(path, lines, function, statement)
    return None


def statements_of(function: Function) -> Iterator[ast.stmt]:
    """The statements of a function in the order of their lines, without strings."""
    nodes = [n for n in ast.walk(function.node) if isinstance(n, ast.stmt)]
    inner = [n for n in nodes if n is not function.node and not is_bare_string(n)]
    return iter(sorted(inner, key=lambda node: (node.lineno, node.col_offset)))


def first_of_body(statement: ast.stmt) -> int:
    """The line after a statement, or after the header of a compound one."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return max(end, statement.lineno + 1)


def is_print(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and is_debug_call(statement.value)


Edit = Callable[[random.Random, Task, Site], list[str] | None]
"""The new lines of a site's file, or None where the edit does not fit."""

Spoil = Callable[[random.Random, Task, Files], dict[str, bytes] | None]
"""A new tree, or None where nothing fits."""


def at_sites(edit: Edit) -> Spoil:
    """`edit` at one repaired function of a task, or at all of them."""

    def spoil(rng: random.Random, task: Task, files: Files) -> dict[str, bytes] | None:
        places = repaired_places(task)
        if places and rng.random() < 0.5:
            places = [rng.choice(places)]
        new = dict(files)
        for place in places:
            site = find_site(task, new, place)
            lines = site and edit(rng, task, site)
            if lines is not None and tuple(lines) != site.lines:
                new = with_lines(new, site.path, lines)
        return None if new == dict(files) else new

    return spoil
