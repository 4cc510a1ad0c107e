"""Finds who uses a file: the files of its project that import it, up to the scripts that a training starts from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from accumlint.config import DEFAULT_EXCLUDE
from accumlint.source.cache import SIZES
from accumlint.source.reading.imports import MARKERS
from accumlint.source.reading.leads import MOST_BYTES, Leads, is_test_file
from accumlint.source.reading.words import WRAPPER_NAMES

MOST_FILES = 400  # that are looked into for one file
MOST_FOLDERS = 200
MOST_KEPT = 16_000_000  # bytes of the files that are kept in memory
MOST_CALLERS = 2
FARTHEST = 3  # imports between a script and the file
MOST_BETWEEN = 8  # importers at one distance that are asked for theirs

WRAPPERS = tuple(sorted(name.encode() for name in WRAPPER_NAMES if len(name) > 4))  # too short a name stands in other words

_DEFINED = re.compile(rb"^(?:async[ \t]+def|def|class)[ \t]+(\w+)", re.MULTILINE)
_SCRIPT = re.compile(rb"^if\b[^\n]*\b__name__\b", re.MULTILINE)
_LEFT_OUT = frozenset({*DEFAULT_EXCLUDE, "test", "tests", "testing"})


@dataclass(frozen=True)
class Use:
    """The files that a look at a file may start from, the best first, and what else that rests on (folders as the cache takes them)."""

    starts: tuple[str, ...]
    asked: tuple[str, ...]


class Callers:
    """Answers it for the files of one run, each of which is read at most once for it."""

    def __init__(self, leads: Leads) -> None:
        self.leads = leads
        self._contents: dict[str, bytes] = {}
        self._bytes = 0
        self._imports: dict[str, frozenset[str]] = {}

    def of(self, path: str, names: Iterable[str]) -> Use:
        """Who uses one of these names of a file."""
        folder = os.path.dirname(path)
        near, folders = self._near(folder)
        found: list[str] = []
        seen, edge = {path}, {path: tuple(name.encode() for name in names)}
        for _ in range(FARTHEST):
            importers: dict[str, tuple[bytes, ...]] = {}
            for each in near:
                targets = [] if each in seen else [target for target, wanted in edge.items() if self._uses(each, target, wanted)]
                if targets:
                    importers[each] = edge[targets[0]] if _passes_on(each) else self._defined(each)
            nearest = sorted(importers, key=lambda each: (_steps(folder, each), each))
            found += (each for each in nearest if not _passes_on(each))
            seen.update(nearest)
            edge = {each: importers[each] for each in nearest[:MOST_BETWEEN]}
        found.sort(key=lambda each: not self._is_script(each))  # among equals the nearest stays first
        asked = {each + end for each in folders for end in (os.sep, SIZES)} | {each for each in seen if each != path}
        return Use(tuple(found[:MOST_CALLERS]), tuple(sorted(asked)))

    def meeting(self, path: str, owner: str, method: str) -> Use:
        """The files that make a wrapper and call a method of this name on some object, though they need not import the file that has it.

        None where a class that has nothing to do with the method's owner has one of that name too.
        """
        near, folders = self._near(os.path.dirname(path))
        defined = re.compile(rb"^[ \t]+(?:async[ \t]+)?def[ \t]+" + method.encode() + rb"\(", re.MULTILINE)
        called = re.compile(rb"\w\." + method.encode() + rb"\(")
        found = [
            each for each in near if each != path and any(word in self._read(each) for word in WRAPPERS) and called.search(self._read(each))
        ]
        others = (data for each in near if each not in {path, *found} for data in (self._read(each),) if owner.encode() not in data)
        if any(map(defined.search, others)):
            found = []
        asked = {each + end for each in folders for end in (os.sep, SIZES)} | set(found)
        return Use(tuple(found[:MOST_CALLERS]), tuple(sorted(asked)))

    def mentions(self, path: str, text: str) -> bool:
        """Whether some text stands in a file."""
        return text.encode() in self._read(path)

    def _near(self, folder: str) -> tuple[list[str], list[str]]:
        """The modules of the project, those in the folder and below first, then those in and below each one above; and the folders."""
        files: list[str] = []
        done: dict[str, None] = {}
        for inner in self._around(folder):
            if inner not in done:
                done[inner] = None
                names = sorted(self.leads.imports.folders.names(inner))
                files += (os.path.join(inner, name) for name in names if name.endswith(".py") and not is_test_file(name))
            if len(files) >= MOST_FILES or len(done) >= MOST_FOLDERS:
                break
        return files[:MOST_FILES], list(done)

    def _around(self, folder: str) -> Iterator[str]:
        """A folder and those below, then those above; where nothing marks the project's root, two more that hold the package perhaps."""
        folders = self.leads.imports.folders
        top = folders.root(folder)
        yield from self._below(folder)
        while folder != top:
            folder = os.path.dirname(folder)
            yield from self._below(folder)
        if not folders.names(top) & MARKERS:
            yield os.path.dirname(top)
            yield os.path.dirname(os.path.dirname(top))

    def _below(self, folder: str) -> Iterator[str]:
        """A folder and those in it, level by level."""
        level = [folder]
        while level:
            yield from level
            level = [os.path.join(each, name) for each in level for name in self._folders(each)]

    def _folders(self, folder: str) -> list[str]:
        names = self.leads.imports.folders.names(folder)
        return sorted(name for name in names if "." not in name and name not in _LEFT_OUT and os.path.isdir(os.path.join(folder, name)))

    def _uses(self, path: str, target: str, names: tuple[bytes, ...]) -> bool:
        """Whether a file imports another and mentions one of these names."""
        name = os.path.basename(os.path.dirname(target)) if _passes_on(target) else os.path.basename(target)[: -len(".py")]
        data = self._read(path)
        if name.encode() not in data and not (_passes_on(target) and b"from ." in data):
            return False
        if not (_passes_on(path) and b"import *" in data) and not any(each in data for each in names):
            return False
        if path not in self._imports:
            self._imports[path] = frozenset(self.leads.imported(path, data))
        return target in self._imports[path]

    def _defined(self, path: str) -> tuple[bytes, ...]:
        """The functions and classes at the top of a file."""
        return tuple(dict.fromkeys(_DEFINED.findall(self._read(path))))

    def _is_script(self, path: str) -> bool:
        return _SCRIPT.search(self._read(path)) is not None

    def _read(self, path: str) -> bytes:
        known = self._contents.get(path)
        if known is None:
            if self._bytes > MOST_KEPT:
                self._contents.clear()
                self._bytes = 0
            known = self._contents[path] = self.leads.read(path)
            self._bytes += len(known)
        return known if len(known) < MOST_BYTES else b""


def _passes_on(path: str) -> bool:
    """Whether a file is a package's own, which passes on what its modules define."""
    return os.path.basename(path) == "__init__.py"


def _steps(folder: str, path: str) -> int:
    """How many folders lie between a folder and a file."""
    one, other = folder.split(os.sep), os.path.dirname(path).split(os.sep)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
    return len(one) + len(other) - 2 * shared
