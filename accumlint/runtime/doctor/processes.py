"""Runs the doctor's scripts as processes of their own, and leaves none of them behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

POLL = 0.05  # seconds
WORDS = 500  # characters of a failed process's output that are shown
# What a launcher set for another run must not reach this one.
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "ACCUMLINT_VERIFY")


class NotRunError(Exception):
    """The experiment or the inspection could not be run; the message says why, in one sentence."""


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that is gone afterwards, with the scripts in it: there nothing of the working folder shadows a module."""
    with _terminable(), tempfile.TemporaryDirectory(prefix="accumlint-doctor-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for script in ("experiment.py", "inspection.py", "pair.py"):
            shutil.copyfile(Path(__file__).with_name(script), folder / script)
        yield folder


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM and SIGHUP unwind as Ctrl-C does, so that processes and files go."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kept = {}
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", None)):
        if number is not None:
            with contextlib.suppress(ValueError):  # not the main thread
                kept[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


class Process:
    """A Python process whose standard input stays open while its owner lives; its output goes to a file."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._output = folder / f"{name}.log"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment(os.environ, folder),
                start_new_session=True,  # a Ctrl-C at the terminal is for the owner, who then ends this one
            )

    @property
    def status(self) -> int | None:
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._output.read_text(encoding="utf-8", errors="replace")

    def send(self, text: str) -> None:
        """Writes standard input and closes it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(text.encode())
        self.close()

    def close(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self) -> None:
        """Kills it if it still runs, and waits."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self.close()


@contextlib.contextmanager
def ended(processes: Sequence[Process]) -> Iterator[None]:
    """None of them runs afterwards, also where what starts them is interrupted halfway."""
    try:
        yield
    finally:
        for process in processes:
            process.end()


def finish(processes: Sequence[Process], timeout: float) -> None:
    """Waits for all of them. Raises NotRunError when one fails or `timeout` seconds pass; whoever started them ends them (`ended`)."""
    deadline = time.monotonic() + timeout
    while True:
        now = [(process, process.status) for process in processes]
        for process, status in now:
            if status not in {None, 0}:
                raise NotRunError(f"{process.name} ended with {status_text(status)}: {last_words(process.output)}")
        running = [process.name for process, status in now if status is None]
        if not running:
            return
        if time.monotonic() > deadline:
            raise NotRunError(f"No end after {timeout:g} s: {', '.join(running)} still ran (`--timeout` gives more).")
        time.sleep(POLL)


def environment(given: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of a process of the doctor: one thread, no remains of a launcher, torch's own files in the folder."""
    kept = {name: value for name, value in given.items() if name not in FOREIGN and not name.startswith("TORCHELASTIC_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "TMPDIR": str(folder)}


def status_text(status: int | None) -> str:
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def last_words(output: str) -> str:
    """The last line that names an error, else the last one that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: |Fatal Python error|what\(\):", line)]
    return (errors or lines or ["it said nothing"])[-1][:WORDS]
