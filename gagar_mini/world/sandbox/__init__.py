"""Where untrusted code runs; `open_sandbox` is the way in."""

from gagar_mini.world.sandbox.base import Limits, RunResult, Sandbox
from gagar_mini.world.sandbox.bubblewrap import BubblewrapSandbox
from gagar_mini.world.sandbox.docker import DockerSandbox
from gagar_mini.world.sandbox.unsafe_local import UnsafeLocalSandbox

__all__ = ["Limits", "RunResult", "Sandbox", "open_sandbox"]

BACKENDS = {
    "bubblewrap": BubblewrapSandbox,
    "docker": DockerSandbox,
    "unsafe-local": UnsafeLocalSandbox,
}


def open_sandbox(name: str, image: str = "") -> Sandbox:
    """The sandbox of this name, ready to run. Close it when done.

    `image` names the image of the Docker sandbox ("": built from local files). Raises
    ValueError for an unknown name, SandboxUnavailable where this machine cannot run it:
    no other backend is tried in its place.
    """
    if name not in BACKENDS:
        raise ValueError(f"sandbox {name!r} is none of {', '.join(BACKENDS)}")
    if name == "docker":
        return DockerSandbox(image)
    if image:
        raise ValueError(f"the sandbox {name} takes no image: that is for docker")
    return BACKENDS[name]()
