"""What a linter does not know: short functions, plain text, no way around the types."""

import ast
import functools
import statistics
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gagar_mini"
MODULES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 60

# Programs for the inside of the sandbox: nobody imports them or reads signatures.
INSIDE_SANDBOX = {"answering.py", "shell_program.py", "zygote.py"}

each_module = pytest.mark.parametrize(
    "path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE))
)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return function.end_lineno - function.lineno + 1


@each_module
def test_functions_are_short(path):
    for function in functions(tree_of(path)):
        assert num_lines(function) <= LONGEST, f"{path.name}: {function.name}"


def test_the_median_function_is_about_fifteen_lines():
    lengths = [num_lines(f) for path in MODULES for f in functions(tree_of(path))]
    assert statistics.median(lengths) <= 16


@each_module
def test_text_is_ascii(path):
    path.read_text().encode("ascii")


@each_module
def test_modules_say_what_they_are_and_hide_no_types(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree) or not tree.body, path
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            assert node.module != "__future__" and "Any" not in names
            assert "*" not in names


@each_module
def test_public_functions_are_annotated(path):
    for function in functions(tree_of(path)):
        if function.name.startswith("_") or path.name in INSIDE_SANDBOX:
            continue
        arguments = function.args.args + function.args.kwonlyargs
        missing = [a.arg for a in arguments if a.annotation is None]
        assert set(missing) <= {"self", "cls"}, f"{path.name}: {function.name}"
        assert function.returns is not None, f"{path.name}: {function.name}"
