"""The files around a source file that say what its project needs: which there are, and whether they changed. They are not read here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from accumlint.source.reading.files import repository

MOST_LEVELS = 12  # folders above a file

_NAMES = frozenset("uv.lock poetry.lock pdm.lock Pipfile.lock Pipfile pyproject.toml setup.cfg setup.py".split())
_BEGINNINGS = ("requirements", "constraints", "environment", "conda", "pylock")
_ENDS = (".txt", ".yml", ".yaml", ".toml")


def upwards(folder: str) -> Iterator[str]:
    """The folders from one up to the root of its repository; without a repository up to the first that describes a project."""
    top = repository(folder)
    for _ in range(MOST_LEVELS):
        yield folder
        parent = os.path.dirname(folder)
        if folder == top or parent == folder or (top is None and described(folder)):
            return
        folder = parent


@cache
def described(folder: str) -> tuple[str, ...]:
    """The files of a folder that describe what a project needs, those in its `requirements` folder among them."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    found = [name for name in names if name in _NAMES or (name.startswith(_BEGINNINGS) and name.endswith(_ENDS))]
    if "requirements" in names:
        with suppress(OSError):
            inside = os.listdir(os.path.join(folder, "requirements"))
            found += [f"requirements/{name}" for name in inside if name.endswith(".txt")]
    return tuple(sorted(found))


@cache
def stamp(folder: str) -> str:
    """Changes when a file changes that says what the files of a folder need, or when packages are installed."""
    parts: list[str] = [_environment()]
    for above in upwards(folder):
        parts += (_state(os.path.join(above, name)) for name in described(above))
    return "\n".join(parts)


@cache
def _environment() -> str:
    places = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    return "\n".join(map(_state, places))


def _state(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError:
        return f"{path} -"
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def forget() -> None:
    """Looks anew: for programs that live longer than the files stay as they are."""
    for each in (described, stamp, _environment, repository):
        each.cache_clear()
