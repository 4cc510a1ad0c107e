"""What one process saw, as plain data: the file that a rank leaves for the controller."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict
from typing import Any

from accumlint.runtime.census import position
from accumlint.runtime.recorder import Recorder

VERSION = 1


def report_of(recorder: Recorder, *, ended: str = "running", error: dict[str, Any] | None = None, stack: str = "") -> dict[str, Any]:
    """The report. `ended` is one of "running", "updates", "script", "error", "stalled"."""
    rank, world, backend = _position(recorder)
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
        "script": recorder.script,
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


def _position(recorder: Recorder) -> tuple[int, int, str]:
    """Rank, number of ranks, and the backend of their group, "" without one; a group that is gone by now is remembered."""
    now = position() or recorder.census.get("position")
    return now or (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), "")


def _objects(recorder: Recorder) -> list[dict[str, Any]]:
    keep = ("uid", "role", "name", "type", "wrapper", "base", "options", "numbers")
    return [{key: value for key, value in asdict(entry).items() if key in keep} for entry in recorder.objects.entries]
