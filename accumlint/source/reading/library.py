"""The modules of a project that were read while others were followed into them, each read once in a run."""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from accumlint.source.reading.callers import Callers
from accumlint.source.reading.disk import contents
from accumlint.source.reading.leads import Leads
from accumlint.source.reading.outline import Imported, Outline
from accumlint.source.reading.parse import Problem, parse

MOST_BYTES = 400_000  # of one file that is followed into
MOST_KEPT = 8_000_000  # bytes of the files that are kept in memory
DEEPEST_CHAIN = 8  # re-exports
SMALL_FILE = 6_000  # bytes

# What a file must mention to be followed into from afar, and from the file itself or one that trains.
STRONG = tuple(
    b"""
    backward zero_grad no_sync GradScaler clip_grad DistributedDataParallel FullySharded fully_shard unscale_ loss_scaler grad_sync
    Accelerator(
    """.split()
)
WEAK = b"loss ignore_index -100 accum pad_sequence distributedsampler yield dataclass".split()  # whatever their case
STEP = re.compile(rb"\.step\b", re.IGNORECASE)


@dataclass(frozen=True)
class Definition:
    """Where a name comes from: a name of a module (`outline`), a whole module (`path`), or something outside of the project (`dotted`)."""

    path: str = ""
    name: str = ""
    dotted: str = ""


class _Target(NamedTuple):
    """What an import of a followed file brings, and what that rests on."""

    alias: ast.alias
    found: Definition | None
    asked: frozenset[str]
    looked_at: frozenset[str]


class Library:
    """What is known of a project's modules."""

    def __init__(self, leads: Leads, *, prunes: bool = True) -> None:
        self.leads = leads
        self.prunes = prunes  # whether long files are cut down to what the usual words of training reach
        self.imports = leads.imports
        self.problems: dict[str, str] = {}  # files that could not be read, and why
        self.looked_at: set[str] = set()  # files that answers rested on since somebody emptied this
        self._levels: dict[str, int] = {}
        self._outlines: dict[str, Outline | None] = {}
        self._targets: dict[tuple[str, int, int], _Target] = {}
        self._count = 0
        self._bytes = 0

    @cached_property
    def callers(self) -> Callers:
        """Tells who uses a file."""
        return Callers(self.leads)

    def outline(self, path: str) -> Outline | None:
        """The outline of a file of the project; None for one that cannot be read."""
        if path not in self._outlines:
            if self._bytes > MOST_KEPT:
                self._outlines.clear()
                self._targets.clear()
                self._bytes = 0
            self._outlines[path] = self._read(path)
        return self._outlines[path]

    def _read(self, path: str) -> Outline | None:
        try:
            data = contents(path, MOST_BYTES + 1)
        except OSError as error:
            self.problems[path] = (error.strerror or str(error)).lower()
            return None
        self._bytes += len(data)
        if len(data) > MOST_BYTES:
            self.problems[path] = "too large to be followed into"
            return None
        source = parse(data, path)
        if isinstance(source, Problem):
            self.problems[path] = source.message
            return None
        self._count += 1
        return Outline(source, self._count)

    def level(self, path: str) -> int:
        """How much the words of a file promise, without parsing it: 2 that it trains, 1 that it has to do with training."""
        known = self._levels.get(path)
        if known is None:
            known = self._levels[path] = _level(path)
        self.looked_at.add(path)
        return known

    def target(self, outline: Outline, node: Imported, alias: ast.alias, least: int = 0) -> Definition | None:
        """What an import brings; None where it cannot be told, or lies in a file that promises less than asked for."""
        if not outline.number:  # the file that is followed, which is read this once
            return self._target(outline.path, node, alias, 0, least)
        key = (outline.path, id(alias), least)
        known = self._targets.get(key)
        if known is None or known.alias is not alias:
            outer = self.imports.asked, self.looked_at
            self.imports.asked, self.looked_at = set(), set()
            found = self._target(outline.path, node, alias, 0, least)
            known = self._targets[key] = _Target(alias, found, frozenset(self.imports.asked), frozenset(self.looked_at))
            self.imports.asked, self.looked_at = outer
        self.imports.asked |= known.asked
        self.looked_at |= known.looked_at
        return known.found

    def _target(self, path: str, node: Imported, alias: ast.alias, depth: int, least: int) -> Definition | None:
        level, dotted = module_of(node, alias)
        if not isinstance(node, ast.ImportFrom):
            wanted = alias.name if alias.asname else alias.name.split(".")[0]
            found = self.imports.module(path, wanted)
            return Definition(found) if found is not None else Definition(dotted=wanted)
        found = self.imports.module(path, dotted, level)
        if found is None:
            return Definition(dotted=f"{'.' * level}{dotted}.{alias.name}")
        if found == path:  # `from . import engine` in the package's own file
            inner = self.imports.submodule(path, alias.name)
            return Definition(inner) if inner is not None else None
        return self.define(found, alias.name, least, depth + 1)

    def define(self, path: str, name: str, least: int = 0, depth: int = 0) -> Definition | None:
        """Where a module's name comes from, through re-exports."""
        if depth > DEEPEST_CHAIN or self.level(path) < least:
            return None
        outline = None if path.endswith(os.sep) else self.outline(path)
        if outline is not None:
            known = outline.imported.get(name)
            if known is not None and len(outline.bindings.get(name, ())) == 1:
                return self._target(path, known[0], known[1], depth + 1, least)
            if name in outline.bindings:
                return Definition(path, name)
            for star in outline.stars:
                found = self.imports.module(path, star.module or "", star.level)
                inner = self.define(found, name, least, depth + 1) if found is not None else None
                if inner is not None:
                    return inner
        module = self.imports.submodule(path, name)
        return Definition(module) if module is not None else None


def module_of(node: Imported, alias: ast.alias) -> tuple[int, str]:
    """How far up an import begins, and the module that it names."""
    if isinstance(node, ast.ImportFrom):
        return node.level, node.module or ""
    return 0, alias.name


def _level(path: str) -> int:
    if path.endswith(os.sep) or os.path.basename(path) == "__init__.py":
        return 2  # passes on what others define
    try:
        data = contents(path, MOST_BYTES)
    except OSError:
        return 0
    if any(word in data for word in STRONG):
        return 2
    if len(data) <= SMALL_FILE:
        return 1
    lowered = data.lower()
    return int(any(word in lowered for word in WEAK) or STEP.search(data) is not None)
