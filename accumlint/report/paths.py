"""How a file, and a place in it, is named in a report."""

from __future__ import annotations

import os
from pathlib import Path

from accumlint.trace import Place


def absolute(path: str, root: Path) -> str:
    return path if os.path.isabs(path) else os.path.normpath(root / path)


def position(place: Place) -> str:
    """Line and column; in a notebook those within the cell, with the cell before them."""
    return f"cell {place.cell}:{place.row}:{place.column}" if place.cell else f"{place.line}:{place.column}"


def relative(path: str, root: Path) -> str:
    """From the root where the file lies below it, else as it is."""
    if not os.path.isabs(path):
        return os.path.normpath(path)
    try:
        return str(Path(path).relative_to(root))
    except ValueError:
        return path
