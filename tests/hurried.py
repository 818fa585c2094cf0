"""Many programs judged in little time, though some of them wait for a limit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from gagar_mini.world.sandbox import Sandbox


@dataclass(frozen=True)
class Hurried:
    """A sandbox with less patience, so that what hangs costs less of the suite."""

    sandbox: Sandbox
    wall_s: float
    name: str = "hurried"

    def run(self, files, argv, *, stdin=b"", limits):
        limits = replace(limits, wall_s=self.wall_s)
        return self.sandbox.run(files, argv, stdin=stdin, limits=limits)

    def close(self):
        self.sandbox.close()


def side_by_side(work, items):
    """`work` of each item, by item: some wait for a limit, so four go on at once."""
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(items, pool.map(work, items), strict=True))
