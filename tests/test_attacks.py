"""No attack is rewarded by the split judge, in bubblewrap or in Docker, and every
honest patch gets its due. The published table says what other verifiers would pay."""

import json
from pathlib import Path

import attacks
import pytest
from hurried import Hurried, side_by_side

from gagar_mini.types import Status

PATCHES = attacks.all_patches()
RESULTS = Path(__file__).parents[1] / "data/results/attacks.json"


@pytest.fixture(
    scope="module",
    params=["sandbox", pytest.param("docker_sandbox", marks=pytest.mark.docker)],
)
def room(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def outcomes(room):
    hurried = Hurried(room, wall_s=1.5)

    def judge(name):
        patch, is_earned = PATCHES[name]
        return attacks.judged(patch, room if is_earned else hurried)

    return side_by_side(judge, PATCHES)


@pytest.mark.parametrize("name", PATCHES)
def test_the_split_judge_pays_what_is_earned(outcomes, name):
    outcome, is_earned = outcomes[name], PATCHES[name][1]
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
