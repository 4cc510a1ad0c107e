"""Tells from bytes whether a file can be one part of a training loop whose other parts lie in files that it imports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from accumlint.source.reading.disk import contents
from accumlint.source.reading.imports import Imports
from accumlint.source.reading.sieve import calls_backward, calls_update

MOST_BYTES = 400_000
DEEPEST = 3

_DRIVES = (b"train", b"fit(", b".run(", b"step", b"optim", b"learn")
_IMPORT = re.compile(
    rb"""
      ^[ \t]*from[ \t]+(?P<dots>\.*)(?P<module>[\w.]*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n\\]*(?:\\\r?\n[^\n\\]*)*)
    | ^[ \t]*import[ \t]+(?P<plain>[\w. \t,]+)
    """,
    re.MULTILINE | re.VERBOSE,
)
_NAME = re.compile(rb"(\w+)(?:[ \t]+as[ \t]+\w+)?[ \t]*(?:#[^\n]*)?(?:,|$)", re.MULTILINE)
_TEST_FILE = re.compile(r"^(test_.*|.*_test|conftest)\.py$")


def is_test_file(name: str) -> bool:
    """Whether a file's name is that of a test."""
    return _TEST_FILE.match(name) is not None


class Leads:
    """Answers it for the files of one run, each of which is read at most once for it."""

    def __init__(self, imports: Imports) -> None:
        self.imports = imports
        self._leads: dict[str, bool] = {}
        self.seen: set[str] = set()

    def starts(self, path: str, data: bytes) -> bool:
        """Whether a file that is no whole training loop itself imports one, or the part that it lacks."""
        if path.endswith(".ipynb"):  # its bytes are JSON, and reading that of every notebook would cost more than it tells
            return False
        if not any(word in data for word in _DRIVES) or is_test_file(os.path.basename(path)):
            return False
        return calls_backward(data) or any(self._reaches(found, 1) for found in self.imported(path, data))

    def imports_some(self, path: str, data: bytes) -> bool:
        """Whether a file imports others of its project."""
        return next(self.imported(path, data), None) is not None

    def _reaches(self, path: str, depth: int) -> bool:
        """Whether a file of the project calls a backward, or passes on one that does."""
        known = self._leads.get(path)
        if known is not None:
            return known
        self._leads[path] = False  # while it is being found out
        data = self.read(path)
        self.seen.add(path)
        found = b"backward" in data and calls_backward(data)
        if not found and depth < DEEPEST and (os.path.basename(path) == "__init__.py" or calls_update(data)):
            found = any(self._reaches(inner, depth + 1) for inner in self.imported(path, data))
        self._leads[path] = found
        return found

    def imported(self, path: str, data: bytes) -> Iterator[str]:
        """The files of the project that a file imports."""
        done: set[str] = set()
        for match in _IMPORT.finditer(data):
            for found in self._meant(path, match):
                if found not in done and not found.endswith(os.sep):
                    done.add(found)
                    yield found

    def _meant(self, path: str, match: re.Match[bytes]) -> Iterator[str]:
        if match["plain"] is not None:
            for part in match["plain"].split(b","):
                words = part.split()
                found = self.imports.module(path, words[0].decode("ascii", "replace")) if words else None
                if found is not None:
                    yield found
            return
        found = self.imports.module(path, match["module"].decode("ascii", "replace"), len(match["dots"]))
        if found is None:
            return
        yield found
        for name in _NAME.findall(match["names"].strip(b"()")):
            inner = self.imports.submodule(found, name.decode("ascii", "replace"))
            if inner is not None:
                yield inner

    @staticmethod
    def read(path: str) -> bytes:
        """The bytes of a file, as far as they are looked at."""
        try:
            return contents(path, MOST_BYTES)
        except OSError:
            return b""
