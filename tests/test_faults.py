"""A few of the faults of faults.py: nothing is lost, and no process stays behind."""

import itertools
import json

import pytest
from faults import (
    Bench,
    breakages,
    damages,
    dying_sandboxes,
    rivals,
    signals,
)

from gagar_mini.paths import find_data


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "count"),
    [(signals, 2, 1), (signals, 4, 1), (breakages, 0, 2), (damages, 0, 1)],
    ids=["first rank killed", "second rank killed", "engine", "checkpoint"],
)
def test_nothing_is_lost(bench, kind, first, count):
    for finding in itertools.islice(kind(bench), first, first + count):
        assert finding.is_good, finding


@pytest.mark.slow
def test_a_folder_has_one_run_at_a_time(bench):
    for finding in rivals(bench):
        assert finding.is_good, finding


@pytest.mark.slow
def test_a_sandbox_that_dies_costs_a_program_its_time(bench):
    assert next(dying_sandboxes(bench)).is_good


@pytest.mark.docker
def test_a_container_that_dies_costs_no_more(bench):
    *_, finding = dying_sandboxes(bench)
    assert "docker" in finding.fault and finding.is_good, finding


def test_the_published_table_holds_thirty_faults_without_harm():
    report = json.loads(find_data("results/faults.json").read_text())
    findings = report["findings"]
    assert len(findings) >= 30
    assert all(found["is_good"] and not found["orphans"] for found in findings)
