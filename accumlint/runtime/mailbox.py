"""The folder of a run: which file says what, written whole or not at all. Ranks write, the controller reads."""

from __future__ import annotations

import json
import os
from typing import Any

STACKS = "stacks"  # asks every rank for its stacks
LEAVE = "leave"  # asks every rank to write its report and go
FINAL = frozenset({"updates", "script", "error", "stalled"})  # how a report can end for good


class Mailbox:
    """One folder, and the files of it by what they are for."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def report(self, pid: int | str) -> str:
        return self.path(f"report-{pid}.json")

    def progress(self, pid: int) -> str:
        return self.path(f"rank-{pid}.json")

    def stack(self, pid: int) -> str:
        return self.path(f"stack-{pid}.txt")

    def terminated(self, pid: int) -> str:
        """The stacks of a process at the moment it was told to terminate."""
        return self.path(f"term-{pid}.txt")

    def exists(self, name: str = "") -> bool:
        return os.path.exists(self.path(name) if name else self.folder)

    def ask(self, name: str) -> None:
        """Leaves an empty file of this name."""
        with open(self.path(name), "wb"):
            pass

    def read_all(self, prefix: str) -> list[dict[str, Any]]:
        """The tables in the JSON files of this prefix, in the order of their names; what is no table is passed over."""
        return [table for name in self.names(prefix) if (table := read(self.path(name)))]

    def texts(self, prefix: str) -> list[str]:
        return [text for name in self.names(prefix) if (text := read_text(self.path(name)))]

    def names(self, prefix: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.folder) if name.startswith(prefix) and not name.endswith(".part"))
        except OSError:
            return []


def write(path: str, table: dict[str, Any], *, to_disk: bool = False) -> int:
    """Replaces a file by the JSON of a table; `to_disk` waits until it lies there. Returns its size in bytes."""
    return write_bytes(path, encode(table), to_disk=to_disk)


def encode(table: dict[str, Any]) -> bytes:
    return json.dumps(table, separators=(",", ":"), default=str).encode()


def write_bytes(path: str, data: bytes, *, to_disk: bool = False) -> int:
    part = f"{path}.{os.getpid()}.part"
    with open(part, "wb") as file:
        file.write(data)
        if to_disk:
            file.flush()
            os.fsync(file.fileno())
    os.replace(part, path)
    return len(data)


def read(path: str) -> dict[str, Any]:
    """The table in a JSON file; empty where there is none."""
    try:
        with open(path, "rb") as file:
            table = json.load(file)
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Whether there is a process of this number that can be seen from here."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
