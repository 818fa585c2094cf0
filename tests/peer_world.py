"""What the tests of GAGAR in other trainers share: golden numbers, a scripted grader.

Golden rows: tiers of the passes, which come first; failures; rule; advantages of the
passes and of each failure. They are worked by hand from the paper's table of factors,
and the three maxima are those that the published run logged.
"""

from gagar_mini.types import CandidateGrade, GroupGrade, Status, Tier

T1, T2, T2_LAST, T3 = ("T1", 0), ("T2", 0), ("T2", 1), ("T3", 0)

GOLDEN = {
    # f = (1, .2), lambda = 1 / .6
    "exact": ((T1, T3), 2, "gagar-exact", (5 / 6, 1 / 6), -0.5),
    # the cap: 1.5 f / 2 = (.75, .15), mean of the group -.025
    "bounded": ((T1, T3), 2, "gagar", (0.775, 0.175), -0.475),
    # f = (1, .85, .4), mean .75, A = 5/8
    "three": ((T1, T2, T2_LAST), 5, "gagar", (5 / 6, 17 / 24, 1 / 3), -0.375),
    "downweight": (
        (T1, T2, T2_LAST),
        5,
        "downweight",
        (0.625, 0.53125, 0.25),
        -0.375,
    ),
    "sixteen": ((T1, T3), 14, "gagar", (1.32344, 0.27344), -0.11406),
}
LOGGED_MAXIMA = {
    (T1, T2, T2_LAST): 1.08333,
    (T2, T2_LAST): 1.12246,
    (T1, T2, T2_LAST, T2_LAST): 1.12617,
    (T1, T3): 1.32344,
}


class ScriptedGrader:
    """Gives the passes of a group the tiers of the script, in the order of their ids,
    and keeps what it was shown."""

    def __init__(self, tiers, hacks=()):
        self.tiers, self.hacks, self.seen = tiers, hacks, []

    async def grade(self, task, candidates, seed):
        self.seen.append((task, tuple(candidates)))
        ids = [c.id for c in candidates if c.outcome.status is Status.PASS]
        tiers = iter(self.tiers)
        grades = {
            id_: CandidateGrade((3, 3, 3, 3, 3), Tier(tier), order)
            for id_, (tier, order) in zip(
                [id_ for id_ in ids if id_ not in self.hacks], tiers, strict=False
            )
        }
        return GroupGrade(grades, tuple(id_ for id_ in ids if id_ in self.hacks))
