"""Rows -> a plain text table, and numbers as a reader wants them."""

import math
from collections.abc import Mapping, Sequence

Cell = str | int | float | bool | None


def text_table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """A table with the keys of the first row as its head; numbers stand to the
    right."""
    if not rows:
        return "(nothing to show)"
    head = list(rows[0])
    cells = [[cell_text(row.get(name)) for name in head] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    is_number = [
        all(isinstance(row.get(name), int | float | None) for row in rows)
        for name in head
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in [head, *cells]
    )


def cell_text(value: Cell) -> str:
    """Three decimals at most; a value that does not exist is a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def without_nan(value: object) -> object:
    """`value` with every number that is not finite replaced by None, as JSON needs
    it."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value
