"""The shared workspace of one group: all that a grading agent may look at.

A tree of text files, built on the host and held in memory: the task, the base, and per
candidate, passing or failing, the patch, the tree after it, what was counted, the calls
of its trajectory and the outcome of each test. No hidden test, no gold patch, no model
name, no reasoning, no closing claim.

What a candidate wrote is data. Everything but printable ASCII is escaped, so that
nothing is unseen and nothing looks like something else; ids are drawn anew for each
grading and occur nowhere in what a candidate wrote; every candidate has the same budget
of bytes. Equal trees are shown once, and share their scores.

Paper (report, section 4.3): all trajectories of a group lie in one shared workspace.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from gagar_mini.grader.findings import Change, find_changes
from gagar_mini.grader.measures import measure, measure_process
from gagar_mini.grader.rubric import PROCESS_MESSAGES, PROCESS_PREFIX, RULES
from gagar_mini.grader.syntax import split_lines
from gagar_mini.types import (
    Candidate,
    Files,
    Status,
    Task,
    Turn,
    UnusableGrade,
    seed_for,
)
from gagar_mini.world.patches import PatchError, apply_patch, make_patch, tree_hash

PATCH_BYTES = 8_000
TREE_BYTES = 16_000
TRAJECTORY_BYTES = 6_000
"""Budget of each candidate: its patch, all files that it changed, its trajectory. Files
that it left alone are the base's, each cut at `TREE_BYTES`."""

FIELD_BYTES = 400
"""Longest argument or output of one call in a trajectory."""

MAX_PLACES = 8
"""Locations listed per kind of finding."""

ID_DIGITS = 6


@dataclass(frozen=True, eq=False)
class Entry:
    """One distinct tree of the group, as the host knows it.

    `members` are the candidates that made this tree, by opaque id; the entry has the id
    of the first. `tree` is raw, None where the patch does not apply. `key` is the hash
    of the tree: equal in every grading, where ids differ.
    """

    members: Mapping[str, Candidate]
    tree: Files | None
    changes: tuple[Change, ...]
    key: str
    is_oversize: bool = False
    """Whether the budget hides a part of the patch or of a changed file."""

    @property
    def id(self) -> str:
        return next(iter(self.members))

    @property
    def is_passing(self) -> bool:
        return next(iter(self.members.values())).outcome.status is Status.PASS


@dataclass(frozen=True, eq=False)
class SharedWorkspace:
    """`files` (path -> text) is what a grader may read; the rest stays on the host.

    `entries` are by opaque id in the order shown, which the seed shuffled. `cut_after`
    gives, for a file that is cut, how many whole lines precede the cut.
    """

    files: Mapping[str, str]
    entries: Mapping[str, Entry]
    cut_after: Mapping[str, int]

    def entry_of(self, id_: str) -> Entry | None:
        """The entry that shows this member, None for an id that nobody was given."""
        return next((e for e in self.entries.values() if id_ in e.members), None)

    @property
    def passing(self) -> tuple[Entry, ...]:
        """The distinct trees that can be ranked."""
        return tuple(e for e in self.entries.values() if e.is_passing)


def build_workspace(
    task: Task, candidates: Sequence[Candidate], seed: int
) -> SharedWorkspace:
    """The workspace of a group, the same for the same seed, in whatever order the
    candidates come. Members whose outcome nobody knows are left out.

    Raises UnusableGrade("duplicate_id") for ids that are not distinct and
    UnusableGrade("unreadable_patch") for a passing patch that does not apply. Blocking:
    git applies the patches.
    """
    if len({c.id for c in candidates}) < len(candidates):
        raise UnusableGrade("duplicate_id", "candidates need distinct ids")
    known = [c for c in candidates if c.outcome.status is not Status.INFRA]
    rng = random.Random(seed_for(seed, "workspace", task.id))
    clusters = merge_equal(task, sorted(known, key=lambda c: c.id))
    rng.shuffle(clusters)
    ids = draw_ids(rng, known)
    writer = _Writer(task)
    entries = {}
    for key, tree, members in clusters:
        named = {next(ids): member for member in members}
        changes = () if tree is None else tuple(find_changes(task, tree))
        entry = writer.add(Entry(named, tree, changes, key))
        entries[entry.id] = entry
    writer.files["GROUP.txt"] = group_page(tuple(entries.values()))
    return SharedWorkspace(
        MappingProxyType(writer.files),
        MappingProxyType(entries),
        MappingProxyType(writer.cut_after),
    )


def merge_equal(
    task: Task, candidates: Sequence[Candidate]
) -> list[tuple[str, Files | None, list[Candidate]]]:
    """(key, tree, members) for each distinct tree and outcome, by key."""
    found: dict[str, tuple[Files | None, list[Candidate]]] = {}
    for candidate in candidates:
        try:
            tree = apply_patch(task.files, candidate.patch)
            key = tree_hash(tree)
        except PatchError as error:
            if candidate.outcome.status is Status.PASS:
                detail = f"of {candidate.id!r}: {error}"
                raise UnusableGrade("unreadable_patch", detail) from error
            tree, key = None, tree_hash({"patch": candidate.patch})
        key = f"{candidate.outcome.status}:{key}"
        found.setdefault(key, (tree, []))[1].append(candidate)
    return [(key, tree, members) for key, (tree, members) in sorted(found.items())]


def draw_ids(rng: random.Random, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Distinct opaque ids, endlessly, that occur in nothing a candidate wrote."""
    written = "\n".join(text for c in candidates for text in _texts(c))
    seen = set()
    while True:
        id_ = f"c-{rng.randrange(16**ID_DIGITS):0{ID_DIGITS}x}"
        if id_ not in seen and id_ not in written:
            seen.add(id_)
            yield id_


def _texts(candidate: Candidate) -> Iterator[str]:
    yield candidate.patch.decode("latin-1")
    for turn in candidate.turns:
        yield turn.observation
        if turn.action is not None:
            yield from turn.action.arguments.values()


class _Writer:
    """Collects the pages of a workspace and notes what the budgets cut."""

    def __init__(self, task: Task):
        self.task = task
        self.files: dict[str, str] = {"TASK.md": task_page(task)}
        self.cut_after: dict[str, int] = {}
        self._base = {path: show_file(content) for path, content in task.files.items()}
        for path, text in self._base.items():
            self._put("base/", path, text, TREE_BYTES)

    def add(self, entry: Entry) -> Entry:
        """Write the pages of `entry`; the entry with its size judged."""
        root = f"cand/{entry.id}/"
        first = next(iter(entry.members.values()))
        patch = first.patch
        if entry.tree is not None:
            # anew from the tree: git reads past text around a diff, a mind would not
            patch = make_patch(self.task.files, entry.tree)
        is_cut = self._put(root, "patch.diff", show_file(patch), PATCH_BYTES)
        is_cut |= self._add_tree(f"{root}tree/", entry)
        self.files[f"{root}stats.txt"] = stats_page(self.task, entry)
        self.files[f"{root}tests.txt"] = tests_page(first)
        for id_, member in entry.members.items():
            text = trajectory_page(member.turns)
            self._put(f"cand/{id_}/", "trajectory.txt", text, TRAJECTORY_BYTES)
        return replace(entry, is_oversize=is_cut)

    def _add_tree(self, root: str, entry: Entry) -> bool:
        changed, is_cut = {change.path for change in entry.changes}, False
        texts = {
            path: self._base[path] if path not in changed else show_file(content)
            for path, content in (entry.tree or {}).items()
        }
        shares = share_budget(
            {path: len(texts[path]) for path in texts if path in changed}, TREE_BYTES
        )
        for path, text in sorted(texts.items()):
            budget = shares.get(path, TREE_BYTES)
            is_cut |= self._put(root, path, text, budget) and path in changed
        return is_cut

    def _put(self, root: str, path: str, text: str, max_bytes: int) -> bool:
        """Whether `text` had to be cut."""
        name = root + one_line(path)
        while name in self.files:  # two odd names may be escaped alike
            name += "~"
        self.files[name] = cut(text, max_bytes)
        if len(text) > max_bytes:
            self.cut_after[name] = text[: max_bytes // 2].count("\n")
        return len(text) > max_bytes


def share_budget(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """`total` bytes over files: small ones are whole, large ones share what is left
    equally, so that a large file does not push out the others."""
    shares, left = {}, total
    for number, path in enumerate(sorted(sizes, key=lambda p: (sizes[p], p))):
        shares[path] = min(sizes[path], left // (len(sizes) - number))
        left -= shares[path]
    return shares


def cut(text: str, max_chars: int) -> str:
    """`text`, or its head and tail with the number of characters cut between them."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    tail = text[len(text) - half :]
    return f"{text[:half]}\n[{len(text) - 2 * half} characters cut]\n{tail}"


def visible(text: str) -> str:
    """`text` with all but printable ASCII, tabs and newlines escaped.

    Control characters become `\\x1b`; bidirectional, zero-width and tag characters, and
    letters that look like others (Trojan Source, CVE-2021-42574), become `<U+202E>`.
    """
    return re.sub(r"[^\t\n -~]", _escape, text)


def one_line(text: str) -> str:
    """`visible`, with newlines escaped, too: for names inside a line of a page."""
    return visible(text).replace("\n", "\\x0a")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x80 else f"<U+{code:04X}>"


def show_file(content: bytes) -> str:
    """Any bytes as visible text, with lines where Python's parser counts them."""
    # a lone \r ends a line for the parser, so a finding's line number counts it
    lines = [line.removesuffix(b"\n") for line in split_lines(content)]
    return "\n".join(
        visible(line.decode("utf-8", "backslashreplace")) for line in lines
    )


def task_page(task: Task) -> str:
    """The statement and the scope that it grants."""
    targets = ", ".join(f"{t.function} in {t.path}" for t in task.targets) or "none"
    return visible(
        f"{task.statement}\n\n"
        f"Files that may change: {', '.join(task.allowed_paths) or 'any'}\n"
        f"Functions that the task names: {targets}\n"
        f"Script that every candidate could run: {task.visible_check}\n"
    )


def stats_page(task: Task, entry: Entry) -> str:
    """What was counted: sizes, then a line per kind of finding of the rubric, by its
    code, and for each member what its calls wasted."""
    first = next(iter(entry.members.values()))
    measures = measure(task, first.patch)
    lines = [f"lines: {measures.added_lines} added, {measures.removed_lines} removed"]
    if not measures.is_applicable:
        lines = ["the patch does not apply"]
    lines += [_finding_line("files", measures.files)] if measures.files else []
    lines.append(f"noise_lines: {measures.noise_lines}")
    for rule in RULES:
        if places := rule.find(measures):
            lines.append(_finding_line(rule.code, places))
    for id_, member in entry.members.items():
        process = measure_process(member.turns)
        num_calls, num_wasted = process.num_calls, process.num_wasted
        lines.append(f"calls of {id_}: {num_calls}, {num_wasted} wasted")
        for name in PROCESS_MESSAGES:
            if turns := getattr(process, name):
                places = tuple(f"turn {turn}" for turn in turns)
                lines.append(_finding_line(PROCESS_PREFIX + name, places))
    return visible("\n".join(lines))


def _finding_line(name: str, places: Sequence[str]) -> str:
    """One line, whatever the names: the first place whole, others while they fit."""
    first, *others = map(one_line, places[:MAX_PLACES])
    shown = [first]
    for place in others:
        if len(", ".join([*shown, place])) <= FIELD_BYTES:
            shown.append(place)
    hidden = len(places) - len(shown)
    more = f", {hidden} more" if hidden else ""
    return f"{name}: {len(places)} ({', '.join(shown)}{more})"


def tests_page(candidate: Candidate) -> str:
    """The outcome, as a whole and test by test. What the tests ask is not told."""
    outcome = candidate.outcome
    lines = [f"outcome: {outcome.status}"]
    lines += [f"{test}: {verdict}" for test, verdict in sorted(outcome.tests.items())]
    return visible("\n".join(lines))


def trajectory_page(turns: Sequence[Turn]) -> str:
    """Calls and what they returned, each capped."""
    return "\n".join(
        f"turn {number}: {_turn(turn)}" for number, turn in enumerate(turns, start=1)
    )


def _turn(turn: Turn) -> str:
    if turn.action is None:
        return f"no tool call\n{_field('output', turn.observation)}"
    lines = [one_line(turn.action.name)]
    if turn.action.name != "submit":  # a closing message is a claim
        lines += [_field(*argument) for argument in turn.action.arguments.items()]
    if turn.observation:
        lines.append(_field("output", turn.observation))
    return "\n".join(lines)


def _field(name: str, text: str) -> str:
    """One argument or output; its lines are indented, so that none looks like a
    turn."""
    shown = cut(visible(text), FIELD_BYTES).replace("\n", "\n    ")
    return f"  {one_line(name)}: {shown}"


def group_page(entries: Sequence[Entry]) -> str:
    """One line per distinct tree: id, outcome, size, and who else made it."""
    lines = []
    for entry in entries:
        first, *others = entry.members
        outcome = entry.members[first].outcome.status
        num_lines = sum(len(c.added) + len(c.removed) for c in entry.changes)
        line = f"{first} {outcome}: {num_lines} lines in {len(entry.changes)} files"
        if others:
            line += f"; the same tree: {', '.join(others)}"
        if entry.is_oversize:
            line += "; too long to be shown whole"
        lines.append(line)
    return "\n".join(lines)
