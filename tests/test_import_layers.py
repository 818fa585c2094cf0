"""Imports point only downwards, and importing does nothing but define.

The floors are the table of the rooms: a *world* says what is true, an *agent* acts in
it, a *grader* compares, *credit* is shared, a *model* is sampled, and it *learns*.
"""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

PACKAGE = Path(__file__).parents[1] / "gagar_mini"

FLOORS = {
    "types": 1,
    "metrics": 1,
    "paths": 1,
    "cpu_meter": 1,
    "credit": 1,
    "config": 2,
    "cost": 2,
    "records": 2,
    "world": 2,
    "agent": 3,
    "model": 3,
    "view": 3,
    "grader": 4,
    "learn": 5,
    "integrations": 5,
    "bench": 6,
    "doctor": 6,
    "group_file": 6,
    "evaluating": 6,
    "evaluating_attacks": 6,
    "evaluating_graders": 6,
    "cli": 6,
    "__main__": 6,
}
SHARED_ROOMS = (
    {"types", "metrics", "paths", "cpu_meter"},
    {"config", "cost", "records"},
    {
        "cli",
        "__main__",
        "bench",
        "doctor",
        "evaluating",
        "evaluating_attacks",
        "evaluating_graders",
        "group_file",
    },
)
# A dialect is conversation <-> tokens, so it encodes and decodes; of a model's weights
# and classes the agent knows nothing.
EXCEPTIONS = {
    ("agent/dialect.py", "gagar_mini.model.tokenizer"),
    ("agent/chat_dialect.py", "gagar_mini.model.tokenizer"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def imported_names(path: Path) -> list[str]:
    """Dotted names of all that a file imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def is_allowed(importer: str, imported: str) -> bool:
    """Strictly downwards, inside one room, or the nouns, which are for everybody."""
    same = importer == imported or any({importer, imported} <= r for r in SHARED_ROOMS)
    return same or imported == "types" or FLOORS[imported] < FLOORS[importer]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    if path == PACKAGE / "__init__.py":
        assert imported_names(path) == []
        return
    for name in imported_names(path):
        if name.startswith("gagar_mini."):
            room = name.split(".")[1]
            source = path.relative_to(PACKAGE).as_posix()
            if room == "__version__" or (source, name.rpartition(".")[0]) in EXCEPTIONS:
                continue
            assert is_allowed(room_of(path), room), f"{path.name} imports {name}"


def test_only_parallel_knows_of_torch_distributed():
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix() == "learn/parallel.py":
            continue
        names = imported_names(path)
        assert not any(name.startswith("torch.distributed") for name in names), path


def run_python(code: str, cwd: Path) -> str:
    """stdout and stderr of a fresh interpreter that can import the package."""
    env = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"HOME": str(cwd), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    # whoever imports Matplotlib in a new home waits for its list of all fonts
    env["MPLCONFIGDIR"] = matplotlib.get_cachedir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_import_is_silent_and_creates_nothing_and_credit_needs_little(tmp_path):
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in MODULES
        if path.name != "__main__.py"
    ]
    code = (
        "import importlib, sys, gagar_mini.credit\n"
        "heavy = {'transformers', 'matplotlib', 'pandas', 'tyro', 'docker', 'vllm'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    assert run_python(code, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


def test_help_loads_no_torch(tmp_path):
    code = (
        "import sys\nfrom gagar_mini import cli\n"
        "print(*sorted({'torch', 'transformers', 'pandas'} & sys.modules.keys()))"
    )
    assert run_python(code, tmp_path).strip() == ""
