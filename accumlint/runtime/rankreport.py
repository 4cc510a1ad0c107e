"""What one process saw, as plain data: the file that a rank leaves for the controller."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict
from typing import Any

from accumlint.runtime.recorder import Recorder
from accumlint.trace import Role

VERSION = 1


def report_of(recorder: Recorder, *, ended: str = "running", error: dict[str, Any] | None = None, stack: str = "") -> dict[str, Any]:
    """The report. `ended` is one of "running", "updates", "script", "error", "stalled"."""
    rank, world, backend = _position()
    return {
        "version": VERSION,
        "token": recorder.settings.token,
        "rank": rank,
        "world": world,
        "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": str(sys.modules["torch"].__version__),
        "python": platform.python_version(),
        "device": recorder.census.get("device", ""),
        "backend": backend,
        "script": os.path.realpath(sys.argv[0]) if sys.argv and sys.argv[0] else "",
        "argv": list(sys.argv[1:]),
        "ended": ended,
        "error": error,
        "stack": stack,
        "updates": recorder.updates,
        "objects": _objects(recorder),
        "stacks": recorder.stacks,
        "events": recorder.events(),
        "facts": recorder.facts,
        "limits": recorder.limits,
        "troubles": recorder.troubles,
        "modules": recorder.census.get("modules", {}),
        "memory": recorder.census.get("memory", {}),
    }


def _position() -> tuple[int, int, str]:
    """Rank, number of ranks, and the backend of their group, "" without one."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), ""


def _objects(recorder: Recorder) -> list[dict[str, Any]]:
    entries = recorder.objects.entries
    for entry in entries:
        if entry.role == Role.OPTIMIZER.value:
            entry.base = _module_of(recorder, entry.uid)
    keep = ("uid", "role", "name", "type", "wrapper", "base", "options", "numbers")
    return [{key: value for key, value in asdict(entry).items() if key in keep} for entry in entries]


def _module_of(recorder: Recorder, uid: int) -> int | None:
    """The module that holds the optimizer's parameters, where there is one that no other optimizer shares."""
    entries = recorder.objects.entries
    owns = entries[uid].owns
    others = [each.owns for each in entries if each.role == Role.OPTIMIZER.value and each.uid != uid]
    holders = [each for each in entries if each.role == Role.MODEL.value and owns and owns <= each.owns]
    holders = [each for each in holders if not any(other & each.owns for other in others if not other & owns)]
    smallest = min(holders, key=lambda each: (len(each.owns), -each.uid), default=None)
    return None if smallest is None else smallest.base if smallest.base is not None else smallest.uid
