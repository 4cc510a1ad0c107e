"""Notices that the script is about to change something on the disk, to start a program, or to call elsewhere."""

from __future__ import annotations

import os
import stat
import sys
import threading
from typing import Any, Protocol

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = frozenset({"os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree"})
PROGRAMS = frozenset(
    {"socket.connect", "sqlite3.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"}
)
DEVICES = ("/dev/", "/proc/", "/sys/")


class Armed(Protocol):
    armed: bool
    thread: int
    settings: Any

    def passing(self) -> None: ...


def watch_changes(stopper: Armed) -> None:
    """From now on the first change to the disk, program started or connection made by the thread of the last update ends the run.

    An audit hook cannot be taken out again: this is for processes that are about to end.
    """
    own = os.path.join(stopper.settings.folder, "")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if not stopper.armed or threading.get_ident() != stopper.thread:
            return
        if event in PROGRAMS or (event == "open" and _writes(arguments, own)) or (event in CHANGES and _counts(arguments[0], own)):
            stopper.passing()

    sys.addaudithook(hook)


def _writes(arguments: tuple[Any, ...], own: str) -> bool:
    path, mode, flags = arguments
    writing = isinstance(flags, int) and bool(flags & WRITING)
    return (writing or (isinstance(mode, str) and any(each in mode for each in "wax+"))) and _counts(path, own)


def _counts(path: Any, own: str) -> bool:
    """Whether it is a file of the user: no device, pipe or descriptor, no cache of an import, none of ours."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        return False
    full = os.path.abspath(name)
    if full.startswith(DEVICES) or full.startswith(own) or "__pycache__" in full:
        return False
    try:
        mode = os.stat(full).st_mode
    except OSError:
        return True
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
