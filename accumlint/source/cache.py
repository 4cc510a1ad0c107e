"""Results by content, in `.accumlint_cache`: one index for the tree, and one small file for each source file with something to say.

A row of the index is trusted while the file's size and time stand; when they changed, while its content does. Files that
no rule concerns have no more than size and time, for sieving them again is cheaper than hashing them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any, NamedTuple

import accumlint

FOLDER = ".accumlint_cache"
SIZES = os.sep + "*"  # after a folder: the sizes of its modules count too, for one of them may come to import a file
RACY = 50_000_000  # nanoseconds: a file changed this shortly before it was read may change again within one tick of its clock


class Result(NamedTuple):
    """What was found in a file: JSON values, None where there is nothing to say. `followed` are the other files that it rests on."""

    payload: dict[str, Any] | None
    followed: tuple[str, ...] = ()


def digest(*parts: bytes) -> str:
    """A short hash of some pieces of content."""
    hashed = blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()


def stamp(root: str) -> str:
    """What all rows of an index rest on: this version of accumlint, as its files stand, and of Python."""
    rules = find_spec("accumlint.rules")
    seen: list[str] = [accumlint.__version__, str(sys.version_info[:2]), root]
    for package in (*accumlint.__path__, *((rules and rules.submodule_search_locations) or ())):
        seen.extend(_files(package))
    return digest(os.fsencode("\n".join(seen)))


def _files(folder: str) -> Iterator[str]:
    pending = [folder]
    while pending:
        with os.scandir(pending.pop()) as listing:
            for entry in listing:
                if entry.name.endswith(".py"):
                    status = entry.stat()
                    yield f"{entry.name} {status.st_size} {status.st_mtime_ns}"
                elif entry.is_dir() and entry.name != "__pycache__":
                    pending.append(entry.path)


class Cache:
    """The results of earlier runs. `root` is the folder that paths are kept relative to."""

    def __init__(self, folder: str, root: str) -> None:
        self.folder = folder
        self.root = root
        self.problem = ""
        self._stamp = stamp(root)
        self._rows: dict[str, list[Any]] = self._load()
        self._touched: set[str] = set()
        self._changed = False
        self._digests: dict[str, str] = {}

    def key(self, path: str) -> str:
        """A path relative to the root where it lies below it."""
        return path[len(self.root) + 1 :] if path.startswith(self.root + os.sep) else path

    def path(self, key: str) -> str:
        return os.path.join(self.root, key)

    def is_bare(self, path: str) -> bool:
        """Whether no more is known of a file than that no rule concerns it."""
        return len(self._rows.get(self.key(path), ())) == 2

    def fresh(self, path: str, status: os.stat_result, settings: str) -> Result | None:
        """The result for a file whose size and time have not changed."""
        key = self.key(path)
        row = self._rows.get(key)
        if row is None or row[0] != status.st_size or row[1] != status.st_mtime_ns:
            return None
        self._touched.add(key)
        return Result(None) if len(row) == 2 else self._result(row, settings)

    def same(self, path: str, status: os.stat_result, settings: str, data: bytes) -> Result | None:
        """The result for a file whose content has not changed."""
        key = self.key(path)
        row = self._rows.get(key)
        if row is None or len(row) == 2 or row[2] != digest(data):
            return None
        result = self._result(row, settings)
        if result is not None:
            self._rows[key] = [*_status(status), *row[2:]]
            self._touched.add(key)
            self._changed = True
        return result

    def unconcerned(self, path: str, status: os.stat_result) -> None:
        """Remembers that no rule can have anything to say of a file."""
        self._put(path, _status(status))

    def put(self, path: str, status: os.stat_result, settings: str, data: bytes, result: Result) -> None:
        """Remembers what was found in a file."""
        content = digest(data)
        followed = [[self.key(each), self._digest_of(each)] for each in result.followed]
        name = ""
        if result.payload is not None:
            name = digest(os.fsencode(self.key(path)), content.encode(), settings.encode(), json.dumps(followed).encode())
            if not self._write(f"{name}.json", json.dumps(result.payload)):
                return
        self._put(path, [*_status(status), content, settings, name, followed])

    def save(self) -> None:
        """Writes the index if it changed, without the rows of files that are gone and the results that no row names."""
        if not self._changed:
            return
        rows = {key: row for key, row in self._rows.items() if key in self._touched or os.path.exists(self.path(key))}
        if self._write("index.json", json.dumps({"stamp": self._stamp, "rows": rows}, separators=(",", ":"))):
            self._sweep({f"{row[4]}.json" for row in rows.values() if len(row) > 2})

    def _put(self, path: str, row: list[Any]) -> None:
        key = self.key(path)
        self._rows[key] = row
        self._touched.add(key)
        self._changed = True

    def _result(self, row: list[Any], settings: str) -> Result | None:
        if row[3] != settings or any(self._digest_of(self.path(key)) != content for key, content in row[5]):
            return None
        if not row[4]:
            return Result(None)
        payload = _read_json(os.path.join(self.folder, f"{row[4]}.json"))
        return Result(payload) if isinstance(payload, dict) else None

    def _digest_of(self, path: str) -> str:
        """The digest of another file, or of the modules in a folder, "" for what cannot be read."""
        if path not in self._digests:
            try:
                self._digests[path] = _standing(path)
            except OSError:
                self._digests[path] = ""
        return self._digests[path]

    def _load(self) -> dict[str, list[Any]]:
        index = _read_json(os.path.join(self.folder, "index.json"))
        if not isinstance(index, dict) or index.get("stamp") != self._stamp:
            return {}
        rows = index.get("rows")
        return rows if isinstance(rows, dict) and all(_sound(row) for row in rows.values()) else {}

    def _write(self, name: str, text: str) -> bool:
        """Writes a file of the cache whole or not at all. A cache that cannot be written is no reason to fail."""
        try:
            if not os.path.exists(os.path.join(self.folder, ".gitignore")):
                os.makedirs(self.folder, exist_ok=True)
                self._replace(".gitignore", "# made by accumlint\n*\n")
            self._replace(name, text)
        except OSError as error:
            self.problem = f"{self.folder} cannot be written: {error.strerror}"
            return False
        return True

    def _replace(self, name: str, text: str) -> None:
        target = os.path.join(self.folder, name)
        draft = f"{target}.{os.getpid()}"
        try:
            with open(draft, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, target)
        except OSError:
            if os.path.exists(draft):
                os.unlink(draft)
            raise

    def _sweep(self, wanted: Iterable[str]) -> None:
        keep = {*wanted, "index.json", ".gitignore"}
        try:
            for name in os.listdir(self.folder):
                if name not in keep and name.endswith(".json"):
                    os.unlink(os.path.join(self.folder, name))
        except OSError:
            return


def _standing(path: str) -> str:
    """What a file holds, or which modules a folder has (`folder/`) and of which sizes (`folder/*`)."""
    if path.endswith(os.sep):
        return _listing(path, lambda entry: entry.name if entry.name.endswith(".py") or _may_be_package(entry) else "")
    if path.endswith(SIZES):
        return _listing(path.removesuffix(SIZES), lambda entry: f"{entry.name} {_size(entry)}" if entry.name.endswith(".py") else "")
    with open(path, "rb") as file:
        return digest(file.read())


def _listing(folder: str, told: Callable[[os.DirEntry[str]], str]) -> str:
    """What is told of each entry of a folder that counts; "" for one that does not."""
    with os.scandir(folder) as entries:
        return digest(*sorted(os.fsencode(text) for text in map(told, entries) if text))


def _size(entry: os.DirEntry[str]) -> int:
    return entry.stat(follow_symlinks=False).st_size


def _may_be_package(entry: os.DirEntry[str]) -> bool:
    return entry.name.isidentifier() and entry.name != "__pycache__" and entry.is_dir()


def _status(status: os.stat_result) -> list[Any]:
    recent = time.time_ns() - status.st_mtime_ns < RACY
    return [status.st_size, 0 if recent else status.st_mtime_ns]


def _sound(row: object) -> bool:
    return isinstance(row, list) and (len(row) == 2 or (len(row) == 6 and isinstance(row[4], str) and isinstance(row[5], list)))


def _read_json(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            return json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
