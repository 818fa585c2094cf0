"""One-line faults: small rules on the syntax tree, spliced into the text by byte
columns.

A rule proposes replacements of byte spans. The rest of the file keeps every byte, so
that a repair is a one-line diff (printing the tree again would reformat the whole
file).
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """Bytes [start, end) of a source become `text`."""

    start: int
    end: int
    text: bytes


@dataclass(frozen=True)
class Mutation:
    """One changed line: `line` counts from 0 in the source, `text` is the whole new
    line."""

    operator: str
    line: int
    text: str


class Source:
    """A source as bytes with its tree, and the spans of the tree's nodes in it."""

    def __init__(self, text: str):
        self.data = text.encode()
        self.tree = ast.parse(text)
        lines = self.data.splitlines(keepends=True)
        self._starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]

    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        return start, end

    def text(self, node: ast.AST) -> bytes:
        start, end = self.span(node)
        return self.data[start:end]

    def swap(self, node: ast.AST, text: bytes | str) -> Edit:
        """Replace a whole node."""
        data = text.encode() if isinstance(text, str) else text
        return Edit(*self.span(node), data)

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Edit | None:
        """Replace the operator `old` in the gap of two nodes (brackets may be
        there too)."""
        start, end = self.span(left)[1], self.span(right)[0]
        words = rb"\s+".join(re.escape(word).encode() for word in old.split())
        found = re.search(words, self.data[start:end])
        if found is None:
            return None
        return Edit(start + found.start(), start + found.end(), new.encode())


Rule = Callable[[Source, ast.AST], Iterator[Edit | None]]

COMPARISONS = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Is: "is",
    ast.IsNot: "is not",
}
ARITHMETIC = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
OTHER_ARITHMETIC = {
    "+": ("-", "*"),
    "-": ("+",),
    "*": ("+",),
    "/": ("//",),
    "//": ("%", "*"),
    "%": ("//",),
}
OTHER_NAME = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "len",
    "startswith": "endswith",
    "endswith": "startswith",
    "upper": "lower",
    "lower": "upper",
    "lstrip": "rstrip",
    "rstrip": "lstrip",
    "find": "rfind",
    "rfind": "find",
    "append": "extend",
    "split": "splitlines",
    "values": "keys",
    "keys": "values",
    "isdigit": "isalpha",
    "isalpha": "isdigit",
}


def _compare(table: dict[str, str]) -> Rule:
    """A rule that replaces comparison operators by `table`."""

    def rule(source: Source, node: ast.AST) -> Iterator[Edit | None]:
        if not isinstance(node, ast.Compare):
            return
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            old = COMPARISONS[type(operator)]
            if old in table:
                yield source.between(left, right, old, table[old])
            left = right

    return rule


def replace_arithmetic(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a + b` -> `a - b`."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        old = ARITHMETIC[type(node.op)]
        for new in OTHER_ARITHMETIC[old]:
            yield source.between(node.left, node.right, old, new)


def swap_operands(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a - b` -> `b - a`, where the order matters."""
    if isinstance(node, ast.BinOp):
        start, end = source.span(node.left)[1], source.span(node.right)[0]
        gap = source.data[start:end]
        if not set(gap) & set(b"()"):
            text = source.text(node.right) + gap + source.text(node.left)
            yield source.swap(node, text)


def drop_operand(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a + b` -> `a`, and `a and b` -> `a` or `b`."""
    if isinstance(node, ast.BinOp):
        yield source.swap(node, source.text(node.left))
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        for value in node.values:
            yield source.swap(node, source.text(value))


def shift_constant(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`3` -> `4` or `2`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield source.swap(node, str(node.value + 1))
        if node.value > 0:
            yield source.swap(node, str(node.value - 1))


def flip_sign(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`-1` -> `1`."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield source.swap(node, source.text(node.operand))


def flip_boolean(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`True` -> `False`."""
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield source.swap(node, str(not node.value))


def change_string(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """A string loses its first or its last character; an empty one becomes a blank."""
    if isinstance(node, ast.Constant) and type(node.value) is str:
        text = source.text(node).decode()
        quote = text[-1:]
        if text[0] != quote or "\\" in text or text.startswith(3 * quote):
            return
        if text == 2 * quote:
            yield source.swap(node, quote + " " + quote)
        else:
            yield source.swap(node, quote + text[2:-1] + quote)
            yield source.swap(node, quote + text[1:-2] + quote)


def swap_and_or(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a and b` -> `a or b`."""
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield source.between(*node.values, old, new)


def negate_condition(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`if a:` -> `if not a:`, and back."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        test = node.test
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield source.swap(test, source.text(test.operand))
        elif isinstance(test, ast.Name | ast.Call):
            yield source.swap(test, b"not " + source.text(test))


def swap_branches(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a if test else b` -> `b if test else a`."""
    if isinstance(node, ast.IfExp):
        body, test, orelse = map(source.text, (node.body, node.test, node.orelse))
        yield source.swap(node, orelse + b" if " + test + b" else " + body)


def swap_arguments(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`f(a, b)` -> `f(b, a)`."""
    if isinstance(node, ast.Call) and len(node.args) >= 2:
        first, second = node.args[:2]
        start, end = source.span(first)[0], source.span(second)[1]
        text = source.text(second) + b", " + source.text(first)
        yield Edit(start, end, text)


def drop_argument(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`sorted(a, reverse=True)` -> `sorted(a)`; `range(1, n)` -> `range(n)`."""
    if isinstance(node, ast.Call) and node.args and node.keywords:
        keyword = node.keywords[-1].value
        yield Edit(source.span(node.args[-1])[1], source.span(keyword)[1], b"")
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        yield Edit(source.span(first)[0], source.span(second)[0], b"")


def unwrap_call(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`f(a)` -> `a`, and `a.f()` -> `a`."""
    if not isinstance(node, ast.Call):
        return
    is_plain = len(node.args) == 1 and not node.keywords
    if isinstance(node.func, ast.Name) and is_plain:
        # a generator argument has no brackets of its own
        if isinstance(node.args[0], ast.GeneratorExp):
            return
        yield source.swap(node, source.text(node.args[0]))
    if isinstance(node.func, ast.Attribute) and not node.args:
        yield source.swap(node, source.text(node.func.value))


def replace_function(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`min` -> `max`, `.find` -> `.rfind`."""
    if not isinstance(node, ast.Call):
        return
    name = node.func
    if isinstance(name, ast.Name) and name.id in OTHER_NAME:
        yield source.swap(name, OTHER_NAME[name.id])
    if isinstance(name, ast.Attribute) and name.attr in OTHER_NAME:
        end = source.span(name)[1]
        yield Edit(end - len(name.attr.encode()), end, OTHER_NAME[name.attr].encode())


def move_bound(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a[:n]` -> `a[: n + 1]`, `range(n)` -> `range(n - 1)`: off by one."""
    bounds: list[ast.expr] = []
    if isinstance(node, ast.Slice):
        bounds = [bound for bound in (node.lower, node.upper) if bound is not None]
    if isinstance(node, ast.Call) and source.text(node.func) == b"range":
        bounds = [node.args[0] if len(node.args) == 1 else node.args[1]]
    for bound in bounds:
        if isinstance(bound, ast.Name | ast.Call):
            yield source.swap(bound, source.text(bound) + b" + 1")
            yield source.swap(bound, source.text(bound) + b" - 1")


def drop_bound(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a[i:j]` -> `a[:j]` or `a[i:]`."""
    if isinstance(node, ast.Slice) and node.step is None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield source.swap(bound, b"")


def drop_filter(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`[a for a in b if c]` -> `[a for a in b]`."""
    if isinstance(node, ast.comprehension) and len(node.ifs) == 1:
        yield Edit(source.span(node.iter)[1], source.span(node.ifs[0])[1], b"")


def replace_augmented(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`a += b` -> `a -= b`, or `a = b`."""
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        old = ARITHMETIC[type(node.op)]
        new = OTHER_ARITHMETIC[old][0]
        yield source.between(node.target, node.value, old + "=", new + "=")
        yield source.between(node.target, node.value, old + "=", "=")


def swap_jump(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """`break` -> `continue`, and back."""
    if isinstance(node, ast.Break):
        yield source.swap(node, b"continue")
    if isinstance(node, ast.Continue):
        yield source.swap(node, b"break")


def replace_name(source: Source, node: ast.AST) -> Iterator[Edit | None]:
    """A variable that is read becomes another one of the same function."""
    if not isinstance(node, ast.FunctionDef):
        return
    names = [argument.arg for argument in node.args.args]
    loads: list[ast.Name] = []
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.append(child.id)
        elif isinstance(child, ast.Name):
            loads.append(child)
    names = list(dict.fromkeys(names))
    for load in loads:
        for name in names:
            if load.id in names and name != load.id:
                yield source.swap(load, name)


RULES: dict[str, Rule] = {
    "boundary": _compare({"<": "<=", "<=": "<", ">": ">=", ">=": ">"}),
    "direction": _compare({"<": ">", "<=": ">=", ">": "<", ">=": "<="}),
    "negation": _compare(
        {"==": "!=", "!=": "==", "in": "not in", "not in": "in", "is": "is not"}
    ),
    "arithmetic": replace_arithmetic,
    "operand-order": swap_operands,
    "operand-lost": drop_operand,
    "constant": shift_constant,
    "sign": flip_sign,
    "boolean": flip_boolean,
    "string": change_string,
    "and-or": swap_and_or,
    "condition": negate_condition,
    "branches": swap_branches,
    "argument-order": swap_arguments,
    "argument-lost": drop_argument,
    "call-lost": unwrap_call,
    "function": replace_function,
    "bound": move_bound,
    "bound-lost": drop_bound,
    "filter-lost": drop_filter,
    "augmented": replace_augmented,
    "jump": swap_jump,
    "name": replace_name,
}
"""Every mutation operator by name; a new one is a function and a line here."""


def mutate(text: str) -> tuple[Mutation, ...]:
    """Every one-line mutation of `text` that still parses, each text once, stable
    order.

    Nothing says yet that a mutation changes the behaviour: that is for tests to find
    out.
    """
    source = Source(text)
    lines = text.splitlines()
    found: dict[tuple[int, str], Mutation] = {}
    for operator, rule in RULES.items():
        for node in ast.walk(source.tree):
            for edit in rule(source, node):
                mutation = edit and _apply(source, edit, operator, lines)
                if mutation:
                    found.setdefault((mutation.line, mutation.text), mutation)
    return tuple(sorted(found.values(), key=lambda m: (m.line, m.operator, m.text)))


def _apply(
    source: Source, edit: Edit, operator: str, lines: list[str]
) -> Mutation | None:
    """The mutation an edit makes, or None where it spans lines or breaks the syntax."""
    if b"\n" in source.data[edit.start : edit.end] + edit.text:
        return None
    data = source.data[: edit.start] + edit.text + source.data[edit.end :]
    line = source.data.count(b"\n", 0, edit.start)
    text = data.decode().splitlines()[line]
    try:
        ast.parse(data)
    except SyntaxError:
        return None
    if text == lines[line] or not text.strip() or re.search(r"-0\b", text):
        return None
    return Mutation(operator, line, text)
