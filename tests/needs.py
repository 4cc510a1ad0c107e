"""Which scripts can run here: a script that needs a package beyond torch says so in its head, `# needs: lightning`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

HEAD = 4  # lines


def can_run(path: Path) -> bool:
    """Whether every package that a script needs is installed."""
    head = "\n".join(path.read_text(encoding="utf-8", errors="replace").split("\n")[:HEAD])
    needed = [name for line in re.findall(r"^# needs: (.+)$", head, re.MULTILINE) for name in re.split(r"[,\s]+", line.strip())]
    return all(importlib.util.find_spec(name) is not None for name in needed)
