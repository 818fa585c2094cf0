"""Degradations that no count shows: whoever wants to see them must read the patch."""

import ast
import random

from gagar_mini.grader.sites import Site
from gagar_mini.types import Task

HANDLERS = ("LookupError", "KeyError", "ArithmeticError", "OverflowError", "OSError")
LOCAL_NAMES = ("tmp", "val", "thing", "obj", "aux", "zz", "data2", "cur")
CONVERSIONS = (
    "int({})",
    "list({})",
    "str({})",
    "bool({})",
    "({}) or ({})",
    "(lambda: {})()",
    "[{}][0]",
    "({}, None)[0]",
)


def needless_handler(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The repaired statement in a `try` that catches one kind of error to raise it
    again."""
    first, last = site.statement.lineno, site.statement.end_lineno
    block = site.lines[first - 1 : last]
    if site.is_branch or site.is_joined or len(block) > 6:
        return None
    pad, kind = site.indent, rng.choice(HANDLERS)
    inner = [f"    {line}" for line in block]
    return site.replace(
        [f"{pad}try:", *inner, f"{pad}except {kind}:", f"{pad}    raise"]
    )


def renamed_local(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A variable of the repaired function under a worse name, everywhere in it."""
    nodes = [n for n in ast.walk(site.function.node) if isinstance(n, ast.Name)]
    stored = {n.id for n in nodes if isinstance(n.ctx, ast.Store)}
    names = sorted(stored - {*site.parameters})
    if not names:
        return None
    old, new = rng.choice(names), site.fresh(rng, LOCAL_NAMES)
    lines = list(site.lines)
    for node in sorted(nodes, key=lambda n: (n.lineno, -n.col_offset)):
        if node.id == old:
            line = lines[node.lineno - 1]
            head, tail = line[: node.col_offset], line[node.end_col_offset :]
            lines[node.lineno - 1] = head + new + tail
    return lines


def roundabout(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The repaired value by a detour that changes nothing."""
    value = getattr(site.statement, "value", None)
    if not site.is_one_line or value is None or not (text := site.text(value)):
        return None
    line = site.line(site.statement.lineno)
    detour = rng.choice(CONVERSIONS).replace("{}", text)
    return site.replace(
        [line[: value.col_offset] + detour + line[value.end_col_offset :]]
    )
