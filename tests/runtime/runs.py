"""Runs a script under the probes, in processes forked from this one, which has imported torch; returns the ranks' reports."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from accumlint.runtime.settings import Settings

TIMEOUT = 120


def measure(
    script: str | Path, processes: int = 1, *, steps: int = 10**6, reference: str = "off", observed: bool = True
) -> list[dict[str, Any]]:
    """The reports of all ranks, in order. `script` is a path, or the text of a script.

    A rank that did not come to an end has ended "stalled" and nothing else. Without `observed` only "ended" is told.
    """
    _preload()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(script) if isinstance(script, Path) else Path(folder, "train.py")
        if not isinstance(script, Path):
            path.write_text(script, encoding="utf-8")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        settings = Settings(
            token="test", folder=folder, steps=steps, timeout=60.0, reference=reference, graceful=False, keep_going=False,
            objective="token", controller=os.getpid(), host=socket.gethostname(),
        )  # fmt: skip
        children = []
        for rank in range(processes):
            child = os.fork()
            if child == 0:
                _run(path, rank, processes, port, settings, observed)
            children.append(child)
        _wait(children)
        return [_read(Path(folder, f"rank-{rank}.json"), rank) for rank in range(processes)]


@cache
def _preload() -> None:
    """Imports once, before the fork, what every rank would import."""
    import importlib

    from accumlint.runtime.agent import PROBES
    from tests.mutation.effects import warm_up

    warm_up()
    for name in PROBES:
        importlib.import_module(f"accumlint.runtime.probes.{name}")


def _wait(children: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in tuple(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.discard(child)
                if status:
                    deadline = min(deadline, time.monotonic() + 3)
        time.sleep(0.005)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _read(path: Path, rank: int) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"rank": rank, "ended": "stalled", "events": []}


def _run(path: Path, rank: int, processes: int, port: int, settings: Settings, observed: bool) -> None:
    """One rank, in its own process; never returns."""
    from accumlint.runtime.agent import start
    from accumlint.runtime.rankreport import report_of
    from accumlint.runtime.stop import described

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1) if os.environ.get("RUNS_SHOW") else (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir(settings.folder)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    failed = 1
    try:
        recorder = start(settings) if observed else None
        ended, error = "script", None
        try:
            sys.argv = [str(path)]
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as leaving:
            if leaving.code:
                ended, error = "error", {"type": "SystemExit", "message": str(leaving.code)}
        except Exception as raised:
            ended, error = "error", described(raised)
        if recorder is not None:
            recorder.settle()
            report = report_of(recorder, ended=ended, error=error)
        else:
            report = {"rank": rank, "ended": ended, "error": error, "events": []}
        part = Path(settings.folder, f"rank-{rank}.part")
        part.write_text(json.dumps(report), encoding="utf-8")
        part.rename(part.with_suffix(".json"))
        failed = 0 if ended != "error" else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(failed)


def main() -> None:
    """`python -m tests.runtime.runs SCRIPT [PROCESSES]` prints the events."""
    for report in measure(
        Path(sys.argv[1]).resolve(), int(sys.argv[2]) if len(sys.argv) > 2 else 1, reference=os.environ.get("REFERENCE", "off")
    ):
        print("rank", report["rank"], report["ended"], report.get("error"), report.get("troubles"), report.get("limits"))
        for entry in report.get("objects", ()):
            print("  ", entry)
        for event in report["events"]:
            place = report["stacks"][event["at"]][0] if event["at"] >= 0 and report["stacks"][event["at"]] else None
            shown = {
                key: value
                for key, value in event.items()
                if value not in (None, [], False, "", {}) and key not in ("index", "kind", "at", "micro_batch")
            }
            print(f"{event['index']:3} mb{event['micro_batch']} {event['kind']:10} {place and place[1]}", shown)


if __name__ == "__main__":
    import torch  # noqa: F401

    main()
