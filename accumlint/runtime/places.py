"""Where in the user's code something happens: the frames of their own files, innermost first."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import islice
from types import CodeType, FrameType

MAX_FRAMES = 16  # of the user's own
MAX_DEPTH = 400

OWN, LIBRARY, USER = 0, 1, 2
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD = tuple({os.path.realpath(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib")})
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

# Path, line, column, end line, end column (1-based, end exclusive), function.
Site = tuple[str, int, int, int, int, str]


@cache
def belongs_to(filename: str) -> int:
    """Whose file it is: torch's, the standard library's or ours, another library's, or the user's."""
    if filename.startswith("<"):
        return OWN
    path = os.path.realpath(filename)
    if path.startswith(_HERE + os.sep) and f"{os.sep}fixtures{os.sep}" not in path:
        return OWN
    if any(part in path for part in _INSTALLED):
        return OWN if f"{os.sep}torch{os.sep}" in path.rpartition("-packages")[2] else LIBRARY
    return OWN if path.startswith(_STANDARD) else USER


@cache
def is_probe(filename: str) -> bool:
    """Whether it is a file of the tool itself, as it stands between the user's calls and torch."""
    return os.path.realpath(filename).startswith(os.path.join(_HERE, "runtime") + os.sep)


def user_frames(depth: int = 2) -> list[FrameType]:
    """The frames of the user's files, innermost first; those of other libraries where the user has none."""
    found: list[FrameType] = []
    libraries: list[FrameType] = []
    frame: FrameType | None = sys._getframe(depth)
    for _ in range(MAX_DEPTH):
        if frame is None or len(found) >= MAX_FRAMES:
            break
        owner = belongs_to(frame.f_code.co_filename)
        if owner == OWN and _runs_main(frame.f_code):
            break
        if owner == USER:
            found.append(frame)
        elif owner == LIBRARY and len(libraries) < MAX_FRAMES:
            libraries.append(frame)
        frame = frame.f_back
    return found or libraries


def _runs_main(code: CodeType) -> bool:
    """Whether this is what runs a script: nothing of the script lies outside it."""
    return "runpy" in code.co_filename and code.co_name in {"run_path", "_run_module_as_main", "run_module"}


def site(frame: FrameType) -> Site:
    """Where a frame is at this moment."""
    return _site(frame.f_code, frame.f_lasti, frame.f_lineno)


@lru_cache(maxsize=4096)
def _site(code: CodeType, offset: int, line: int) -> Site:
    path = os.path.realpath(code.co_filename)
    name = getattr(code, "co_qualname", code.co_name)
    start, end, column, end_column = next(islice(_positions(code), offset // 2, None), (None, None, None, None))
    if start is None or column is None or end is None or end_column is None:
        return (path, line, 1, 0, 0, name)
    return (path, start, column + 1, end, end_column + 1, name)


def _positions(code: CodeType) -> Iterable[tuple[int | None, int | None, int | None, int | None]]:
    return code.co_positions() if hasattr(code, "co_positions") else ()
