"""Reads files that nobody named, but that lie where one looks."""

from __future__ import annotations

import os


def contents(path: str, most: int = -1) -> bytes:
    """The first `most` bytes of a file, or all of them; none of a pipe, which would keep the reader waiting. Raises OSError."""
    with open(path, "rb", opener=_at_once) as file:
        return file.read(most) or b""


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
