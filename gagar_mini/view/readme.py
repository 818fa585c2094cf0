"""Results -> README: every number that it quotes comes from a file of data/results.

Two kinds of marks, invisible where the page is rendered:

    <!--=main.json:gagar.pass_rate:.2f-->0.84<!--/-->     a number, by key and format
    <!--file=main.md-->                             a whole file of results, or a PNG
    ...
    <!--/file-->

`make readme` fills them in; a test compares.
"""

import json
import re
from pathlib import Path

NUMBER = re.compile(r"<!--=([\w./-]+):([\w.,+ -]+):([^>]*?)-->.*?<!--/-->", re.DOTALL)
BLOCK = re.compile(r"<!--file=([\w./-]+)-->\n.*?<!--/file-->", re.DOTALL)
NOTHING_YET = "(no results recorded yet: `make demo` makes the first)"


def fill(text: str, results: Path) -> str:
    """`text` with every mark filled in from the folder `results`.

    A file that a block names may be missing, and the page says so. Raises ValueError
    for a number that its file does not have.
    """
    text = BLOCK.sub(lambda mark: block(mark[1], results), text)
    return NUMBER.sub(lambda mark: number(mark[1], mark[2], mark[3], results), text)


def block(name: str, results: Path) -> str:
    path = results / name
    if not path.exists():
        content = NOTHING_YET
    elif path.suffix == ".png":
        content = f"![Learning curves of the arms](data/results/{name})"
    else:
        content = path.read_text().strip()
    return f"<!--file={name}-->\n{content}\n<!--/file-->"


def number(name: str, key: str, spec: str, results: Path) -> str:
    value = json.loads((results / name).read_text())
    for part in key.split("."):
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(part), {})
        elif part not in value:
            raise ValueError(f"{name} has no {key!r}: {part!r} is missing")
        else:
            value = value[part]
    return f"<!--={name}:{key}:{spec}-->{value:{spec}}<!--/-->"


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    readme = root / "README.md"
    readme.write_text(fill(readme.read_text(), root / "data" / "results"))


if __name__ == "__main__":
    main()
