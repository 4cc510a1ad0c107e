"""A rank without torch: `fast_rank.py UPDATES SECONDS [MODE]` makes updates, one every so many seconds, with a port open.

The end of a rank is the real one; what records is replaced, for there is no torch to probe.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

AGENT = """\
import sys, types
sys.path.insert(0, HERE)
import fast_rank
agent = types.ModuleType("accumlint.runtime.agent")
agent.observe = fast_rank.observe
sys.modules["accumlint.runtime.agent"] = agent
""".replace("HERE", repr(str(Path(__file__).parent)))
stoppers: list[Any] = []


class Recorder:
    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.active = True
        self.rows: list[Any] = []
        self.progress: list[Any] = []
        self.updates = 0
        self.troubles: list[str] = []

    def on_release(self, action: Any) -> None:
        pass

    def release(self) -> None:
        self.active = False

    def trouble(self, text: str) -> None:
        self.troubles.append(text)

    def event(self, kind: str, micro_batch: int) -> None:
        self.rows.append(types.SimpleNamespace(kind=kind, micro_batch=micro_batch))
        for each in self.progress:
            each()


def report_of(recorder: Recorder, **ending: Any) -> dict[str, Any]:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    about = {"version": 1, "rank": rank, "world": world, "pid": os.getpid(), "updates": recorder.updates, "troubles": recorder.troubles}
    return {**about, "events": len(recorder.rows), **ending}


def observe(settings: Any) -> None:
    from accumlint.runtime.stop import Stopper

    recorder = Recorder(settings)
    stopper = Stopper(recorder, report_of)  # type: ignore[arg-type]
    stopper.start()
    stoppers.append(stopper)


def trouble(mode: str) -> None:
    if mode == "hang":
        time.sleep(1000)
    if mode == "error":
        raise ValueError("broken on purpose")
    if mode == "leave":
        sys.exit(0)
    if mode == "helper":
        subprocess.run([sys.executable, "-c", AGENT + "import torch; 1 / 0"], check=False)
    if mode == "exit":
        os._exit(7)


def train(updates: int, seconds: float, mode: str) -> None:
    (stopper,) = stoppers
    recorder = stopper.recorder
    for number in range(updates):
        for kind in ("forward", "backward"):
            recorder.event(kind, number)
            if os.environ["RANK"] == "1" and number == 1:
                trouble(mode)
        recorder.updates += 1
        stopper.update_done()
        time.sleep(seconds)
        stopper.passing()


if __name__ == "__main__":
    agent: Any = types.ModuleType("accumlint.runtime.agent")
    agent.observe = observe
    sys.modules["accumlint.runtime.agent"] = agent
    import torch  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as server:
        Path(f"port-{os.environ['RANK']}").write_text(str(server.getsockname()[1]))
        try:
            train(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
            Path("end-of-script").touch()
        finally:
            Path("finally").touch()
