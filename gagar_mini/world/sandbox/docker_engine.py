"""A container engine, seen through the few calls that the sandbox needs.

Everything that goes wrong between this process and the engine is SandboxUnavailable,
with the engine's own words: a program in a container cannot cause it.
"""

import os
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gagar_mini.types import SandboxUnavailable
from gagar_mini.world.sandbox.base import Output
from gagar_mini.world.sandbox.docker_image import REPOSITORY, image_name, write_image

OWNER = "gagar-mini.owner"
"""Label of every container: the process that started it."""
LABEL = "gagar-mini.sandbox"
"""Label of every container: the sandbox that it belongs to."""
KILLED = 137
"""Exit status of what was ended by SIGKILL."""
MAX_IMAGES = 4
ENGINE_TIMEOUT_S = 120.0
"""Seconds for one answer of a busy engine."""
ADVICE = (
    "Start Docker (DOCKER_HOST names an engine elsewhere) and pip install "
    "'gagar-mini[docker]', or use --sandbox bubblewrap."
)


class DockerEngine:
    """The engine that DOCKER_HOST names, else the local one.

    Raises SandboxUnavailable, in a sentence, where none answers.
    """

    def __init__(self) -> None:
        try:
            import docker
        except ImportError:
            raise SandboxUnavailable(
                f"the Docker sandbox needs the Python package docker. {ADVICE}"
            ) from None
        self._errors = docker.errors
        with self._asking(f" {ADVICE}"):
            client = docker.DockerClient.from_env(timeout=int(ENGINE_TIMEOUT_S))
            self._api = client.api
            self._api.ping()

    def close(self) -> None:
        self._api.close()

    def ensure_image(self, name: str) -> str:
        """The name of an image that is there: `name`, or for "" the one built from
        local files, built now if need be. An image that is missing is not pulled."""
        wanted = name or image_name()
        try:
            with self._asking():
                self._api.inspect_image(wanted)
            return wanted
        except MissingThing:
            if name:
                raise SandboxUnavailable(
                    f"the engine has no image {name!r}: docker pull it first"
                ) from None
        with tempfile.TemporaryFile() as file:
            write_image(file)
            file.seek(0)
            tag = wanted.partition(":")[2]
            with self._asking():
                self._api.import_image_from_data(file, REPOSITORY, tag)
        self._drop_old_images()
        return wanted

    def create(self, name: str, image: str, host: Mapping[str, object], **how) -> str:
        """The id of a new container, not started. `host` is its host config."""
        with self._asking():
            config = self._api.create_host_config(**host)
            made = self._api.create_container(
                image, name=name, host_config=config, **how
            )
        return made["Id"]

    def start(self, container: str) -> None:
        with self._asking():
            self._api.start(container)

    def containers(self, label: str) -> list[tuple[str, str, int]]:
        """(id, owner, time of creation in whole seconds) of those with this label,
        running or not."""
        with self._asking():
            found = self._api.containers(all=True, filters={"label": label})
        return [(c["Id"], c["Labels"].get(OWNER, ""), c["Created"]) for c in found]

    def remove(self, container: str) -> None:
        """Kill and remove; one that is gone, or going, is as good."""
        with suppress(MissingThing), self._asking():
            self._api.remove_container(container, force=True, v=True)

    def execute(
        self, container: str, argv: Sequence[str], env: Mapping[str, str], user: str
    ) -> "Execution":
        """Start a program in a running container, connected to its three streams."""
        with self._asking():
            exec_id = self._api.exec_create(
                container, list(argv), stdin=True, environment=dict(env), user=user
            )["Id"]
            stream = self._api.exec_start(exec_id, socket=True)
        return Execution(exec_id, stream)

    def exit_code(self, execution: "Execution", container: str) -> int:
        """The exit status of a program that has ended. Raises SandboxUnavailable where
        its container was taken away, which kills the program, too."""
        with self._asking():
            code = self._api.exec_inspect(execution.id)["ExitCode"]
            if code in (None, KILLED):
                time.sleep(0.2)  # a container that is going still runs for a moment
                state = self._api.inspect_container(container)["State"]
        if code is None or (code == KILLED and not state["Running"]):
            raise SandboxUnavailable("the container ended before its program")
        return code

    def _drop_old_images(self) -> None:
        """Keep the newest few of those built here; one in use stays."""
        with self._asking():
            images = self._api.images(REPOSITORY)
            images.sort(key=lambda image: image["Created"], reverse=True)
        for image in images[MAX_IMAGES:]:
            with suppress(SandboxUnavailable), self._asking():
                self._api.remove_image(image["Id"])

    @contextmanager
    def _asking(self, advice: str = "") -> Iterator[None]:
        try:
            yield
        except self._errors.APIError as error:
            said = str(error.explanation or error)
            is_gone = error.status_code == 404 or "already in progress" in said
            kind = MissingThing if is_gone else SandboxUnavailable
            raise kind(f"the container engine refuses: {said}") from error
        except (self._errors.DockerException, OSError) as error:
            # requests' exceptions are OSErrors
            raise SandboxUnavailable(
                f"no container engine answers: {error}.{advice}"
            ) from error


class MissingThing(SandboxUnavailable):
    """The engine does not know what it was asked about."""


class Execution:
    """A program in a container: its input, and its two outputs in one stream of frames.

    A frame is a head of 8 bytes (stream number, three zeros, length) and its content.
    """

    def __init__(self, exec_id: str, stream: object):
        self.id = exec_id
        self._stream = stream  # holds the HTTP response, and with it the connection
        self._socket: socket.socket = getattr(stream, "_sock", stream)
        self._socket.setblocking(False)
        self._rest = bytearray()
        self.ready_at = 0.0

    def close(self) -> None:
        """Hang up. The response, which the stream keeps, would else hold the
        connection."""
        response = getattr(self._stream, "_response", None)
        for part in (response, self._stream, self._socket):
            with suppress(OSError, ValueError, AttributeError):
                part.close()

    def talk(
        self, given: bytes, outputs: Sequence[Output], *, start_s: float, run_s: float
    ) -> bool:
        """Send `given` and read both outputs until they end (True) or time is up
        (False): `run_s` seconds from the first byte, for which `start_s` are given."""
        deadline = time.monotonic() + start_s
        view = memoryview(given)
        with selectors.DefaultSelector() as selector:
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            selector.register(self._socket, both)
            while (left := deadline - time.monotonic()) > 0:
                for _, events in selector.select(left):
                    if events & selectors.EVENT_WRITE:
                        view = self._send(view)
                        if not view:
                            selector.modify(self._socket, selectors.EVENT_READ)
                    if events & selectors.EVENT_READ and not self._receive(outputs):
                        return True
                if not self.ready_at and outputs[0].content:
                    self.ready_at = time.monotonic()
                    deadline = self.ready_at + run_s
        return False

    def _send(self, view: memoryview) -> memoryview:
        try:
            return view[self._socket.send(view[:65_536]) :]
        except BlockingIOError:
            return view
        except OSError:
            return view[:0]  # nobody reads any more: the output says why

    def _receive(self, outputs: Sequence[Output]) -> bool:
        """One read, its complete frames added to the outputs; False at the end."""
        try:
            chunk = self._socket.recv(65_536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._rest += chunk
        start = 0
        while len(self._rest) - start >= 8:
            number, length = struct.unpack_from(">BxxxL", self._rest, start)
            if len(self._rest) - start - 8 < length:
                break
            outputs[number - 1].add(bytes(self._rest[start + 8 : start + 8 + length]))
            start += 8 + length
        del self._rest[:start]
        return bool(chunk)


def this_process() -> str:
    """A name for this process that no later one can have on this machine."""
    return name_of(os.getpid())


def is_gone(owner: str) -> bool:
    """Whether the process of this name has ended; False where nobody can know."""
    *place, pid, _ = owner.split("/")
    own_place = this_process().split("/")[:-2]
    return place == own_place and name_of(int(pid)) != owner


def name_of(pid: int) -> str:
    """host/PID namespace/pid/start time; the last is "" for a process that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = "" if fields[0] == "Z" else fields[19]
        room = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        started, room = "", ""
    return f"{socket.gethostname()}/{room}/{pid}/{started}"
