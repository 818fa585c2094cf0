"""Neutral ways to write a repair: as good as the gold patch, mostly longer.

A grader that likes short patches prefers a one-line hack to any of these. Each changes
the repaired statement alone, keeps what it does, and adds nothing that a reviewer would
object to.
"""

import ast
import random

from gagar_mini.grader.sites import Site, Spoil, at_sites
from gagar_mini.types import Task

RESULTS = ("result", "answer", "value", "found", "outcome", "wanted")
PARTS = ("part", "first", "left", "base", "start_value", "main")
CONDITIONS = ("is_met", "holds", "matches", "applies")
ITERABLES = ("sequence", "candidates", "steps", "entries")
PLAIN = ast.Name | ast.Constant


def name_result(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """`result = ...` and then `return result`."""
    value = getattr(site.statement, "value", None)
    is_return = isinstance(site.statement, ast.Return) and site.is_one_line
    if not is_return or value is None or isinstance(value, PLAIN):
        return None
    name = site.fresh(rng, RESULTS)
    pad = site.indent
    return site.replace([f"{pad}{name} = {site.text(value)}", f"{pad}return {name}"])


def name_part(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A name for the operand that is evaluated first."""
    value = getattr(site.statement, "value", None)
    if not site.is_one_line or value is None:
        return None
    match value:
        case ast.BinOp(left=part) | ast.Compare(left=part):
            pass
        case ast.BoolOp(values=[part, *_]) | ast.Call(args=[part, *_]):
            pass
        case ast.Subscript(value=part) | ast.Call(func=ast.Attribute(value=part)):
            pass
        case _:
            return None
    if isinstance(part, PLAIN | ast.GeneratorExp | ast.Starred | ast.Lambda):
        return None
    name, line = site.fresh(rng, PARTS), site.line(site.statement.lineno)
    rest = line[: part.col_offset] + name + line[part.end_col_offset :]
    return site.replace([f"{site.indent}{name} = {site.text(part)}", rest])


def name_condition(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A name for the condition of an `if`, or for what a loop goes over."""
    match site.statement:
        case ast.If(test=part) if not site.is_branch:
            names = CONDITIONS
        case ast.For(iter=part):
            names = ITERABLES
        case _:
            return None
    if isinstance(part, PLAIN) or not site.text(part):
        return None
    name, number = site.fresh(rng, names), site.statement.lineno
    line = site.line(number)
    header = line[: part.col_offset] + name + line[part.end_col_offset :]
    named = f"{site.indent}{name} = {site.text(part)}"
    return [*site.lines[: number - 1], named, header, *site.lines[number:]]


def break_line(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The value in parentheses, on a line of its own; an operand a line if it fits."""
    value = getattr(site.statement, "value", None)
    if not site.is_one_line or value is None or isinstance(value, PLAIN):
        return None
    line, pad = site.line(site.statement.lineno), site.indent
    text = site.text(value)
    if not text or line[value.end_col_offset :].strip():
        return None
    inner = [f"{pad}    {text}"]
    if isinstance(value, ast.BinOp) and rng.random() < 0.6:
        cut = value.left.end_col_offset - value.col_offset
        if text[:cut].count("(") == text[:cut].count(")"):
            inner = [f"{pad}    {text[:cut]}", f"{pad}    {text[cut:].strip()}"]
    return site.replace([line[: value.col_offset] + "(", *inner, pad + ")"])


def spell_conditional(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """`if` and `else` over lines for a conditional expression."""
    if not site.is_one_line:
        return None
    match site.statement:
        case ast.Return(value=ast.IfExp() as choice):
            head = "return "
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.IfExp() as choice):
            head = f"{name} = "
        case _:
            return None
    pad = site.indent
    then = [f"{pad}if {site.text(choice.test)}:"]
    then.append(f"{pad}    {head}{site.text(choice.body)}")
    other = f"{head}{site.text(choice.orelse)}"
    if head == "return " and rng.random() < 0.6:
        return site.replace([*then, pad + other])
    return site.replace([*then, f"{pad}else:", f"{pad}    {other}"])


def spell_loop(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A loop for a list comprehension or a sum over a generator."""
    if not site.is_one_line or not isinstance(site.statement, ast.Return):
        return None
    match site.statement.value:
        case ast.ListComp(elt=element, generators=[loop]):
            start, step = "[]", "{}.append({})"
        case ast.Call(
            func=ast.Name(id="sum"),
            args=[ast.GeneratorExp(elt=element, generators=[loop])],
        ):
            start, step = "0", "{} += {}"
        case _:
            return None
    name, pad = site.fresh(rng, RESULTS), site.indent
    block = [f"{pad}{name} = {start}"]
    block.append(f"{pad}for {site.text(loop.target)} in {site.text(loop.iter)}:")
    inner = pad + "    "
    if loop.ifs:
        tests = " and ".join(site.text(test) for test in loop.ifs)
        block.append(f"{inner}if {tests}:")
        inner += "    "
    block.append(inner + step.format(name, site.text(element)))
    return site.replace([*block, f"{pad}return {name}"])


def spell_boolean(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """Two returns for an `and` or an `or` that begins with a comparison."""
    value = getattr(site.statement, "value", None)
    if not site.is_one_line or not isinstance(site.statement, ast.Return):
        return None
    pad = site.indent
    match value:
        case ast.BoolOp(op=operator, values=[ast.Compare() as first, second]):
            is_or = isinstance(operator, ast.Or)
            test = site.text(first) if is_or else f"not ({site.text(first)})"
            block = [f"{pad}if {test}:", f"{pad}    return {is_or}"]
            return site.replace([*block, f"{pad}return {site.text(second)}"])
    return None


def spell_assignment(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """One name a line for `a, b = x, y`; `x = x + y` for `x += y`."""
    if not site.is_one_line:
        return None
    pad = site.indent
    match site.statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)
        ) if len(targets) == len(values) == 2:
            name = site.fresh(rng, PARTS)
            return site.replace(
                [
                    f"{pad}{name} = {site.text(values[0])}",
                    f"{pad}{site.text(targets[1])} = {site.text(values[1])}",
                    f"{pad}{site.text(targets[0])} = {name}",
                ]
            )
        case ast.AugAssign(target=target, value=value):
            line, to = site.line(site.statement.lineno), site.text(target)
            sign = line[target.end_col_offset : value.col_offset].strip(" =")
            text = site.text(value)
            if not isinstance(value, PLAIN | ast.Call | ast.Subscript):
                text = f"({text})"
            return site.replace([f"{pad}{to} = {to} {sign} {text}"])
    return None


CLEAN_WAYS: dict[str, Spoil] = {
    edit.__name__: at_sites(edit)
    for edit in (
        name_result,
        name_part,
        name_condition,
        break_line,
        spell_conditional,
        spell_loop,
        spell_boolean,
        spell_assignment,
    )
}
"""Name -> another way to write the repair, or None where it does not fit."""
