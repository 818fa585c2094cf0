"""What several test files share."""

import os

import pytest

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox import open_sandbox


@pytest.fixture(scope="session")
def sandbox():
    """The real sandbox. Where none can run, a test is skipped, in CI it fails."""
    yield from opened_or_skipped("bubblewrap")


@pytest.fixture(scope="session")
def docker_sandbox():
    """Containers; a test that asks for it is marked docker. In CI it fails, too."""
    yield from opened_or_skipped("docker")


def opened_or_skipped(name):
    try:
        opened = open_sandbox(name)
    except SandboxUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield opened
    opened.close()
