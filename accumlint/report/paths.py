"""How a file is named in a report."""

from __future__ import annotations

import os
from pathlib import Path


def absolute(path: str, root: Path) -> str:
    return path if os.path.isabs(path) else os.path.normpath(root / path)


def relative(path: str, root: Path) -> str:
    """From the root where the file lies below it, else as it is."""
    if not os.path.isabs(path):
        return os.path.normpath(path)
    try:
        return str(Path(path).relative_to(root))
    except ValueError:
        return path
