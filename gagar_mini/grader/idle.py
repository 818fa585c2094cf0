"""Statements that do nothing: noise that looks like code.

Only what is certain without running it: a value that nobody takes, a branch that is
never taken, lines that are never reached. A call may do anything, so none is idle.
"""

import ast
from collections.abc import Iterator, Sequence
from types import UnionType

from gagar_mini.grader.syntax import is_bare_string

EFFECTS = ast.Call | ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr
"""Expressions that may do more than have a value."""

RAISING = ast.Subscript | ast.Attribute
"""Expressions that may be there for the error that they raise."""

ENDS = ast.Return | ast.Raise | ast.Continue | ast.Break
"""Statements after which a block does not go on."""


def idle_statements(nodes: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Idle statements in the blocks of `nodes`. Strings are comments, counted there."""
    for node in nodes:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield from _idle_in_block(block)


def _idle_in_block(block: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    is_alone = sum(not is_bare_string(statement) for statement in block) == 1
    has_ended = False
    for statement in block:
        # `return` and then `yield` is how a function becomes an empty generator
        is_unreached = has_ended and not _holds(statement, ast.Yield | ast.YieldFrom)
        if is_unreached or is_idle(statement, is_alone=is_alone):
            yield statement
        has_ended |= isinstance(statement, ENDS)


def is_idle(statement: ast.stmt, *, is_alone: bool) -> bool:
    """Whether a statement does nothing. A placeholder (`pass`, `...`) that is all of a
    block is needed."""
    match statement:
        case ast.Pass():
            return not is_alone
        case ast.Expr(value=ast.Constant(value=value)) if value is ...:
            return not is_alone
        case ast.Expr(value=value):
            return not is_bare_string(statement) and not _holds(
                value, EFFECTS | RAISING
            )
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=same)):
            return name == same
        case ast.If(test=ast.Constant()):
            return True
        case ast.While(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.Constant(value=value)):
            return bool(value)  # `assert False` says that nobody comes here
    return False


def _holds(tree: ast.AST, kinds: type[ast.AST] | UnionType) -> bool:
    return any(isinstance(node, kinds) for node in ast.walk(tree))
