"""A controller with everything that it starts, in a world of its own: a mark in the environment and a folder for temporary files."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DRIVER = HERE / "driver.py"
PATIENCE = 60.0  # seconds, on a machine with other things to do
MARK = "ACCUMLINT_TEST_MARK"


class Scene:
    """Starts a controller in `folder`, finds the processes below it, and tells what is left of them."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.temporary = Path(tempfile.mkdtemp(prefix="scene-"))  # of a short name, for sockets live there
        self.mark = secrets.token_hex(16)
        kept = {key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "PYTHONPATH"}}
        self.environment = {
            **kept,
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
            **(environment or {}),
        }

    def start(self, program: Mapping[str, Any], **settings: Any) -> subprocess.Popen[str]:
        return self.run([sys.executable, str(DRIVER), json.dumps(program), json.dumps(settings)])

    def run(self, command: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self.environment, "PYTHONPATH": os.pathsep.join([self.environment.get("PYTHONPATH", ""), str(ROOT)]).lstrip(os.pathsep)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "stderr").open("ab"),
            text=True,
            start_new_session=True,
        )

    def outcome(self, program: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
        """The outcome of one run."""
        return self.end(self.start(program, **settings))

    def end(self, controller: subprocess.Popen[str]) -> dict[str, Any]:
        """What a controller prints at its end; empty where it prints nothing."""
        out, _ = controller.communicate(timeout=4 * PATIENCE)
        table: dict[str, Any] = json.loads(out) if out.strip() else {}
        return table

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(errors="replace")

    def pids(self, name: str = "") -> list[int]:
        """The living processes of this scene whose command line has a word that ends in `name`."""
        here = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and self._is_here(entry)]
        return [int(entry.name) for entry in here if not name or any(word.endswith(name) for word in words(entry))]

    def _is_here(self, entry: Path) -> bool:
        try:
            return self.mark.encode() in (entry / "environ").read_bytes() and "\nState:\tZ" not in (entry / "status").read_text()
        except OSError:
            return False

    def left(self) -> list[str]:
        """The processes and files that are still there, once there was time to go."""
        deadline = time.monotonic() + PATIENCE / 4
        while (found := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not found:
            shutil.rmtree(self.temporary)
        return found

    def _left(self) -> list[str]:
        processes = [" ".join(words(Path("/proc") / str(pid))) for pid in self.pids()]
        return processes + [str(path) for path in self.temporary.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own

    def close(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        shutil.rmtree(self.temporary, ignore_errors=True)


def words(entry: Path) -> list[str]:
    """The command line of a process."""
    try:
        return (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def wait_for(what: Any, seconds: float = PATIENCE) -> Any:
    """The first true answer of `what()`; fails when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return answer
