"""Each notebook obeys the house rules, and runs from its first cell to its last.

Static rules run by default; `pytest -m notebook` executes every notebook with the
values of its parameters cell, as CI does, and leaves the executed copies in
notebooks/out.
"""

import ast
import os
import statistics
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
LIMIT_S = 180

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags_of(cell) -> list[str]:
    return cell.metadata.get("tags", [])


@each_notebook
def test_parameters_are_literals_in_one_tagged_cell(path):
    tagged = [cell for cell in code_cells(path) if "parameters" in tags_of(cell)]
    assert len(tagged) == 1
    for node in ast.parse(tagged[0].source).body:
        assert isinstance(node, ast.AnnAssign | ast.Assign)
        ast.literal_eval(node.value)  # a computed value would not follow papermill's


@each_notebook
def test_cells_are_short_and_plain(path):
    sources = [cell.source for cell in code_cells(path)]
    lengths = [len(source.splitlines()) for source in sources]
    assert max(lengths) <= 25
    assert statistics.median(lengths) <= 8
    for source in sources:
        assert max(map(len, source.splitlines())) <= 88
        assert not any(
            line.lstrip().startswith(("!", "%")) for line in source.splitlines()
        )
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 15, node.name


@each_notebook
def test_metadata_and_outputs_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    kept = [cell for cell in code_cells(path) if cell.outputs]
    assert all("keep_output" in tags_of(cell) for cell in kept)
    assert len(kept) == 1
    assert any("image/png" in output.get("data", {}) for output in kept[0].outputs)
    assert all(
        "http" not in str(cell.get("attachments", "")) for cell in notebook.cells
    )


@each_notebook
def test_title_promise_and_reading_order(path):
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    lines = first.source.splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith("> ") for line in lines), "one-sentence promise missing"


@pytest.mark.notebook
@each_notebook
def test_notebook_runs(path):
    out = FOLDER / "out"
    out.mkdir(exist_ok=True)
    argv = [sys.executable, "-m", "papermill", path.name, str(out / path.name)]
    argv += ["--cwd", ".", "-k", "python3", "--no-progress-bar"]
    argv += ["--execution-timeout", str(LIMIT_S)]
    env = os.environ | {"PYTHONPATH": str(FOLDER.parent), "MPLBACKEND": "agg"}
    done = subprocess.run(
        argv,
        cwd=FOLDER,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
