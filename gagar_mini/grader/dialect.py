"""How a grading becomes tokens: the compact dialect of the tiny agentic grader.

One grading is one append-only sequence of token ids:

    <|task|> statement and scope <|act|>
    <|list|> <|end|>                          an action, sampled by the grader
    <|obs|> <|c0|> pass: 4 lines in 2 files   its observation, appended by the session
            <|c1|> fail: ... <|act|>
    <|stats|> <|c0|> <|end|>
    <|obs|> lines: 3 added, 1 removed <|f0|> debug_print: 1 (ranges.py:3) <|act|>
    <|judge|> <|c0|> <|5|><|5|><|5|><|3|><|4|> <|f0|> <|burden|> <|1|>
    <|stats|> <|c2|> <|end|>                  the judgement of c0, then the next call
    ...
    <|submit|> <|end|>

To name is to point, which a model of a million parameters learns much sooner than to
copy: a candidate tag `<|c0|>` stands for an opaque id, a finding tag `<|f0|>` for a
line of a stats page and the place that it names, a line tag `<|l0|>` for an added line
of a patch. The judgement of a candidate (five scores, what is wrong with it, and how
much) is written down right after the look at it, and `submit` hands in all of them in
the tool's own format, where every check awaits it. How many calls a trajectory wasted
is the sum of the process findings that the judgement cites.

None of these tokens can be spelled by text, so nothing that a candidate wrote can
speak as the grader.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MappingProxyType

from transformers import PreTrainedTokenizerFast

from gagar_mini.grader.rubric import (
    PROCESS_PREFIX,
    RULES,
    SEVERE_WASTE,
    UNREADABLE,
    Scores,
    tier_of,
)
from gagar_mini.grader.tools import GraderCall
from gagar_mini.model.tokenizer import encode_text
from gagar_mini.types import CRITERIA, Flag

MAX_CANDIDATES, MAX_FINDINGS, MAX_LINES, MAX_NUMBER = 16, 24, 24, 15
"""Tags of each kind, and the largest number; what is beyond has none."""

LINE_TOKENS = 40
"""Tokens of one line of an observation; the rest of a longer one is cut."""
OBSERVATION_LINES = 40
"""Lines of one observation, half of them its last ones."""

PAD, TASK, OBSERVATION, END = "<|pad|>", "<|task|>", "<|obs|>", "<|end|>"
ACT, JUDGE, BURDEN, CUT = "<|act|>", "<|judge|>", "<|burden|>", "<|cut|>"
TOOLS = {"list_candidates": "<|list|>", "stats": "<|stats|>", "diff": "<|diff|>"}
SUBMIT = "<|submit|>"
CANDIDATE_TAGS = tuple(f"<|c{n}|>" for n in range(MAX_CANDIDATES))
FINDING_TAGS = tuple(f"<|f{n}|>" for n in range(MAX_FINDINGS))
LINE_TAGS = tuple(f"<|l{n}|>" for n in range(MAX_LINES))
NUMBERS = tuple(f"<|{n}|>" for n in range(MAX_NUMBER + 1))

SPECIAL_TOKENS = (
    *(PAD, TASK, OBSERVATION, ACT, END, JUDGE, BURDEN, CUT, *TOOLS.values(), SUBMIT),
    *CANDIDATE_TAGS,
    *FINDING_TAGS,
    *LINE_TAGS,
    *NUMBERS,
)

FINDING = re.compile(r"^([a-z_.]+): (\d+) \((.+)\)$")
"""A finding on a stats page: its code, how many there are, and where."""
NO_FINDING = ("files",)
SEVERE_CODES = tuple(rule.code for rule in RULES if rule.is_severe)
HUNK = re.compile(r"@@ -\d+(?:,(?P<old>\d+))? \+(?P<first>\d+)(?:,(?P<new>\d+))? @@")
DIFF_CUT = re.compile(r"\[\d+ characters cut\]")


class MalformedAction(ValueError):
    """A completion that is no action."""


@dataclass(frozen=True)
class Judgement:
    """What the grader thinks of one tree: its scores, the tags of what is wrong (with
    it, or with the calls of a member), and how much is, in lines and findings."""

    scores: Scores
    tags: tuple[str, ...]
    burden: int


@dataclass(frozen=True)
class Finding:
    """What a tag stands for: `count` findings about `owner`, one of them to cite."""

    owner: str
    code: str
    message: str
    evidence: str
    count: int = 1


@dataclass
class Reading:
    """What was shown so far: ids by candidate tag, which trees passed and their
    members, and the findings that the tags of each tree's pages stand for."""

    id_of: dict[str, str] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)
    oversize: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    findings: dict[tuple[str, str], Finding] = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)

    def tag_of(self, id_: str) -> str:
        return next((tag for tag, known in self.id_of.items() if known == id_), "")

    @property
    def passing(self) -> list[str]:
        """The trees that can be ranked, in the order of the list."""
        return list(self.members)


class GraderDialect:
    """Grading <-> tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))
        if None in ids:
            raise ValueError("this tokenizer is not that of a tiny agentic grader")
        self._id = dict(zip(SPECIAL_TOKENS, ids, strict=True))
        self._name = {token: name for name, token in self._id.items()}
        self.stop_ids = (self._id[END],)
        # pages of one group share most of their lines
        self._text_ids = lru_cache(maxsize=4096)(partial(encode_text, tokenizer))

    def prompt_ids(self, task: str) -> list[int]:
        """The page of the task."""
        lines = self._lines(task.strip().split("\n"), {})
        return [self._id[TASK], *lines, self._id[ACT]]

    def observation_ids(
        self,
        call: GraderCall | None,
        text: str,
        reading: Reading,
        strange: Mapping[str, str] = MappingProxyType({}),
    ) -> list[int]:
        """What a call returned; `reading` learns what the tags in it stand for.

        `strange` shows findings of a code under another name: in lessons, so that a
        grader learns what a name that it has never met means.
        """
        lines = text.split("\n")
        read = {"list_candidates": read_list, "stats": read_stats, "diff": read_diff}
        marks = {}
        if call is not None and call.name in read:
            lines, marks = read[call.name](lines, call, reading)
        for code, name in strange.items():
            lines = [re.sub(f"^{code}: ", f"{name}: ", line) for line in lines]
        shown = self._lines(lines, marks, reading)
        # a page does not show that it is at its end: say that it is time to act
        return [self._id[OBSERVATION], *shown, self._id[ACT]]

    def action_ids(
        self, judgements: Mapping[str, Judgement], call: GraderCall, reading: Reading
    ) -> list[int]:
        """The completion that writes the judgements down and makes `call`."""
        names = []
        for id_, judgement in judgements.items():
            scores = [NUMBERS[points] for points in judgement.scores]
            names += [JUDGE, reading.tag_of(id_), *scores, *judgement.tags]
            names += [BURDEN, number(judgement.burden)]
        names.append(TOOLS.get(call.name, SUBMIT))
        if "id" in call.arguments:
            names.append(reading.tag_of(str(call.arguments["id"])))
        return [self._id[name] for name in (*names, END)]

    def parse(self, ids: Sequence[int], reading: Reading) -> GraderCall:
        """The call of a completion; its judgements go into `reading`.

        Raises MalformedAction. `submit` becomes `submit_grade` with all judgements.
        """
        names = [self._name.get(token, "") for token in ids]
        if not names or names.pop() != END or "" in names:
            raise MalformedAction("an action is made of tags and ends")
        while names and names[0] == JUDGE:
            id_, judgement = take_judgement(names, reading)
            reading.judgements[id_] = judgement
        tool = names.pop(0) if names else ""
        if tool == SUBMIT and not names:
            return submission(reading)
        known = next((name for name, token in TOOLS.items() if token == tool), "")
        targets = [reading.id_of.get(name, "") for name in names]
        if not known or "" in targets or len(targets) != (known != "list_candidates"):
            raise MalformedAction("no such call")
        return GraderCall(known, {"id": targets[0]} if targets else {})

    def _lines(
        self,
        lines: Sequence[str],
        marks: Mapping[int, str],
        reading: Reading | None = None,
    ) -> list[int]:
        """The lines as tokens, each cut, with the tags of `marks` before theirs."""
        half = OBSERVATION_LINES // 2
        shown = list(range(len(lines)))
        if len(shown) > OBSERVATION_LINES:
            shown = [*shown[:half], -1, *shown[-half:]]
        ids: list[int] = []
        for number_ in shown:
            if number_ < 0:
                ids.append(self._id[CUT])
                continue
            if number_ in marks:
                ids.append(self._id[marks[number_]])
            line = self._encode(lines[number_] + "\n", reading)
            is_long = len(line) > LINE_TOKENS
            ids += [*line[:LINE_TOKENS], self._id[CUT]] if is_long else line
        return ids

    def _encode(self, text: str, reading: Reading | None) -> list[int]:
        """Text as tokens, with the tags of ids in their place."""
        tags = {id_: tag for tag, id_ in reading.id_of.items()} if reading else {}
        ids: list[int] = []
        pattern = "|".join(map(re.escape, tags)) or "(?!)"
        for part in re.split(f"({pattern})", text):
            ids += [self._id[tags[part]]] if part in tags else self._text_ids(part)
        return ids


def number(value: int) -> str:
    return NUMBERS[max(0, min(value, MAX_NUMBER))]


def read_list(
    lines: list[str], call: GraderCall, reading: Reading
) -> tuple[list[str], dict[int, str]]:
    """Puts the passing trees first and gives each id a tag: the trees in their order,
    then the further members of trees."""
    rows = [(line, re.findall(r"\bc-[0-9a-f]+\b", line)) for line in lines]
    trees = [(line, ids) for line, ids in rows if ids]
    trees.sort(key=lambda tree: not is_pass(tree[0]))
    order = [ids[0] for _, ids in trees] + [i for _, ids in trees for i in ids[1:]]
    reading.id_of = dict(zip(CANDIDATE_TAGS, order, strict=False))
    known = set(reading.id_of.values())
    for line, ids in trees:
        if is_pass(line):
            reading.members[ids[0]] = [id_ for id_ in ids if id_ in known]
        if "too long" in line:
            reading.oversize.add(ids[0])
    return [line for line, _ in trees], {}


def is_pass(line: str) -> bool:
    """Whether a line of the list is of a passing tree."""
    return line.split()[1:2] == ["pass:"]


def read_stats(
    lines: list[str], call: GraderCall, reading: Reading
) -> tuple[list[str], dict[int, str]]:
    """Tags each finding."""
    entry, marks, member = str(call.arguments["id"]), {}, str(call.arguments["id"])
    lines = [line for line in lines if line not in ("", entry)]
    tags = iter(FINDING_TAGS)
    for number_, line in enumerate(lines):
        if owner := re.match(r"calls of (c-[0-9a-f]+):", line):
            member = owner[1]
        found = FINDING.match(line)
        if not found or found[1] in NO_FINDING or not (tag := next(tags, "")):
            continue
        code, count, place = found[1], int(found[2]), re.split(r", |: ", found[3])[0]
        who = member if code.startswith(PROCESS_PREFIX) else entry
        marks[number_] = tag
        if code == UNREADABLE:
            reading.unreadable.add(entry)
        reading.findings[entry, tag] = Finding(who, code, "by the counts", place, count)
    return lines, marks


def read_diff(
    lines: list[str], call: GraderCall, reading: Reading
) -> tuple[list[str], dict[int, str]]:
    """Drops git's headers and tags each added line with its location.

    A hunk says how many lines it has, so that none of them, whatever it looks like, is
    a header. Behind a cut no line can be located, and none has a tag.
    """
    entry, shown, marks, path = str(call.arguments["id"]), [], {}, ""
    line_number, num_old, num_new = 0, 0, 0
    tags = iter(LINE_TAGS)
    for line in lines:
        if DIFF_CUT.fullmatch(line):
            tags, num_old, num_new = iter(()), math.inf, math.inf
        elif line[:1] == "\\":
            continue  # no newline at the end of the file
        elif num_old > 0 or num_new > 0:
            if line[:1] == "+" and path and (tag := next(tags, "")):
                marks[len(shown)] = tag
                place = f"{path}:{line_number}"
                found = Finding(entry, "other", "by reading the patch", place)
                reading.findings[entry, tag] = found
            line_number += line[:1] in ("+", " ")
            num_new -= line[:1] in ("+", " ")
            num_old -= line[:1] in ("-", " ")
            shown.append(line)
        elif line.startswith("+++ "):
            path = line[4:].removesuffix("\t").removeprefix("b/")
            shown.append(path)
            if path[0] == '"':  # git's spelling of an odd name is not the workspace's
                path = ""
        elif hunk := HUNK.match(line):
            line_number = int(hunk["first"])
            num_old, num_new = int(hunk["old"] or 1), int(hunk["new"] or 1)
    return shown, marks


def take_judgement(names: list[str], reading: Reading) -> tuple[str, Judgement]:
    """The judgement at the head of `names`, which it takes away."""
    _, tag, *rest = names
    entry = reading.id_of.get(tag, "")
    end = rest.index(BURDEN) if BURDEN in rest else 0
    scores = [NUMBERS.index(name) for name in rest[: len(CRITERIA)] if name in NUMBERS]
    tags = rest[len(CRITERIA) : end]
    if entry not in reading.members or len(scores) < len(CRITERIA) or not end:
        raise MalformedAction("a judgement names a passing tree and five scores")
    if any((entry, name) not in reading.findings for name in tags):
        raise MalformedAction("a judgement cites what its pages do not show")
    del names[: 2 + end + 1]
    if not names or names[0] not in NUMBERS:
        raise MalformedAction("a judgement says how much is wrong")
    burden = NUMBERS.index(names.pop(0))
    return entry, Judgement(tuple(scores), tuple(tags), burden)


def submission(reading: Reading) -> GraderCall:
    """The call that hands in all judgements, with the order that follows from them."""
    grades = [
        {"id": id_, **dict(zip(CRITERIA, found.scores, strict=True))}
        for id_, found in reading.judgements.items()
    ]
    flags = [flag for id_ in reading.judgements for flag in cited_flags(id_, reading)]
    arguments = {"grades": grades, "flags": flags, "order": order_of(reading)}
    return GraderCall("submit_grade", arguments)


def cited_flags(id_: str, reading: Reading) -> Iterator[dict[str, object]]:
    """The flags of one tree and its members as arguments of the tool."""
    for tag in reading.judgements[id_].tags:
        finding = reading.findings[id_, tag]
        is_wasteful = (
            finding.code.startswith(PROCESS_PREFIX)
            and num_wasted(finding.owner, id_, reading) >= SEVERE_WASTE
        )
        yield {
            "id": finding.owner,
            "code": finding.code,
            "message": finding.message,
            "evidence": finding.evidence,
            "is_severe": is_wasteful or finding.code in SEVERE_CODES,
        }


def num_wasted(member: str, id_: str, reading: Reading) -> int:
    """Wasted calls of a member, by the process findings that its judgement cites."""
    cited = (reading.findings[id_, tag] for tag in reading.judgements[id_].tags)
    return sum(
        found.count
        for found in cited
        if found.owner == member and found.code.startswith(PROCESS_PREFIX)
    )


def order_of(reading: Reading) -> list[list[str]]:
    """Members from the best on: by tier, then by burden, then by wasted calls."""
    keys = {}
    for id_, judgement in reading.judgements.items():
        cited = list(cited_flags(id_, reading))
        for member in reading.members[id_]:
            flags = [
                Flag(str(f["code"]), "", str(f["evidence"]), bool(f["is_severe"]))
                for f in cited
                if f["id"] == member or not str(f["code"]).startswith(PROCESS_PREFIX)
            ]
            if id_ in reading.oversize:
                flags.append(Flag("oversize", "", "", is_severe=True))
            if id_ in reading.unreadable:
                flags.append(Flag(UNREADABLE, "", ""))
            wasted = num_wasted(member, id_, reading)
            tier = tier_of(judgement.scores, flags)
            keys[member] = (tier, judgement.burden, wasted)
    return [
        [member for member in keys if keys[member] == key]
        for key in sorted(set(keys.values()))
    ]
