"""Which versions of a framework a project allows: what frameworks do changes between releases, and rules must know when.

Asked are, from the file's folder up to the root of its repository: lock files, pinned and ranged requirements, the
project's own metadata. Of what the nearest folder says, a lock file above may choose the exact version. Then the installed
distribution is asked, without importing it, and last the newest release is assumed. Nothing is executed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from accumlint.source.reading import project_files
from accumlint.source.reading.disk import contents
from accumlint.source.reading.metadata import READERS, Reader, Statement
from accumlint.source.reading.project_files import described, upwards
from accumlint.source.reading.specifiers import NEWEST, OLDEST, Range, Version, around, normal, version

__all__ = ["NEWEST", "OLDEST", "Allowed", "allowed", "forget"]

MOST_BYTES = 20_000_000  # of one file
# The same code under several distribution names.
ALSO = {
    "lightning": ("lightning", "pytorch-lightning"),
    "pytorch-lightning": ("pytorch-lightning", "lightning"),
    "torch": ("torch", "pytorch"),
    "ignite": ("pytorch-ignite",),
    "composer": ("mosaicml",),
    "megatron": ("megatron-core",),
}


@dataclass(frozen=True, slots=True)
class Allowed:
    """The releases of a package that a project allows, from `oldest` to `newest`, and what says so.

    Both have at least three numbers, so they compare with `(4, 46)` as expected. `newest` is NEWEST and `oldest` is
    OLDEST where nothing bounds them.
    """

    package: str
    oldest: Version
    newest: Version
    origin: str

    def may_be(self, *wanted: int) -> bool:
        """Whether some allowed release is this one or newer."""
        return self.newest >= wanted

    def is_at_least(self, *wanted: int) -> bool:
        """Whether every allowed release is this one or newer."""
        return self.oldest >= wanted

    @property
    def described(self) -> str:
        """The version that is assumed, and why, in a few words."""
        if self.origin == "newest":
            return "the newest release: neither the project nor the environment names one"
        if self.oldest != self.newest or self.newest == NEWEST:
            return f"as in {self.origin}"
        number = ".".join(map(str, self.newest))
        return f"{number}, installed" if self.origin.startswith("installed ") else f"{number}, from {self.origin}"


class _Found(NamedTuple):
    """What the files of one folder say of a package."""

    range: Range
    origin: str
    locked: bool


def allowed(path: str, package: str) -> Allowed:
    """The versions of a package that the project of a file allows; `package` is the name of the distribution."""
    folder = os.path.dirname(os.path.abspath(path)) if path != "-" else os.getcwd()
    return _allowed(folder, package)


@cache
def _allowed(folder: str, package: str) -> Allowed:
    names = ALSO.get(normal(package), (normal(package),))
    declared: _Found | None = None
    for above in upwards(folder):
        found = _in_folder(above, names)
        if found is None:
            continue
        if declared is None or (found.locked and _fits(found.range, declared.range)):
            declared = found
        if declared.locked:
            break
    if declared is not None:
        return Allowed(package, declared.range.oldest, declared.range.newest, declared.origin)
    installed = next((each for each in map(_installed, names) if each), "")
    if installed:
        return Allowed(package, version(installed), version(installed), f"installed {installed}")
    return Allowed(package, NEWEST, NEWEST, "newest")


def _fits(lock: Range, declared: Range) -> bool:
    return declared.oldest <= lock.oldest and lock.newest <= declared.newest


@cache
def _ranked(folder: str) -> tuple[str, ...]:
    """The files of a folder that say what its project needs, the most exact first."""
    names = described(folder)
    ranked = [(rank, len(name), name) for name in names for rank, reader in enumerate(READERS) if reader.names.fullmatch(name)]
    return tuple(name for _, _, name in sorted(ranked))


@cache
def _statements(folder: str, name: str) -> tuple[Statement, ...]:
    reader = _reader(name)
    try:
        data = contents(os.path.join(folder, name), MOST_BYTES)
    except OSError:
        return ()
    return tuple(reader.read(data.decode("utf-8", "replace")))


def _reader(name: str) -> Reader:
    return next(each for each in READERS if each.names.fullmatch(name))


def _in_folder(folder: str, names: tuple[str, ...]) -> _Found | None:
    """The most exact statement of a folder; a bare mention counts only where no other file has bounds."""
    bare: _Found | None = None
    for file in _ranked(folder):
        locked = _reader(file).locked
        for name in names:
            mentions = [each for each in _statements(folder, file) if each.name == name]
            own = [each for each in mentions if each.range.bounded] or mentions[:1]
            found = around(each.range for each in own)
            if found is None:
                continue
            origin = file if locked else f"{file}: {own[0].text}"
            if found.bounded:
                return _Found(found, origin, locked or found.oldest == found.newest)
            bare = bare or _Found(found, origin, False)
    return bare


@cache
def _installed(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return ""


def forget() -> None:
    """Reads everything anew: for programs that live longer than the files stay as they are."""
    project_files.forget()
    for each in (_allowed, _ranked, _statements, _installed):
        each.cache_clear()
