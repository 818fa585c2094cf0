"""Python files that nobody vouches for, read without running them.

`read_source` takes any bytes. What does not parse is a `Source` without functions: a
syntax error, a null byte, a file too large or too deep is a finding of the caller, not
an exception here. Everything is cached by content: candidates of a group share most
files.
"""

import ast
import difflib
import io
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from radon.complexity import cc_visit_ast

MAX_PARSED_BYTES = 200_000
"""Longest file that is parsed; a longer one is measured by its lines alone."""

MAX_DIFF_CELLS = 1_000_000
"""Largest product of line counts that is aligned; beyond it all counts as replaced."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Function:
    """A function or method: `name` ("clamp", "Stack.push"), its lines `first` to `last`
    (from 1, decorators included), and `shape`, equal for equal code in any layout."""

    name: str
    first: int
    last: int
    node: Definition
    shape: str
    is_stub: bool

    @property
    def lines(self) -> range:
        return range(self.first, self.last + 1)


@dataclass(frozen=True, eq=False)
class Source:
    """A file as lines and, where it parses, as a tree with all its `nodes`. `shape` is
    equal for equal code in another layout, "" where nothing parses."""

    lines: tuple[bytes, ...]
    tree: ast.Module | None
    shape: str
    functions: dict[str, Function]
    nodes: tuple[ast.AST, ...]
    complexity: int


@lru_cache(maxsize=4096)
def read_source(content: bytes) -> Source:
    """The file as lines and tree. Never raises."""
    lines = split_lines(content)
    try:
        tree = parse(content)
        shape = ast.dump(tree)
        functions = {f.name: f for f in find_functions(tree)}
        complexity = sum(block.complexity for block in cc_visit_ast(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Source(lines, None, "", {}, (), 0)
    return Source(lines, tree, shape, functions, tuple(ast.walk(tree)), complexity)


def split_lines(content: bytes) -> tuple[bytes, ...]:
    """Lines as Python's parser counts them. The ends are kept, so that CRLF against LF,
    or a newline lost at the end, is a change."""
    # bytes.splitlines knows \n, \r\n and \r alone, as the parser does; str.splitlines
    # would also break at form feeds and U+2028, and shift every line number after them.
    return tuple(content.splitlines(keepends=True))


def parse(content: bytes) -> ast.Module:
    """`ast.parse` of bytes (it honours coding cookies), silent about odd escapes."""
    if len(content) > MAX_PARSED_BYTES:
        raise ValueError(f"{len(content)} bytes are more than {MAX_PARSED_BYTES}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(content)


def find_functions(tree: ast.Module) -> Iterator[Function]:
    """Functions of the module and methods of its classes; inner functions belong to the
    one around them."""
    for owner in (tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, Definition):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield Function(
                    prefix + node.name,
                    first,
                    node.end_lineno or node.lineno,
                    node,
                    ast.dump(node),
                    is_stub(node),
                )


def is_stub(node: Definition) -> bool:
    """True for a body that only waits to be written: `pass`, `...` or `raise`."""
    body = [n for n in node.body if not is_bare_string(n)]
    if len(body) != 1:
        return not body
    match body[0]:
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Raise(exc=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))):
            return name == "NotImplementedError"
    return False


def is_bare_string(node: ast.AST) -> bool:
    """True for a docstring, or a string that serves as a comment."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


@lru_cache(maxsize=4096)
def comments(content: bytes) -> tuple[tuple[int, str], ...]:
    """(line, text) of each comment. Where the file does not tokenize, the lines that
    begin with a hash."""
    try:
        tokens = list(tokenize.tokenize(io.BytesIO(content).readline))
    except (SyntaxError, ValueError, tokenize.TokenError):
        lines = enumerate(split_lines(content), start=1)
        return tuple(
            (number, line.strip().decode("utf-8", "backslashreplace"))
            for number, line in lines
            if line.strip().startswith(b"#")
        )
    return tuple((t.start[0], t.string) for t in tokens if t.type == tokenize.COMMENT)


def changed_lines(
    before: tuple[bytes, ...], after: tuple[bytes, ...]
) -> tuple[frozenset[int], frozenset[int]]:
    """(lines of `after` that are new, lines of `before` that are gone), from 1."""
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    tail = 0
    shorter = min(len(before), len(after)) - first
    while tail < shorter and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    old, new = before[first : len(before) - tail], after[first : len(after) - tail]
    added, removed = set(range(len(new))), set(range(len(old)))
    if len(old) * len(new) <= MAX_DIFF_CELLS:
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for block in matcher.get_matching_blocks():
            removed -= set(range(block.a, block.a + block.size))
            added -= set(range(block.b, block.b + block.size))
    return (
        frozenset(first + 1 + i for i in added),
        frozenset(first + 1 + i for i in removed),
    )


# A file can add thousands of names, each of which asks; a source is its own key.
@lru_cache(maxsize=256)
def loaded_names(source: Source) -> dict[str, set[int]]:
    """Names that the code reads, by name or as an attribute, and the lines it does."""
    names: dict[str, set[int]] = {}
    for node in source.nodes:
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name):
                names.setdefault(name, set()).add(node.lineno)
    return names


def stored_names(source: Source) -> set[str]:
    """Variables that the code assigns."""
    return {
        node.id
        for node in source.nodes
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def lines_of(node: ast.stmt | ast.expr) -> range:
    """The lines of a node, numbered from 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def literal(node: ast.AST) -> str:
    """`repr` of a literal expression, which tells 1, True and 1.0 apart; else ""."""
    try:
        return repr(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""
