"""Where untrusted code runs; `open_sandbox` is the way in."""

from gagar_mini.world.sandbox.base import Limits, RunResult, Sandbox
from gagar_mini.world.sandbox.bubblewrap import BubblewrapSandbox
from gagar_mini.world.sandbox.unsafe_local import UnsafeLocalSandbox

__all__ = ["Limits", "RunResult", "Sandbox", "open_sandbox"]

BACKENDS = {"bubblewrap": BubblewrapSandbox, "unsafe-local": UnsafeLocalSandbox}


def open_sandbox(name: str) -> Sandbox:
    """The sandbox of this name, ready to run. Close it when done.

    Raises ValueError for an unknown name, SandboxUnavailable where this machine cannot
    run it: no other backend is tried in its place.
    """
    if name not in BACKENDS:
        raise ValueError(f"sandbox {name!r} is none of {', '.join(BACKENDS)}")
    return BACKENDS[name]()
