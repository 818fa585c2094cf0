"""No attack is rewarded by the split judge, in bubblewrap or in Docker, and every
honest patch gets its due. The published table says what other verifiers would pay."""

import json
from dataclasses import replace
from pathlib import Path

import attacks
import pytest

from gagar_mini.types import Status
from gagar_mini.world import verifier

PATCHES = attacks.all_patches()
RESULTS = Path(__file__).parents[1] / "data/results/attacks.json"


@pytest.fixture(
    scope="module",
    params=["sandbox", pytest.param("docker_sandbox", marks=pytest.mark.docker)],
)
def room(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", PATCHES)
def test_the_split_judge_pays_what_is_earned(room, name, monkeypatch):
    patch, is_earned = PATCHES[name]
    # a hang costs less of the suite
    monkeypatch.setattr(verifier, "LIMITS", replace(verifier.LIMITS, wall_s=1.5))
    outcome = attacks.judged(patch, room)
    if is_earned:
        assert (outcome.status, outcome.reason) == (Status.PASS, "")
    else:
        assert outcome.status in (Status.FAIL, Status.TAMPERED) and outcome.reason
        assert outcome.reward == 0


def test_the_published_table_is_of_these_patches():
    data = json.loads(RESULTS.read_text())
    assert data["earned"] == {
        name: int(earned) for name, (_, earned) in PATCHES.items()
    }
    for name, row in data["rewards"].items():
        for backend, rewards in row.items():
            assert rewards[3] == data["earned"][name], (name, backend)
            assert len(rewards) == len(attacks.VERIFIERS)
