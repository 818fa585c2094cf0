"""README says nothing that the repository does not: numbers, commands, names."""

import importlib
import re
from pathlib import Path

import pytest

from gagar_mini.cli import split_command
from gagar_mini.view.readme import fill

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Lines of the shell blocks, indented or fenced."""
    fenced = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    indented = re.findall(r"^ {4}(make .*)$", README, re.MULTILINE)
    return [line for block in [*fenced, *indented] for line in block.splitlines()]


def test_quoted_results_are_those_of_the_files():
    assert fill(README, ROOT / "data" / "results") == README, "run `make readme`"


def test_marks_are_filled(tmp_path):
    (tmp_path / "a.json").write_text('{"gagar": {"pass": 0.8371}}')
    (tmp_path / "b.md").write_text("| table |\n")
    text = "<!--=a.json:gagar.pass:.2f-->?<!--/--> <!--file=b.md-->\nold\n<!--/file-->"
    assert fill(text, tmp_path) == (
        "<!--=a.json:gagar.pass:.2f-->0.84<!--/--> "
        "<!--file=b.md-->\n| table |\n<!--/file-->"
    )
    with pytest.raises(ValueError, match="missing"):
        fill("<!--=a.json:binary.pass:.2f-->?<!--/-->", tmp_path)


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for line in commands():
        program, *words = line.split("#")[0].split()
        if program == "make":
            assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE), line
        else:
            assert program == "gagar-mini", line
            split_command(words)


def test_functions_exist():
    names = re.findall(r"^\|[^|]+\| `(gagar_mini[\w.]+)` \|", README, re.MULTILINE)
    assert len(names) >= 8
    for name in names:
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute, None)
        assert found is not None or importlib.import_module(name)


def test_notebook_table_is_complete():
    listed = set(re.findall(r"^\| `(\d\d_\w+)` \|", README, re.MULTILINE))
    assert listed == {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}


def test_paths_exist():
    for path in re.findall(r"`(gagar_mini/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
