"""The program that runs a repository's own tests, inside the sandbox.

Standard library only, and trusted with little: from the moment the tests import the
candidate's code it shares a process with it. What it can do is done before that: names
are looked up in the standard library and in the archive that holds pytest, never in the
tree; no configuration, no conftest, no plugin of the tree is loaded. Its report goes to
what was stdout, which the output of the tests does not reach.
"""

import os
import sys

# The tree may hold a file named like any module: nothing is imported from it by name
# before the tests are.
sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

import json  # noqa: E402

MAX_MESSAGE_CHARS = 400


class Recorder:
    """Keeps the outcome of every wanted test, and what went wrong at collection."""

    def __init__(self, wanted: list[str]):
        self.wanted = set(wanted)
        self.outcomes: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.errors: list[str] = []

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.wanted:
            items[:] = [item for item in items if item.nodeid in self.wanted]

    def pytest_collectreport(self, report: object) -> None:
        if report.failed:
            self.errors.append(str(report.longrepr)[-MAX_MESSAGE_CHARS:])

    def pytest_runtest_logreport(self, report: object) -> None:
        """A test passes when all of its phases do; the worst phase counts."""
        old, new = self.outcomes.get(report.nodeid, "pass"), outcome_of(report)
        self.outcomes[report.nodeid] = new if old == "pass" else old
        crash = getattr(report.longrepr, "reprcrash", None)
        if report.failed and crash is not None:
            self.messages[report.nodeid] = crash.message[:MAX_MESSAGE_CHARS]


def outcome_of(report: object) -> str:
    if hasattr(report, "wasxfail"):
        return "xfail"
    if report.passed:
        return "pass"
    if report.skipped:
        return "skip"
    return "fail" if report.when == "call" else "error"


def options(order: dict) -> list[str]:
    """What pytest is told: nothing in the tree decides how its tests are run."""
    chosen = ["-c", os.devnull, "--rootdir", os.getcwd(), "--import-mode=append", "-q"]
    chosen += ["-p", "no:cacheprovider", "--tb=line", "--strict-markers"]
    # rewritten asserts say more, take longer, and give the candidate more to patch
    chosen += [] if order["with_messages"] else ["--assert=plain"]
    return chosen if order["needs_conftest"] else [*chosen, "--noconftest"]


def main() -> None:
    order = json.load(sys.stdin)
    private = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path.insert(0, os.path.abspath(order["archive"]))
    import pytest

    for path in order["read_only"]:
        os.chmod(path, 0o444)
    sys.path += [os.path.join(os.getcwd(), root) for root in order["roots"]]
    recorder = Recorder(order["ids"])
    code = pytest.main([*options(order), *order["paths"]], plugins=[recorder])
    report = {
        "nonce": order["nonce"],
        "code": int(code),
        "outcomes": recorder.outcomes,
        "errors": recorder.errors[:4],
        "messages": recorder.messages if order["with_messages"] else {},
    }
    line = json.dumps(report).encode() + b"\n"
    while line:
        line = line[os.write(private, line) :]
    os._exit(0)


if __name__ == "__main__":
    main()
