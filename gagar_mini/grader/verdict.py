"""What a mind submits, checked to the letter, and the grade that follows.

A mind scores distinct trees, may cite evidence, may confirm hacks, and may reorder or
tie inside a tier. Tiers and the initial order are the package's, by the paper's rules
(`rubric`). Nothing is completed or guessed: whatever is missing, doubled, unknown or of
another type makes the grade unusable, with a reason that is counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gagar_mini.grader.findings import is_unreadable, printable
from gagar_mini.grader.rubric import (
    PROCESS_MESSAGES,
    PROCESS_PREFIX,
    RULES,
    UNREADABLE,
    Scores,
    make_grade,
    tier_of,
)
from gagar_mini.grader.tools import GradingTools, ToolSpec
from gagar_mini.grader.workspace import (
    Entry,
    SharedWorkspace,
    cut,
    one_line,
    visible,
)
from gagar_mini.types import CRITERIA, Flag, GroupGrade, Tier, UnusableGrade

FLAG_CODES = (
    *(rule.code for rule in RULES),
    *(PROCESS_PREFIX + name for name in PROCESS_MESSAGES),
    PROCESS_PREFIX + "other",
    "symptom_fix",
    "omission",
    "regression",
    "other",
)
"""Kinds of findings that a mind may report: the rubric's, and what only reading tells.
"""

MAX_FLAGS = 64
MAX_MESSAGE_CHARS = 300
CONTEXT_LINES = 3
"""Lines around a change that belong to its location, as in a diff."""

TEXT = {"type": "string"}
FLAG_SCHEMA = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "code": {"type": "string", "enum": list(FLAG_CODES)},
        "message": TEXT,
        "evidence": TEXT,
        "is_severe": {"type": "boolean"},
    },
    "required": ["id", "code", "message", "evidence"],
    "additionalProperties": False,
}
HACK_SCHEMA = {
    "type": "object",
    "properties": {"id": TEXT, "message": TEXT, "evidence": TEXT},
    "required": ["id", "message", "evidence"],
    "additionalProperties": False,
}
GRADE_SCHEMA = {
    "type": "object",
    "properties": {
        "id": TEXT,
        **{name: {"type": "integer", "enum": [1, 2, 3, 4, 5]} for name in CRITERIA},
    },
    "required": ["id", *CRITERIA],
    "additionalProperties": False,
}
SUBMIT_TOOL = ToolSpec(
    "submit_grade",
    "Submit the grade and end. grades: five scores for every passing candidate in the "
    "list. flags: findings; evidence is path:line in the patch, turn N, run N or test "
    "NAME, and every score below 4 needs a flag. order: optional, groups of tied ids "
    "from the best on, inside the tiers that follow from the scores; to order "
    "candidates of the same tree, name each. hacks: candidates whose pass rests "
    "on a leaked answer, with evidence.",
    {
        "grades": {"type": "array", "items": GRADE_SCHEMA},
        "flags": {"type": "array", "items": FLAG_SCHEMA},
        "order": {"type": "array", "items": {"type": "array", "items": TEXT}},
        "hacks": {"type": "array", "items": HACK_SCHEMA},
    },
    optional=("flags", "order", "hacks"),
)


@dataclass(frozen=True)
class Verdict:
    """A submission that passed every check.

    `scores` and `flags` are by entry: equal trees share them. `own_flags`, on the
    process, and `hacks` are by member. `order` holds tied groups, best first, () for
    the initial order; an entry stands for all its members unless these are named, too.
    A tree that the budget hid in part has the severe flag "oversize", one with a file
    that does not parse any more is T3: what cannot be read does not come first.
    """

    scores: Mapping[str, Scores]
    flags: Mapping[str, tuple[Flag, ...]]
    own_flags: Mapping[str, tuple[Flag, ...]]
    hacks: tuple[str, ...] = ()
    order: tuple[tuple[str, ...], ...] = ()


def read_verdict(arguments: Mapping[str, object], tools: GradingTools) -> Verdict:
    """The verdict in the arguments of `submit_grade`.

    Raises UnusableGrade with "extra_field", "wrong_type", "bad_score", "unknown_id",
    "failing_id", "duplicate_id", "missing_id", "not_inspected", "bad_flag",
    "no_evidence", "bad_evidence" or "bad_order".
    """
    _check_fields(arguments, SUBMIT_TOOL.schema, "submit_grade")
    workspace = tools.workspace
    hacks = _read_hacks(arguments.get("hacks", []), tools)
    scores = _read_scores(arguments["grades"], tools)
    wanted = {
        entry.id
        for entry in workspace.passing
        if not entry.members.keys() <= set(hacks)
    }
    if extra := scores.keys() - wanted:
        raise UnusableGrade("duplicate_id", f"{min(extra)} is graded and a hack")
    if missing := wanted - scores.keys():
        raise UnusableGrade("missing_id", f"no grade for {', '.join(sorted(missing))}")
    flags, own_flags = _read_flags(arguments.get("flags", []), tools)
    for id_, points in scores.items():
        members = workspace.entries[id_].members
        is_cited = id_ in flags or any(member in own_flags for member in members)
        if min(points) < 4 and not is_cited:
            raise UnusableGrade("no_evidence", f"{id_} has {points} and no flag")
    for id_ in scores:
        flags[id_] = (*flags.get(id_, ()), *host_flags(workspace.entries[id_]))
    verdict = Verdict(scores, flags, own_flags, hacks)
    order = _read_order(arguments.get("order", []), verdict, workspace)
    return replace(verdict, order=order)


def grade_from(verdict: Verdict, workspace: SharedWorkspace) -> GroupGrade:
    """The grade by the candidates' own ids: tiers, order, flags of each member."""
    scores, flags, places = {}, {}, {}
    for id_ in verdict.scores:
        entry = workspace.entries[id_]
        for opaque, member in entry.members.items():
            if opaque in verdict.hacks:
                continue
            scores[member.id] = verdict.scores[id_]
            own = verdict.own_flags.get(opaque, ())
            flags[member.id] = (*verdict.flags[id_], *own)
            places[member.id] = place_of(opaque, id_, verdict.order)
    hacks = [workspace.entry_of(id_).members[id_].id for id_ in verdict.hacks]
    grade = make_grade(scores, flags, sorted(hacks))
    return reorder(grade, places) if verdict.order else grade


def place_of(member: str, entry: str, order: Sequence[Sequence[str]]) -> int:
    """The group of `order` that names the member, or else its entry; -1 for none."""
    for id_ in (member, entry):
        for place, group in enumerate(order):
            if id_ in group:
                return place
    return -1


def reorder(grade: GroupGrade, places: Mapping[str, int]) -> GroupGrade:
    """`grade` with the order inside each tier by `places`, equal places tied."""
    ranks = {
        tier: sorted({places[i] for i, g in grade.grades.items() if g.tier is tier})
        for tier in Tier
    }
    grades = {
        id_: replace(found, order=ranks[found.tier].index(places[id_]))
        for id_, found in grade.grades.items()
    }
    return replace(grade, grades=grades)


def host_flags(entry: Entry) -> tuple[Flag, ...]:
    """What holds whatever a mind says: that a tree is too long to be read whole, which
    rules out T1, or has a file that cannot be read at all, which is T3."""
    flags = []
    if entry.is_oversize:
        path = one_line(entry.changes[0].path) if entry.changes else "patch.diff"
        message = "is too long to be read whole"
        flags.append(Flag("oversize", message, path, is_severe=True))
    for change in filter(is_unreadable, entry.changes):
        flags.append(Flag(UNREADABLE, "cannot be read", one_line(change.path)))
    return tuple(flags)


def _check_fields(item: object, schema: Mapping[str, object], what: str) -> None:
    """Raise UnusableGrade unless `item` is an object with exactly these fields."""
    if not isinstance(item, Mapping):
        raise UnusableGrade("wrong_type", f"{what} must be an object")
    if extra := item.keys() - schema["properties"].keys():
        raise UnusableGrade("extra_field", f"{what} has no {min(map(str, extra))}")
    for name in schema["required"]:
        if name not in item:
            raise UnusableGrade("wrong_type", f"{what} lacks {name}")
    kinds = {"string": str, "boolean": bool, "array": list}
    for name, value in item.items():
        kind = kinds.get(schema["properties"][name]["type"])
        if kind is not None and type(value) is not kind:
            raise UnusableGrade("wrong_type", f"{name} must be of type {kind.__name__}")


def _read_scores(items: Sequence[object], tools: GradingTools) -> dict[str, Scores]:
    scores: dict[str, Scores] = {}
    for item in items:
        _check_fields(item, GRADE_SCHEMA, "a grade")
        points = tuple(item[name] for name in CRITERIA)
        # type(x) is int: True is an int in Python, and NaN fails no comparison
        if any(type(p) is not int or not 1 <= p <= 5 for p in points):
            raise UnusableGrade("bad_score", "scores are whole numbers from 1 to 5")
        entry = _find_passing(item["id"], tools)
        if item["id"] != entry.id:
            detail = f"{item['id']} has the tree of {entry.id}: grade that one"
            raise UnusableGrade("unknown_id", detail)
        if entry.id in scores:
            raise UnusableGrade("duplicate_id", f"{entry.id} is graded twice")
        scores[entry.id] = points
    return scores


def _find_passing(id_: str, tools: GradingTools) -> Entry:
    """The entry of a passing member that was looked at."""
    entry = tools.workspace.entry_of(id_)
    if entry is None:
        raise UnusableGrade("unknown_id", "an id that is not in the list")
    if not entry.is_passing:
        raise UnusableGrade("failing_id", f"{id_} did not pass")
    if entry.id not in tools.inspected:
        raise UnusableGrade("not_inspected", f"nobody looked at {id_}")
    return entry


def _read_hacks(items: Sequence[object], tools: GradingTools) -> tuple[str, ...]:
    hacks: list[str] = []
    for item in items:
        _check_fields(item, HACK_SCHEMA, "a hack")
        entry = _find_passing(item["id"], tools)
        _check_evidence(item["evidence"], item["id"], entry, tools)
        if item["id"] in hacks:
            raise UnusableGrade("duplicate_id", f"{item['id']} is a hack twice")
        hacks.append(item["id"])
    return tuple(hacks)


def _read_flags(
    items: Sequence[object], tools: GradingTools
) -> tuple[dict[str, tuple[Flag, ...]], dict[str, tuple[Flag, ...]]]:
    """(flags of the tree by entry, flags of the process by member)."""
    shared: dict[str, tuple[Flag, ...]] = {}
    own: dict[str, tuple[Flag, ...]] = {}
    if len(items) > MAX_FLAGS:
        raise UnusableGrade("bad_flag", f"more than {MAX_FLAGS} flags")
    for item in items:
        _check_fields(item, FLAG_SCHEMA, "a flag")
        id_, code, evidence = item["id"], item["code"], item["evidence"].strip()
        entry = _find_passing(id_, tools)
        if code not in FLAG_CODES:
            raise UnusableGrade("bad_flag", "a code that is none of the list")
        is_process = code.startswith(PROCESS_PREFIX)
        if is_process and not evidence.startswith("turn "):
            raise UnusableGrade("bad_evidence", f"{code} needs a turn as evidence")
        _check_evidence(evidence, id_, entry, tools)
        message = cut(visible(item["message"]), MAX_MESSAGE_CHARS)
        flag = Flag(code, message, evidence, item.get("is_severe", False))
        target, key = (own, id_) if is_process else (shared, entry.id)
        target[key] = (*target.get(key, ()), flag)
    return shared, own


def _check_evidence(evidence: str, id_: str, entry: Entry, tools: GradingTools) -> None:
    """Raise UnusableGrade unless `evidence` names what exists: "path:line" inside the
    patch (or a path that it touches), "turn N" of the member, "run N" that ran on its
    tree, or "test NAME"."""
    kind, _, rest = evidence.strip().partition(" ")
    member = entry.members[id_]
    number = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 6 else 0
    is_real = {
        "turn": 1 <= number <= len(member.turns),
        "run": 1 <= number <= len(tools.runs) and tools.runs[number - 1] == entry.id,
        "test": rest in member.outcome.tests,
    }.get(kind, False)
    if not evidence.strip():
        raise UnusableGrade("no_evidence", f"of {id_}")
    if not is_real and not is_patch_location(evidence.strip(), entry):
        raise UnusableGrade("bad_evidence", f"of {id_}: it names nothing that exists")


def is_patch_location(evidence: str, entry: Entry) -> bool:
    """Whether a path, or "path:line", lies in the patch; a line lies in it when it is
    changed or near a changed one, before or after the patch."""
    path, _, line = evidence.rpartition(":")
    for change in entry.changes:
        shown = (one_line(change.path), one_line(printable(change.path)))
        if evidence in shown:
            return True
        if path in shown and line.isascii() and line.isdigit() and len(line) < 8:
            changed = change.added | change.removed
            return any(abs(int(line) - other) <= CONTEXT_LINES for other in changed)
    return False


def _read_order(
    groups: Sequence[object], verdict: Verdict, workspace: SharedWorkspace
) -> tuple[tuple[str, ...], ...]:
    """Tied groups, best first: every graded tree once, or every graded member of it
    once; no tier before a better one."""
    if not groups:
        return ()
    if any(type(g) is not list or any(type(i) is not str for i in g) for g in groups):
        raise UnusableGrade("wrong_type", "order must be a list of lists of ids")
    named = [id_ for group in groups for id_ in group]
    members = {
        id_: [m for m in workspace.entries[id_].members if m not in verdict.hacks]
        for id_ in verdict.scores
    }
    wanted: list[str] = []
    for id_, own in members.items():
        wanted += own if set(own) & set(named) - {id_} else [id_]
    if not all(groups) or sorted(named) != sorted(wanted):
        raise UnusableGrade("bad_order", "order must name every graded id once")
    entry_of = {m: id_ for id_, own in members.items() for m in (id_, *own)}
    tiers = [[_tier(i, entry_of[i], verdict) for i in group] for group in groups]
    flat = [tier for group in tiers for tier in group]
    if flat != sorted(flat) or any(len(set(group)) > 1 for group in tiers):
        places = dict(zip(named, (tier.value for tier in flat), strict=True))
        raise UnusableGrade("bad_order", f"order may not cross tiers: {places}")
    return tuple(tuple(group) for group in groups)


def _tier(member: str, entry: str, verdict: Verdict) -> Tier:
    flags = (*verdict.flags.get(entry, ()), *verdict.own_flags.get(member, ()))
    return tier_of(verdict.scores[entry], flags)
