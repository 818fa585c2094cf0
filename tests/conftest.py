"""What several test files share."""

import os

import pytest

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox import open_sandbox


@pytest.fixture(scope="session")
def sandbox():
    """The real sandbox. Where none can run, a test is skipped, in CI it fails."""
    try:
        opened = open_sandbox("bubblewrap")
    except SandboxUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    yield opened
    opened.close()
