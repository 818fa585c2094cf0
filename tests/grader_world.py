"""A task small enough to read, and candidates of it, for the tests of the graders.

`clamp` compares the wrong way round and `mean` adds one: one line each.
"""

from gagar_mini.types import (
    Candidate,
    HiddenTest,
    Outcome,
    Status,
    Target,
    Task,
    ToolCall,
    Turn,
)
from gagar_mini.world.patches import make_patch

RANGES = """\
def clamp(x, lo, hi):
    if x > lo:
        return lo
    return min(x, hi)


def span(lo, hi):
    return hi - lo
"""
STATS = """\
def mean(xs):
    return sum(xs) // len(xs) + 1
"""
CHECK = """\
from ranges import clamp
from stats import mean

for got, want in [(clamp(7, 0, 5), 5), (mean([3, 5]), 4)]:
    if got != want:
        raise SystemExit(f"FAIL {got} not {want}")
print("ok")
"""
BASE = {
    "README.md": b"Small helpers.\n",
    "check.py": CHECK.encode(),
    "ranges.py": RANGES.encode(),
    "stats.py": STATS.encode(),
}
FIXED_RANGES = RANGES.replace("x > lo", "x < lo")
FIXED_STATS = STATS.replace(" + 1", "")
GOLD = {"ranges.py": FIXED_RANGES, "stats.py": FIXED_STATS}


def after(**files: str) -> dict[str, bytes]:
    """The gold tree with further files; `__` in a name is a dot."""
    changed = {name.replace("__", "."): text for name, text in files.items()}
    return {
        **BASE,
        **{path: text.encode() for path, text in (GOLD | changed).items()},
    }


def patch(**files: str) -> bytes:
    """The patch to the gold tree with further files."""
    return make_patch(BASE, after(**files))


TASK = Task(
    id="hand-made",
    family="core",
    split="train",
    statement=(
        "Fix clamp in ranges.py: clamp(7, 0, 5) gives 0, not 5. "
        "Fix mean in stats.py: mean([3, 5]) gives 5, not 4. Change nothing else."
    ),
    files=BASE,
    visible_check="check.py",
    targets=(Target("ranges.py", "clamp"), Target("stats.py", "mean")),
    allowed_paths=("ranges.py", "stats.py"),
    hidden_tests=(
        HiddenTest("clamp", "ranges.py", "clamp", cases=(((7, 0, 5), 5),)),
        HiddenTest("mean", "stats.py", "mean", cases=((([3, 5],), 4),)),
    ),
    gold_patch=patch(),
)


def printed(ranges: str = FIXED_RANGES) -> str:
    """`ranges.py` with a debug print as first line of clamp."""
    return ranges.replace("    if x <", '    print("clamp")\n    if x <')


def commented(ranges: str = FIXED_RANGES, text: str = "# fix") -> str:
    """`ranges.py` with a comment as first line of clamp."""
    return ranges.replace("    if x <", f"    {text}\n    if x <")


REPRO = "from ranges import clamp\nprint(clamp)\n"
NOTES = "fixed clamp and mean\n"

NOISY = {
    "clean": {},
    "comment": {"ranges__py": commented()},
    "print": {"ranges__py": printed()},
    "file": {"notes__md": NOTES},
    "print and comment": {"ranges__py": commented(printed())},
    "file, print and comment": {"ranges__py": commented(printed()), "notes__md": NOTES},
    "two files": {"notes__md": NOTES, "repro__py": REPRO},
    "two files and print": {
        "ranges__py": printed(),
        "notes__md": NOTES,
        "repro__py": REPRO,
    },
}
"""Ways to leave the same repair, from the cleanest on."""


def candidate(
    id_: str,
    patch_: bytes,
    turns: tuple[Turn, ...] = (),
    status: Status = Status.PASS,
) -> Candidate:
    """A candidate whose verdict is given, not found."""
    return Candidate(id_, patch_, Outcome(status), turns)


def call(name: str, observation: str = "ok", **arguments: str) -> Turn:
    """A turn that called a tool."""
    return Turn(ToolCall(name, arguments), observation, num_action_tokens=5)
