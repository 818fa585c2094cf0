"""Repository tasks as other projects publish them, read from their files.

    swe-bench   FAIL_TO_PASS and PASS_TO_PASS as lists or as JSON strings of lists
    swe-smith   the patch *is* the bug: the repair is its reverse
    mimo        MiMo-V2.6-RL-oss: a row wraps the instance as a JSON string; its hidden
                tests are a test patch and a command, and no repair is published

Files are JSON, JSON lines or parquet. None of them holds the repository itself: an
`Instance` names it, by commit or by image. A field that is missing, unknown or of the
wrong kind is a ValueError in one sentence that names file, record and field.
"""

import json
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gagar_mini.types import Files, HiddenTest, Task
from gagar_mini.world.patches import MAX_TREE_BYTES, PatchError, apply_patch
from gagar_mini.world.pytest_runner import SUITE, Suite, encode_suite
from gagar_mini.world.reversal import reverse_patch

MAX_FILE_BYTES = 1 << 30
Record = Mapping[str, object]

REQUIRED = {
    "swe-bench": ("instance_id", "repo", "base_commit", "patch", "test_patch",
                  "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"),
    "swe-smith": ("instance_id", "repo", "patch", "FAIL_TO_PASS", "PASS_TO_PASS",
                  "image_name"),
    "mimo": ("instance_id", "problem_statement", "test_patch", "test_command"),
}  # fmt: skip
OPTIONAL = {
    "swe-bench": ("hints_text", "created_at", "version", "environment_setup_commit",
                  "difficulty", "image", "eval_script", "log_parser", "eval_type",
                  "bug_patch", "test_command", "workdir"),
    "swe-smith": ("problem_statement", "base_commit", "created_at", "strategy"),
    "mimo": ("cwd", "docker_image", "dataset_type"),
}  # fmt: skip
OWN = ("image", "bug_patch", "test_command", "workdir")
"""Optional fields of swe-bench that an `Instance` has a place for; the last three are
written by this project only."""
MIMO_ROW = ("data_source", "prompt", "ability", "reward_model", "extra_info")
MIMO_IMAGES = "xiaomimimo/mimo-v2.6-rl-oss"
"""Where the images are published, tagged with the instance id; the field docker_image
holds a name of the builder's machine."""
TEST_LISTS = ("FAIL_TO_PASS", "PASS_TO_PASS")


@dataclass(frozen=True)
class Instance:
    """One repository task of another project, whose repository lies elsewhere.

    `bug_patch` turns the sound repository into the one that the agent gets, b"" where
    that is the commit itself. `gold_patch` repairs it, b"" where no repair is
    published. `extra` keeps the optional fields that mean nothing here.
    """

    id: str
    repo: str
    base_commit: str
    statement: str
    gold_patch: bytes
    test_patch: bytes = b""
    bug_patch: bytes = b""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    image: str = ""
    test_command: str = ""
    workdir: str = ""
    extra: Mapping[str, object] = field(default_factory=dict)


def read_instances(
    path: Path, kind: str, *, ignore: Sequence[str] = ()
) -> tuple[Instance, ...]:
    """The instances of a file (.json, .jsonl or .parquet) of a kind in `KINDS`.

    Fields named in `ignore` are left out; any other unknown one is an error, since a
    field that is silently dropped may have been the one that mattered.
    """
    if kind not in KINDS:
        raise ValueError(f"task format {kind!r} is none of {', '.join(KINDS)}")
    instances: dict[str, Instance] = {}
    for name, record in _records(path):
        instance = read_instance(record, kind, name=name, ignore=ignore)
        if instance.id in instances:
            raise ValueError(f"{name}: instance {instance.id!r} is there twice")
        instances[instance.id] = instance
    return tuple(instances.values())


def read_instance(
    record: Record, kind: str, *, name: str = "record", ignore: Sequence[str] = ()
) -> Instance:
    """The instance of one record; `name` begins the sentence of an error."""
    if kind == "mimo":
        record = _unwrap(record, name)
    known = {*REQUIRED[kind], *OPTIONAL[kind]}
    name = f"{name} ({str(record.get('instance_id', 'without an id'))[:80]})"
    missing = [key for key in REQUIRED[kind] if record.get(key) is None]
    if missing:
        raise ValueError(f"{name} lacks {', '.join(missing)}, which {kind} needs")
    unknown = sorted(record.keys() - known - set(ignore))
    if unknown:
        raise ValueError(
            f"{name} has the field {unknown[0]!r}, which {kind} does not know: name it "
            "in --ignore-fields to leave it out"
        )
    values = {key: _typed(name, key, record[key]) for key in known & record.keys()}
    try:
        return KINDS[kind](values)
    except PatchError as error:
        raise ValueError(f"{name}: {error}") from None


def make_task(instance: Instance, tree: Files, *, split: str = "imported") -> Task:
    """The task of an instance whose repository, at the base commit, is `tree`.

    The agent gets the tree with the bug, if there is a bug patch; hidden tests are the
    files that the test ids name, as the test patch leaves them, run by the hardened
    pytest runner. Raises ValueError for an instance without pytest ids, and for patches
    that do not apply.
    """
    ids = (*instance.fail_to_pass, *instance.pass_to_pass)
    paths = {id_.partition("::")[0] for id_ in ids}
    if not ids or not all("::" in id_ for id_ in ids):
        raise ValueError(f"instance {instance.id!r} names no tests as pytest does")
    try:
        base = apply_patch(tree, instance.bug_patch)
        gold = apply_patch(base, instance.gold_patch)
        tested = apply_patch(base, instance.test_patch)
    except PatchError as error:
        raise ValueError(f"instance {instance.id!r} and this tree: {error}") from None
    lacking = sorted(paths - tested.keys())
    if lacking:
        raise ValueError(f"instance {instance.id!r}: this tree has no {lacking[0]}")
    changed = {path for path in base.keys() | gold if base.get(path) != gold.get(path)}
    new = {path for path in tested if tested[path] != base.get(path)}
    hooks = {path for path in tested if path.split("/")[-1] == "conftest.py"}
    kept = {path: tested[path] for path in sorted(paths | new | hooks)}
    suite = Suite(kept, ids, needs_conftest=bool(hooks))
    return Task(
        id=instance.id,
        family="imported",
        split=split,
        statement=instance.statement,
        files=base,
        visible_check="",
        targets=(),
        allowed_paths=tuple(sorted(changed)),
        hidden_tests=tuple(HiddenTest(id_, id_.partition("::")[0], "") for id_ in ids),
        gold_patch=instance.gold_patch,
        metadata={
            SUITE: encode_suite(suite),
            "repo": instance.repo,
            "base_commit": instance.base_commit,
            "image": instance.image,
            "fail_to_pass": json.dumps(instance.fail_to_pass),
        },
    )


def read_tree(folder: Path) -> dict[str, bytes]:
    """The files of a checkout, without git's own: links and special files are left out.

    Raises ValueError for a folder that is none, or larger than a tree may be.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: it must hold a checkout")
    files, size = {}, 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(root, name)
            if not stat.S_ISREG(path.lstat().st_mode):
                continue
            size += path.lstat().st_size
            if size > MAX_TREE_BYTES:
                raise ValueError(f"{folder} holds more than {MAX_TREE_BYTES} bytes")
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def write_instances(path: Path, instances: Sequence[Instance]) -> None:
    """Write instances as SWE-bench JSON lines, test ids as lists.

    What SWE-bench has no field for (a bug patch, a command, a folder) stands beside its
    fields, so that reading the file as "swe-bench" gives the same instances.
    """
    lines = [json.dumps(instance_record(instance)) + "\n" for instance in instances]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))


def instance_record(instance: Instance) -> dict[str, object]:
    """The SWE-bench record of an instance; empty fields that it need not have are left
    out."""
    record: dict[str, object] = {
        "instance_id": instance.id,
        "repo": instance.repo,
        "base_commit": instance.base_commit,
        "problem_statement": instance.statement,
        "patch": _text(instance.gold_patch),
        "test_patch": _text(instance.test_patch),
        "FAIL_TO_PASS": list(instance.fail_to_pass),
        "PASS_TO_PASS": list(instance.pass_to_pass),
    }
    beside = {
        "image": instance.image,
        "bug_patch": _text(instance.bug_patch),
        "test_command": instance.test_command,
        "workdir": instance.workdir,
    }
    record |= {key: value for key, value in beside.items() if value}
    return record | dict(instance.extra)


def _swe_bench(values: Record) -> Instance:
    return Instance(
        id=values["instance_id"],
        repo=values["repo"],
        base_commit=values["base_commit"],
        statement=values["problem_statement"],
        gold_patch=_bytes(values["patch"]),
        test_patch=_bytes(values["test_patch"]),
        fail_to_pass=values["FAIL_TO_PASS"],
        pass_to_pass=values["PASS_TO_PASS"],
        bug_patch=_bytes(values.get("bug_patch", "")),
        image=values.get("image", ""),
        test_command=values.get("test_command", ""),
        workdir=values.get("workdir", ""),
        extra=_extra(values),
    )


def _swe_smith(values: Record) -> Instance:
    bug = _bytes(values["patch"])
    return Instance(
        id=values["instance_id"],
        repo=values["repo"],
        base_commit=values.get("base_commit", ""),
        statement=values.get("problem_statement", ""),
        gold_patch=reverse_patch(bug),
        bug_patch=bug,
        fail_to_pass=values["FAIL_TO_PASS"],
        pass_to_pass=values["PASS_TO_PASS"],
        image=values["image_name"],
        extra=_extra(values),
    )


def _mimo(values: Record) -> Instance:
    return Instance(
        id=values["instance_id"],
        repo="",
        base_commit="HEAD",  # of the repository in the image
        statement=values["problem_statement"],
        gold_patch=b"",
        test_patch=_bytes(values["test_patch"]),
        image=f"{MIMO_IMAGES}:{values['instance_id']}",
        test_command=values["test_command"],
        workdir=values.get("cwd", ""),
    )


KINDS: dict[str, Callable[[Record], Instance]] = {
    "swe-bench": _swe_bench,
    "swe-smith": _swe_smith,
    "mimo": _mimo,
}


def _extra(values: Record) -> dict[str, object]:
    kept = values.keys() & {*OPTIONAL["swe-bench"]} - {*OWN}
    return {key: values[key] for key in sorted(kept)}


def _unwrap(row: Record, name: str) -> dict[str, object]:
    """The instance inside a row of MiMo-V2.6-RL-oss; of its fields, only those that are
    known: the set of the others differs from domain to domain."""
    unknown = sorted(row.keys() - set(MIMO_ROW))
    if unknown:
        raise ValueError(f"{name} has the field {unknown[0]!r}, which mimo has not")
    wrapper = row.get("extra_info")
    text = wrapper.get("instance_json") if isinstance(wrapper, Mapping) else None
    if not isinstance(text, str):
        raise ValueError(f"{name} lacks extra_info.instance_json, a JSON text")
    instance = _parse(text, f"{name}: instance_json")
    if not isinstance(instance, dict):
        raise ValueError(f"{name}: instance_json is no object")
    known = {*REQUIRED["mimo"], *OPTIONAL["mimo"]}
    return {key: value for key, value in instance.items() if key in known}


def _typed(name: str, key: str, value: object) -> object:
    """A field as text, a list of test ids as a tuple; None, which parquet writes for an
    absent text, as ""."""
    if key in TEST_LISTS:
        return _test_ids(name, key, value)
    if value is None or isinstance(value, str):
        return value or ""
    if key in OPTIONAL["swe-bench"]:  # such as a date, which parquet keeps as one
        return str(value)
    raise ValueError(f"{name}: {key} is {str(value)[:40]!r}: it must be text")


def _test_ids(name: str, key: str, value: object) -> tuple[str, ...]:
    listed = _parse(value, f"{name}: {key}") if isinstance(value, str) else value
    is_list = isinstance(listed, list | tuple)
    if not is_list or not all(isinstance(test, str) for test in listed):
        raise ValueError(
            f"{name}: {key} must be a list of test ids, or a JSON text of one, not "
            f"{str(value)[:40]!r}"
        )
    return tuple(listed)


def _records(path: Path) -> list[tuple[str, Record]]:
    """(where it stands, record) of each record of a file."""
    if path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        text = _decoded(path)
        if path.suffix == ".json":
            rows = _parse(text, str(path))
            rows = rows if isinstance(rows, list) else [rows]
        elif path.suffix == ".jsonl":
            # not splitlines: a line separator of Unicode may stand inside a text
            lines = text.split("\n")
            rows = [_parse(x, f"{path}:{n}") for n, x in enumerate(lines, 1) if x]
        else:
            raise ValueError(f"{path} must end in .json, .jsonl or .parquet")
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}:{number} is no object")
    return [(f"{path}:{number}", row) for number, row in enumerate(rows, start=1)]


def _parquet(path: Path) -> list[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(
            f'{path} is parquet, which takes pyarrow: pip install "gagar-mini[parquet]"'
        ) from None
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from None


def _decoded(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}") from None


def _parse(text: str, name: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is no valid JSON: {error}") from None


def _bytes(patch: str) -> bytes:
    """A patch as bytes; a byte that is no UTF-8 stands in the text as a surrogate."""
    try:
        return patch.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise PatchError(
            f"character {error.start} of a patch is a lone surrogate, which is no text"
        ) from None


def _text(patch: bytes) -> str:
    return patch.decode("utf-8", "surrogateescape")
