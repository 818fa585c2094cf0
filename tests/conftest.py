"""What several test files share, and the check of every signature while they run."""

import os
from pathlib import Path

import jaxtyping
import pytest
from beartype import BeartypeConf, BeartypeDecorPlace
from beartype.claw import beartype_package

PACKAGE = Path(__file__).parents[1] / "gagar_mini"


def pytest_configure():
    """Check arguments and results of all functions of the package from here on, and
    shapes where signatures have any: that takes a hundred times as long a call."""
    first = BeartypeDecorPlace.FIRST  # over `types.coroutine` it loses the coroutine
    conf = BeartypeConf(claw_decor_place_func=first, claw_is_pep526=False)
    beartype_package("gagar_mini", conf=conf)
    jaxtyping.install_import_hook(modules_with_shapes(), "beartype.beartype")


def modules_with_shapes():
    return [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
        if "from jaxtyping import" in path.read_text()
    ]


@pytest.fixture(scope="session")
def sandbox():
    """The real sandbox. Where none can run, a test is skipped, in CI it fails."""
    yield from opened_or_skipped("bubblewrap")


@pytest.fixture(scope="session")
def docker_sandbox():
    """Containers; a test that asks for it is marked docker. In CI it fails, too."""
    yield from opened_or_skipped("docker")


def opened_or_skipped(name):
    # not at the top: what is imported before `pytest_configure` is not checked
    from gagar_mini.types import SandboxUnavailable
    from gagar_mini.world.sandbox import open_sandbox

    try:
        opened = open_sandbox(name)
    except SandboxUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield opened
    opened.close()
