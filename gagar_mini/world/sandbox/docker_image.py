"""An image for the Docker sandbox, made of this machine's own files: nothing is pulled.

It holds the running interpreter with its standard library and without any installed
package, a shell with the usual tools, git, and the libraries that these link to: what a
bubblewrap sandbox shows of the system, in about 100 MB.
"""

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox.base import find_interpreter
from gagar_mini.world.sandbox.bubblewrap import interpreter_paths

REPOSITORY = "gagar-mini-sandbox"
PROGRAMS = (
    "sh bash dash cat cp mv rm mkdir rmdir ls ln chmod touch head tail wc sort uniq "
    "cut tr tee tac rev paste join comm fold nl od split csplit seq printf expr test "
    "true false env id whoami uname date sleep yes basename dirname realpath readlink "
    "mktemp stat du df sha256sum md5sum base64 cksum truncate timeout nice nohup kill "
    "ps grep egrep fgrep sed awk find xargs diff cmp patch tar gzip gunzip file less "
    "git which prlimit setsid mkfifo install"
)
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter",
    "turtledemo", "ensurepip", "lib2to3", "pkgconfig",
}  # fmt: skip
LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")
ACCOUNTS = {
    "etc/passwd": b"root:x:0:0::/:/bin/false\nnobody:x:65534:65534::/tmp:/bin/sh\n",
    "etc/group": b"root:x:0:\nnogroup:x:65534:\n",
}


def image_name() -> str:
    """Name and tag of the image: the tag is a hash of what it would be made from, as
    far as that is known without reading it all."""
    digest = hashlib.sha256(sys.version.encode())
    digest.update(Path(__file__).read_bytes())
    for path in (find_interpreter(), *programs().values()):
        digest.update(f"{path} {path.stat().st_mtime_ns}\n".encode())
    return f"{REPOSITORY}:{digest.hexdigest()[:12]}"


def write_image(file: BinaryIO) -> None:
    """Write the image's file system as a tar. Raises SandboxUnavailable where this
    machine has no files that a container could run."""
    if platform.system() != "Linux":
        raise SandboxUnavailable(
            f"an image is built from Linux files, and this is {platform.system()}: "
            "name an image that has Python, such as --image python:3.11"
        )
    contents = dict(collect())
    with tarfile.open(fileobj=file, mode="w") as archive:
        for folder in ("bin", "lib", "lib64", "sbin"):
            if os.path.islink(f"/{folder}"):
                add_link(archive, folder, os.readlink(f"/{folder}"))
        for folder in ("w", "tmp", "proc", "dev", "sys"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        for name in ("python", "python3"):
            add_link(archive, f"usr/local/bin/{name}", str(find_interpreter()))
        for name, content in ACCOUNTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        for name, path in sorted(contents.items()):
            add_file(archive, name, path)


def collect() -> Iterator[tuple[str, Path]]:
    """(path in the image, file here) of everything but links, folders and accounts."""
    wanted = [*programs().items()]
    for top in interpreter_paths() or [find_interpreter(), Path(os.__file__).parent]:
        wanted += [(str(path), path) for path in files_under(top)]
    locale = Path("/usr/lib/locale/C.utf8")
    if locale.is_dir():
        wanted += [(str(path), path) for path in files_under(locale)]
    linked = [path for _, path in wanted if is_program(path)]
    wanted += [(name, Path(name)) for name in libraries_of(linked)]
    for name, path in wanted:
        # /bin and /lib may be links, which are written as such
        folder, last = os.path.split(name)
        yield os.path.join(os.path.realpath(folder), last).lstrip("/"), path


def programs() -> dict[str, Path]:
    """The programs that exist here: path in the image -> file."""
    found = {
        name: shutil.which(name, path="/usr/bin:/bin") for name in PROGRAMS.split()
    }
    return {
        f"/usr/bin/{name}": Path(path).resolve() for name, path in found.items() if path
    }


def files_under(top: Path) -> Iterator[Path]:
    """The files of a tree; of an interpreter's, those that programs run with."""
    if top.is_file():
        yield top
    for folder, names, files in os.walk(top):
        names[:] = sorted(set(names) - LEFT_OUT)
        for name in files:
            path = Path(folder, name)
            if path.is_file() and path.suffix not in (".a", ".o"):
                yield path


def is_program(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def libraries_of(paths: list[Path]) -> list[str]:
    """The shared libraries that these files link to, the loader included."""
    found: set[str] = set()
    for start in range(0, len(paths), 50):
        done = subprocess.run(
            ["ldd", *map(str, paths[start : start + 50])],
            capture_output=True,
            text=True,
            timeout=60,
        )
        found |= set(LIBRARY.findall(done.stdout))
    return sorted(found)


def add_file(archive: tarfile.TarFile, name: str, path: Path) -> None:
    entry = tarfile.TarInfo(name)
    status = path.stat()
    entry.size, entry.mtime = status.st_size, int(status.st_mtime)
    entry.mode = 0o755 if status.st_mode & 0o111 else 0o644  # no setuid, ever
    with path.open("rb") as content:
        archive.addfile(entry, content)


def add_link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)
