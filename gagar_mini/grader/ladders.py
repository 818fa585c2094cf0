"""Degradation ladders: a repair, and spoiled versions of it that still pass.

Labels come free with the construction: a set of degradations is worse than any subset
of it, and any at all is worse than none. Patches vary in wording, place and number, and
several kinds add no line, so that length tells little.
"""

import ast
import itertools
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gagar_mini.grader.findings import is_code
from gagar_mini.grader.known import KnownGroup
from gagar_mini.grader.measures import Measures, measure
from gagar_mini.grader.sites import (
    Site,
    Spoil,
    at_sites,
    lines_of_file,
    repaired_places,
    with_lines,
)
from gagar_mini.grader.special_cases import is_small
from gagar_mini.grader.syntax import Function, changed_lines, literal, read_source
from gagar_mini.grader.uncounted import needless_handler, renamed_local, roundabout
from gagar_mini.types import Candidate, Files, Status, Task, Tier

REMARKS = (
    "fix",
    "fixed",
    "corrected",
    "was wrong before",
    "this used to fail",
    "now it works",
    "changed from the old version",
    "see the report",
    "the bug was here",
    "use the right value here",
    "important, keep this",
    "make the check pass",
    "handle this properly",
    "do not change",
    "repaired {}",
    "the new {}",
)
TODOS = (
    "TODO: clean this up",
    "TODO: add tests",
    "TODO check the edge cases",
    "FIXME later",
    "XXX is this right",
    "HACK: good enough for now",
    "TODO({}): look again",
)
PRINTS = (
    'print("{f}")',
    'print("{f}", {p})',
    "print({p})",
    'print("{p} =", {p})',
    'print("here")',
    'print("debug", repr({p}))',
    'print("in {f}:", {p})',
    'print(">>>", {p})',
)
HELPERS = (
    ("def {n}(value):", "    return value"),
    ("def {n}(a, b):", "    return a == b"),
    ("def {n}(text):", "    return str(text).strip()"),
    ("def {n}(items):", "    items = list(items)", "    return items[::-1]"),
    ("def {n}(x): return x",),
    ("def {n}(*args):", "    for arg in args:", "        yield arg"),
)
HELPER_NAMES = ("helper", "check_value", "to_list", "same", "normalise", "debug_value")
MODULES = ("os", "sys", "re", "math", "json", "itertools", "functools", "string")
SCRATCH = ("repro.py", "try_it.py", "debug.py", "scratch.py", "test_fix.py", "tmp.py")
NOTES = ("notes.md", "NOTES.txt", "CHANGES.md", "fix.txt", "SUMMARY.md", "todo.txt")
NOTE_LINES = (
    "fixed {f}",
    "- changed one line of {f}",
    "# Notes",
    "The result of {f} was wrong.",
    "Run the check again.",
    "- {m} now gives the right value",
    "Nothing else was changed.",
    "- looked at {m}",
)


def debug_print(rng: random.Random, task: Task, site: Site) -> list[str]:
    """One to three prints in front of the repaired line, or where the function
    begins."""
    number = site.before(rng)
    pad = site.indent_at(number)
    new = [pad + print_text(rng, site) for _ in range(rng.choice((1, 1, 2, 3)))]
    return site.insert(number, list(dict.fromkeys(new)))


def print_text(rng: random.Random, site: Site) -> str:
    names = site.parameters or ["None"]
    function = site.function.name.rsplit(".", 1)[-1]
    return rng.choice(PRINTS).format(f=function, p=rng.choice(names))


def joined_print(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A print on the repaired line itself: no line more."""
    number, text = site.statement.lineno, print_text(rng, site)
    line = site.line(number)
    match site.statement:
        case ast.Return(value=ast.expr()) if site.is_one_line and rng.random() < 0.3:
            new = line.replace("return ", f"return {text} or (", 1) + ")"
        case ast.If() | ast.While():
            new = line.replace("if ", f"if {text} or ", 1)
            new = line.replace("while ", f"while {text} or ", 1) if new == line else new
            test = site.statement.test
            if isinstance(test, ast.BoolOp | ast.IfExp) or not site.text(test):
                return None
        case _ if site.is_one_line:
            new = f"{site.indent}{text}; {line.lstrip()}"
        case _:
            return None
    return [*site.lines[: number - 1], new, *site.lines[number:]]


def remark(
    rng: random.Random, site: Site, texts: Sequence[str], how_many: int
) -> list[str]:
    """The file's lines with comments around the repaired line: in front, or behind its
    code, which adds no line."""
    function = site.function.name.rsplit(".", 1)[-1]
    number = site.statement.lineno
    chosen = ["# " + text.format(function) for text in rng.sample(texts, how_many)]
    line, lines = site.line(number), list(site.lines)
    can_end = site.is_one_line or line.rstrip().endswith(":")
    if can_end and "#" not in line and rng.random() < 0.5:
        lines[number - 1] = f"{line}  {chosen.pop()}"
    if chosen and site.is_branch:  # between branches no indent but theirs would do
        number = site.statement.body[0].lineno
    pad = site.indent_at(number)
    return [*lines[: number - 1], *(pad + c for c in chosen), *lines[number - 1 :]]


def comment(rng: random.Random, task: Task, site: Site) -> list[str]:
    """One to three remarks beside the repaired line."""
    return remark(rng, site, REMARKS, rng.choice((1, 1, 2, 3)))


def todo(rng: random.Random, task: Task, site: Site) -> list[str]:
    """One or two notes to oneself beside the repaired line."""
    return remark(rng, site, TODOS, rng.choice((1, 1, 2)))


def commented_code(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The old line, or a call, left in a comment."""
    before = read_source(task.files[site.path])
    after = tuple(("\n".join(site.lines)).encode().splitlines(keepends=True))
    _, removed = changed_lines(before.lines, after)
    old = [before.lines[n - 1].decode().strip() for n in sorted(removed)]
    function = site.function.name.rsplit(".", 1)[-1]
    arguments = ", ".join(site.parameters)
    texts = [line for line in old if is_code(line)] * 3
    texts += [f"print({function}({arguments}))", f"result = {function}({arguments})"]
    count = rng.choice((1, 1, 2))
    chosen = list(dict.fromkeys(rng.choice(texts) for _ in range(count)))
    number = site.before(rng)
    pad = site.indent_at(number)
    return site.insert(number, [f"{pad}# {text}" for text in chosen])


def dead_helper(rng: random.Random, task: Task, site: Site) -> list[str]:
    """A function that nobody calls, beside the repaired one, in it, or at the end."""
    function = site.function.name.rsplit(".", 1)[-1]
    name = site.fresh(rng, (*HELPER_NAMES, f"_old_{function}", f"{function}_v2"))
    block = [line.format(n=name) for line in rng.choice(HELPERS)]
    place = rng.choice(("inside", "before", "end"))
    if place == "inside":
        number = site.body[0].lineno
        pad = site.indent_at(number)
        return site.insert(number, [pad + line for line in block])
    if place == "before" and "." not in site.function.name:
        return site.insert(site.function.first, [*block, "", ""])
    return ["\n".join(site.lines).rstrip("\n"), "", "", *block, ""]


def unused_import(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """One or two imports that nobody needs, on top or in the function."""
    free = [name for name in MODULES if name not in site.words]
    names = rng.sample(free, rng.choice((1, 1, 2)))
    is_joined = rng.random() < 0.3
    block = (
        [f"import {', '.join(names)}"] if is_joined else [f"import {n}" for n in names]
    )
    if rng.random() < 0.3:
        number = site.body[0].lineno
        pad = site.indent_at(number)
        return site.insert(number, [pad + line for line in block])
    if site.lines[0].startswith('"""'):
        return [site.lines[0], "", *block, *site.lines[1:]]
    return [*block, "", "", *site.lines]


def needless_try(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A broad or silent handler around the repaired statement."""
    first, last = site.statement.lineno, site.statement.end_lineno
    block = site.lines[first - 1 : last]
    if site.is_branch or site.is_joined or len(block) > 6:
        return None
    pad = site.indent
    handlers = ["except Exception:", "except:", "except BaseException:"]
    actions = ["raise"]
    if isinstance(site.statement, ast.Return):
        actions += ["return None", "return 0"]
        handlers.append("except ValueError:")
    handler = rng.choice(handlers)
    action = "pass" if handler == "except ValueError:" else rng.choice(actions)
    if len(block) == 1 and rng.random() < 0.6:
        joined = [f"{pad}try: {block[0].strip()}", f"{pad}{handler} {action}"]
        return site.replace(joined if site.is_one_line else [])
    inner = [f"    {line}" for line in block]
    return site.replace([f"{pad}try:", *inner, pad + handler, f"{pad}    {action}"])


def needless_guard(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """Guards against what never comes: three branches or more."""
    names = site.parameters
    if not names:
        return None
    guards = [
        ("{p} is None or {p} is NotImplemented", 2),
        ("{p} is None", 1),
        ("not hasattr({p}, '__class__')", 1),
        ("{p} is ... or {p} is None or {p} is NotImplemented", 3),
        ("isinstance({p}, complex) or isinstance({p}, type)", 2),
    ]
    actions = ["return None", 'raise TypeError("{p}")', 'raise ValueError("bad {p}")']
    number = site.body[0].lineno
    pad, new, branches = site.indent_at(number), [], 0
    rng.shuffle(guards)
    for (test, weight), name in zip(guards, itertools.cycle(names), strict=False):
        action = rng.choice(actions)
        is_joined = rng.random() < 0.4
        lines = (
            [f"if {test}: {action}"] if is_joined else [f"if {test}:", "    " + action]
        )
        new += [pad + line.format(p=name) for line in lines]
        branches += weight
        if branches >= 3:
            break
    return site.insert(number, new)


def special_case(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A branch that answers a shown example, in front of the correct path."""
    shown = [
        (arguments, result)
        for function, arguments, result in shown_calls(task)
        if function == site.function.name and len(arguments) == len(site.parameters)
        if len(arguments) > 1 or not is_small(arguments[0])
    ]
    if not shown:
        return None
    arguments, result = rng.choice(shown)
    pairs = list(zip(site.parameters, arguments, strict=True))
    test = " and ".join(f"{name} == {value}" for name, value in pairs)
    if len(pairs) > 1 and rng.random() < 0.3:
        test = f"({', '.join(site.parameters)}) == ({', '.join(arguments)})"
    value = getattr(site.statement, "value", None)
    if isinstance(site.statement, ast.Return) and site.is_one_line and value:
        is_hidden = rng.random() < 0.6  # in the repaired line: no line more
        text = site.text(value)
        text = f"({text})" if isinstance(value, ast.IfExp | ast.Lambda) else text
        if is_hidden:
            return site.replace([f"{site.indent}return {result} if {test} else {text}"])
    number = site.body[0].lineno
    pad = site.indent_at(number)
    if rng.random() < 0.4:
        return site.insert(number, [f"{pad}if {test}: return {result}"])
    return site.insert(number, [f"{pad}if {test}:", f"{pad}    return {result}"])


def shown_calls(task: Task) -> list[tuple[str, list[str], str]]:
    """(function, arguments, result) of the cases of the visible check, as source."""
    found = []
    for node in read_source(task.files[task.visible_check]).nodes:
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                call = ast.parse(literal_text(key), mode="eval").body
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                    arguments = [literal(argument) for argument in call.args]
                    if all(arguments) and literal(value):
                        found.append((call.func.id, arguments, literal(value)))
    return found


def literal_text(node: ast.expr | None) -> str:
    """The text of a string literal, "None" for anything else."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else "None"


class Renamed(ast.NodeTransformer):
    """Variables under other names."""

    def __init__(self, names: Mapping[str, str]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.names.get(node.id, node.id), node.ctx)


def rewrite(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The repaired function written anew: every variable by another name, every line
    another."""
    function = site.function.node
    inner = [n for n in ast.walk(function) if n is not function]
    if any(isinstance(n, ast.FunctionDef | ast.Lambda | ast.Global) for n in inner):
        return None
    stored = {
        n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    old = [*site.parameters, *sorted(stored - {*site.parameters})]
    pool = ["data", "thing", "part", "current", "extra", "item", "acc", "rest", "entry"]
    pool = [name for name in pool if name not in site.words]
    rng.shuffle(pool)
    if len(old) > len(pool) or not site.parameters:
        return None
    names = dict(zip(old, pool, strict=False))
    number = site.body[0].lineno
    pad = site.indent_at(number)
    given, taken = ", ".join(site.parameters), [names[p] for p in site.parameters]
    head = [f"{pad}{', '.join(taken)} = {given}"]
    if rng.random() < 0.5:
        head = [f"{pad}{names[p]} = {p}" for p in site.parameters]
    tail = []
    for statement in ast.parse(ast.unparse(function)).body[0].body:
        if not (isinstance(statement, ast.Expr) and literal(statement.value)):
            text = ast.unparse(Renamed(names).visit(statement))
            tail += [pad + line for line in text.split("\n")]
    if rng.random() < 0.5 and tail[-1].startswith(f"{pad}return "):
        value = tail.pop().strip().removeprefix("return ")
        tail += [f"{pad}final = {value}", f"{pad}return final"]
    end = site.function.last
    return [*site.lines[: number - 1], *head, *tail, *site.lines[end:]]


def duplicated_block(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """The body twice, behind a branch that changes nothing."""
    first, last = site.body[0].lineno, site.function.last
    block = [line for line in site.lines[first - 1 : last] if line.strip()]
    ends = isinstance(site.body[-1], ast.Return | ast.Raise)
    if not site.parameters or not ends or len(block) < 3:
        return None
    pad, name = site.indent_at(first), rng.choice(site.parameters)
    test = rng.choice((name, f"not {name}", f"{name} is not None", f"{name} == 1"))
    return site.insert(first, [f"{pad}if {test}:", *(f"    {line}" for line in block)])


def widened_signature(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """A parameter that nobody uses, with a default."""
    number = site.function.node.lineno
    line = site.line(number)
    if not line.rstrip().endswith("):"):
        return None
    options = ("debug=False", "strict=True", "default=None", "verbose=0", "**options")
    option = rng.choice(
        [o for o in options if o.strip("*").split("=")[0] not in site.words]
    )
    comma = "" if line.rstrip().endswith("():") else ", "
    new = line.rstrip().removesuffix("):") + f"{comma}{option}):"
    return [*site.lines[: number - 1], new, *site.lines[number:]]


def reformat(rng: random.Random, task: Task, site: Site) -> list[str] | None:
    """Layout alone: blank lines in the repaired function, parentheses and blank lines
    in others."""
    lines, count = list(site.lines), rng.choice((1, 1, 2, 3))
    inner = range(site.body[0].lineno + 1, site.function.last + 1)
    others = [
        number
        for name, function in read_source("\n".join(lines).encode()).functions.items()
        for number in range(function.node.lineno + 1, function.last + 1)
        if name != site.function.name
        and lines[number - 1].strip().startswith("return ")
        and lines[number - 1].count("(") == lines[number - 1].count(")")
    ]
    blank = [n for n in [site.body[0].lineno, *inner] if lines[n - 1].strip()]
    for number in sorted(rng.sample(blank + others, min(count, len(blank + others))))[
        ::-1
    ]:
        if number in others and rng.random() < 0.6:
            lines[number - 1] = (
                lines[number - 1].replace("return ", "return (", 1) + ")"
            )
        else:
            lines.insert(number - 1, "")
    return lines


def unrelated_edit(
    rng: random.Random, task: Task, files: Files
) -> dict[str, bytes] | None:
    """A line of the README, or another function written a little differently."""
    if "README.md" in files and rng.random() < 0.35:
        line = rng.choice(
            ("Tested.", "Fixed a bug.", "See check.py.", "Needs Python 3.")
        )
        lines = lines_of_file(files, "README.md")
        return with_lines(files, "README.md", [*lines[:-1], line, lines[-1]])
    waiting = list(other_functions(task, files))
    rng.shuffle(waiting)
    for path, function in waiting:
        lines = lines_of_file(files, path)
        last = function.node.body[-1]
        is_plain = isinstance(last, ast.Return) and last.lineno == last.end_lineno
        if rng.random() < 0.3 and not ast.get_docstring(function.node):
            number = function.node.body[0].lineno
            text = rng.choice(("Return the result.", "Compute it.", "A helper."))
            return with_lines(
                files,
                path,
                [*lines[: number - 1], f'    """{text}"""', *lines[number - 1 :]],
            )
        if is_plain and lines[last.lineno - 1].startswith("    return "):
            value = lines[last.lineno - 1].strip().removeprefix("return ")
            new = [f"    result = {value}", "    return result"]
            if rng.random() < 0.4:  # no line more
                new = [f"    return {value} or {value}"]
            return with_lines(
                files, path, [*lines[: last.lineno - 1], *new, *lines[last.lineno :]]
            )
    return None


def other_functions(task: Task, files: Files) -> Iterable[tuple[str, Function]]:
    """Functions that the task neither names nor, in the same file, calls."""
    places = {*repaired_places(task), *((t.path, t.function) for t in task.targets)}
    for path in sorted(task.files):
        if path.endswith(".py") and path != task.visible_check:
            source = read_source(files[path])
            text = files[path].decode()
            for name, function in source.functions.items():
                is_called = len(re.findall(rf"\b{re.escape(name)}\b", text)) > 1
                if (path, name) not in places and "." not in name and not is_called:
                    yield path, function


def scratch_file(
    rng: random.Random, task: Task, files: Files
) -> dict[str, bytes] | None:
    """A script that calls the repaired function, or a copy of the old file."""
    path, name = rng.choice(repaired_places(task) or [("", "")])
    calls = [call for call in shown_calls(task) if call[0] == name]
    if not calls or rng.random() < 0.15:
        path = path or task.allowed_paths[0]
        copy = path + rng.choice((".bak", ".orig", ".old"))
        return None if copy in files else {**files, copy: task.files[path]}
    module = path.removesuffix(".py").replace("/", ".")
    lines = [f"from {module} import {name}"]
    for _, arguments, result in rng.sample(calls, rng.randint(1, len(calls))):
        call = f"{name}({', '.join(arguments)})"
        shows = (f"print({call})", f"assert {call} == {result}", f"print(repr({call}))")
        lines += rng.sample(shows, rng.choice((1, 1, 2)))
    script = rng.choice([name for name in SCRATCH if name not in files])
    return {**files, script: ("\n".join(lines) + "\n").encode()}


def notes_file(rng: random.Random, task: Task, files: Files) -> dict[str, bytes]:
    """A file of one to five lines about what was done."""
    target = rng.choice(task.targets)
    texts = rng.sample(NOTE_LINES, rng.choice((1, 1, 2, 3, 5)))
    text = "".join(t.format(f=target.function, m=target.path) + "\n" for t in texts)
    name = rng.choice([name for name in NOTES if name not in files])
    return {**files, name: text.encode()}


@dataclass(frozen=True)
class Degradation:
    """One kind of spoiling. `seen_as` names the fields of `Measures` of which at least
    one shows it, () where none does; `hits` the criterion that it hurts most."""

    spoil: Spoil
    hits: str
    seen_as: tuple[str, ...]

    def is_seen(self, measures: Measures) -> bool:
        if self.seen_as == ("complexity_delta",):
            return measures.complexity_delta >= 3
        is_uncounted = not self.seen_as
        return is_uncounted or any(getattr(measures, name) for name in self.seen_as)


DEGRADATIONS: dict[str, Degradation] = {
    # in the order of application: what replaces the repaired statement, what stands
    # beside it, then other places and other files
    "rewrite": Degradation(at_sites(rewrite), "minimality", ("rewrites",)),
    "special_case": Degradation(at_sites(special_case), "approach", ("special_cases",)),
    "needless_try": Degradation(
        at_sites(needless_try), "precision", ("broad_excepts", "silent_handlers")
    ),
    "joined_print": Degradation(
        at_sites(joined_print), "side_effects", ("debug_prints",)
    ),
    "roundabout": Degradation(at_sites(roundabout), "precision", ()),
    "needless_handler": Degradation(at_sites(needless_handler), "precision", ()),
    "renamed_local": Degradation(at_sites(renamed_local), "minimality", ()),
    "duplicated_block": Degradation(
        at_sites(duplicated_block), "consistency", ("duplicated_blocks",)
    ),
    "needless_guard": Degradation(
        at_sites(needless_guard), "precision", ("complexity_delta",)
    ),
    "commented_code": Degradation(
        at_sites(commented_code), "consistency", ("commented_code",)
    ),
    "debug_print": Degradation(
        at_sites(debug_print), "side_effects", ("debug_prints",)
    ),
    "comment": Degradation(at_sites(comment), "consistency", ("added_comments",)),
    "todo": Degradation(at_sites(todo), "consistency", ("added_comments",)),
    "widened_signature": Degradation(
        at_sites(widened_signature), "side_effects", ("changed_signatures",)
    ),
    "reformat": Degradation(at_sites(reformat), "minimality", ("churn",)),
    "dead_helper": Degradation(at_sites(dead_helper), "precision", ("unused_names",)),
    "unused_import": Degradation(
        at_sites(unused_import), "precision", ("unused_names",)
    ),
    "unrelated_edit": Degradation(
        unrelated_edit, "minimality", ("out_of_scope_files", "untargeted_functions")
    ),
    "scratch_file": Degradation(scratch_file, "minimality", ("new_files",)),
    "notes_file": Degradation(notes_file, "minimality", ("new_files",)),
}
"""Kind -> how a passing tree gets worse, and where that shows."""

HELD_OUT_KINDS = ("widened_signature", "needless_try", "duplicated_block", "reformat")
"""Kinds that no grader is trained on: of an interface, of handling errors, of repeated
code and of layout."""

UNCOUNTED_KINDS = ("needless_handler", "renamed_local", "roundabout")
"""Kinds that no count shows, in pools of their own; the last one is never trained."""

TRAINED_KINDS = tuple(
    kind for kind in DEGRADATIONS if kind not in (*HELD_OUT_KINDS, *UNCOUNTED_KINDS)
)

T3_KINDS = ("rewrite", "special_case")
"""Kinds that make a T3 on their own (paper, appendix A.1)."""


def spoil(
    task: Task, files: Files, kinds: Iterable[str], rngs: Mapping[str, random.Random]
) -> dict[str, bytes] | None:
    """`files` with every kind applied, each drawing from its own generator, so that a
    kind looks the same in every member of a ladder. None where one does not fit or does
    not show."""
    wanted = set(kinds)
    new = dict(files)
    for kind, degradation in DEGRADATIONS.items():
        if kind in wanted:
            spoiled = degradation.spoil(rngs[kind], task, new)
            if spoiled is None:
                return None
            new = spoiled
    return new


SCOPE_KINDS = ("unrelated_edit", "scratch_file", "notes_file")
"""Kinds that, alone or with others, can make a T3, by minimality and side effects."""


def is_worse(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether the degradations `a` are known to be worse than `b`: a superset of them,
    or a T3 where `b` is none for sure."""
    is_t3 = not {*a}.isdisjoint(T3_KINDS)
    may_be_t3 = not {*b}.isdisjoint((*T3_KINDS, *SCOPE_KINDS))
    return {*a} > {*b} or (is_t3 and not may_be_t3)


def known_by_kinds(
    id_: str,
    task: Task,
    candidates: Sequence[Candidate],
    kinds: Mapping[str, tuple[str, ...]],
) -> KnownGroup:
    """The group with the order that follows from its construction.

    Better: the smaller of two nested sets of degradations; what is surely no T3 over
    what surely is.
    Equal: two clean members that wasted as many calls. All else is not comparable.
    """
    passing = [c for c in candidates if c.outcome.status is Status.PASS]
    waste = {c.id: measure(task, b"", c.turns).process.num_wasted for c in passing}
    better, equal = [], []
    for a, b in itertools.permutations(sorted(waste), 2):
        if is_worse(kinds[b], kinds[a]):
            better.append((a, b))
        elif not kinds[a] and not kinds[b] and waste[a] == waste[b] and a < b:
            equal.append((a, b))
    tiers = {c: Tier.T1 for c in waste if not kinds[c]}
    tiers |= {c: Tier.T3 for c in waste if {*kinds[c]} & {*T3_KINDS}}
    return KnownGroup(
        id_, task, tuple(candidates), tuple(better), tuple(equal), tiers, kinds
    )
