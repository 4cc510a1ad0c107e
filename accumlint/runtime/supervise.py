"""The controller: starts the program, watches its ranks by what they write, and leaves nothing behind."""

from __future__ import annotations

import enum
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from accumlint.runtime import processes
from accumlint.runtime.launch import Launch
from accumlint.runtime.mailbox import LEAVE, STACKS, Mailbox
from accumlint.runtime.ranks import Rank, Watch

POLL = 0.1  # seconds
FAREWELL = 3.0  # seconds for stacks and last reports
AFTER_DEATH = 5.0  # seconds for the launcher to notice that a rank is gone
STARTUP = 60.0  # seconds that a program has for its first event at least
LINGER = 2.0  # seconds for what the program leaves running when it has ended
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Ending(enum.Enum):
    """How a run came to its end."""

    UPDATES = "updates"  # every rank has made its updates
    SCRIPT = "script"  # the script ended before that
    ERROR = "error"  # it failed by itself
    DIED = "died"  # a rank vanished
    STALLED = "stalled"  # no progress within the time-out
    LAUNCHER = "launcher"  # the program that was started was killed from outside
    INTERRUPTED = "interrupted"  # the user, or a signal, ended it
    UNSEEN = "unseen"  # no process of it trained with torch, or none that could be reached


@dataclass(frozen=True)
class Outcome:
    """What is left of a run: the reports of its ranks, and how it ended.

    `code` is the exit status of the program and `signal` the number of the signal that ended it, where there was one.
    `missing` are the ranks that died or did not get on, with their stacks. `troubles` are internal problems.
    """

    ending: Ending
    reports: tuple[dict[str, Any], ...] = ()
    code: int | None = None
    signal: int | None = None
    interrupted_by: int | None = None
    missing: tuple[Rank, ...] = ()
    seconds: float = 0.0
    troubles: tuple[str, ...] = ()
    shows: bool = True
    command: tuple[str, ...] = field(default=())

    @property
    def root(self) -> dict[str, Any] | None:
        """The report of rank 0, None where another controller has it."""
        return next((report for report in self.reports if report.get("rank") == 0), None)


Show = Callable[[Sequence[Rank], float], None]


def supervise(launch: Launch, show: Show = lambda ranks, seconds: None) -> Outcome:
    """Runs a program to its end. `show` is called now and then with the ranks and the seconds since the start.

    The program's standard output goes to standard error. Raises OSError where the program cannot be started. Whatever
    happens, no process of the run and no file of ours is left.
    """
    started = time.monotonic()
    token, folder = launch.settings.token, launch.settings.folder
    with _interruptible() as interruption:
        reaper = processes.Reaper(token, folder)
        supervisor: _Supervisor | None = None
        try:
            os.mkdir(folder, 0o700)  # not before there is somebody to remove it
            processes.adopt()
            supervisor = _Supervisor(launch, interruption, show, started)
            ending = supervisor.watch()
            supervisor.end()
            return supervisor.outcome(ending)
        finally:
            if supervisor is not None:
                supervisor.end()
            processes.remove(folder)
            reaper.finish()


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collects the signals that ask this process to end, instead of ending."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    watched = SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Supervisor:
    def __init__(self, launch: Launch, interruption: list[int], show: Show, started: float) -> None:
        self._launch, self._interruption, self._show, self._started = launch, interruption, show, started
        self._box = Mailbox(launch.settings.folder)
        self._watch = Watch(self._box)
        self._missing: tuple[Rank, ...] = ()
        self._over = False
        self._process = subprocess.Popen(
            launch.command,
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None,
            stdout=_standard_error(),
            start_new_session=True,
        )
        processes.STARTED.add(self._process.pid)

    def watch(self) -> Ending | None:
        """Until the run is over; the way that it ended, None where that shows in the reports."""
        ended_at: float | None = None
        died_at: float | None = None
        while True:
            self._watch.look()
            self._show(self._watch.ranks, time.monotonic() - self._started)
            processes.reap()
            code = self._process.poll()
            if self._interruption:
                return Ending.INTERRUPTED
            if code is not None and (code != 0 or not self._watch.living):
                ended_at = ended_at or time.monotonic()
                if code != 0 or time.monotonic() - ended_at > LINGER or not processes.of_run(self._launch.settings.token):
                    self._watch.look()
                    return self._after_program(code)
            if died_at is None and self._watch.died:
                died_at = time.monotonic()
                self._ask_for_stacks()
            if died_at is not None and time.monotonic() - died_at > AFTER_DEATH:
                return Ending.DIED
            if self._watch.idle > self._patience:
                return self._stalled()
            time.sleep(POLL)

    @property
    def _patience(self) -> float:
        """Seconds without progress that are borne; starting up takes its time whatever the time-out."""
        timeout = self._launch.settings.timeout
        return timeout if self._watch.moved else max(timeout, STARTUP)

    def _after_program(self, code: int) -> Ending | None:
        """The program is gone; ranks that still run were left behind."""
        if self._watch.all_final:
            return None
        if code < 0 and not self._watch.failed and not (self._is_rank() and self._watch.died):
            return Ending.LAUNCHER
        return Ending.DIED if self._watch.died else None

    def _is_rank(self) -> bool:
        """Whether the program is itself the only rank."""
        return any(rank.pid == self._process.pid for rank in self._watch.ranks)

    def _stalled(self) -> Ending:
        self._ask_for_stacks()
        self._missing = self._watch.unfinished
        self._wait(lambda: all(self._watch.stack_of(rank) for rank in self._missing))
        self._box.ask(LEAVE)
        self._wait(lambda: not self._watch.living)
        return Ending.STALLED

    def _ask_for_stacks(self) -> None:
        self._box.ask(STACKS)
        for rank in self._watch.living:
            if rank.signal:
                processes.send([rank.pid], rank.signal)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Until it is done, a few seconds at most."""
        deadline = time.monotonic() + FAREWELL
        while not done() and time.monotonic() < deadline and not self._interruption:
            time.sleep(POLL / 2)
            self._watch.look()

    def end(self) -> None:
        """Ends whatever of the run is left."""
        if self._over:
            return
        self._over = True
        self._missing = self._missing or self._watch.died
        token = self._launch.settings.token
        ranks = [rank.pid for rank in self._watch.living]
        if self._interruption:  # whoever interrupts a run knows why it ends
            ranks = [*self._own(), *processes.talkative(token), *ranks]
        processes.end_all(token, first=ranks, group=self._process.pid)
        try:
            self._process.wait(processes.GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        processes.STARTED.discard(self._process.pid)
        processes.reap()

    def _own(self) -> list[int]:
        """The program, where it is an interpreter that was started for a script, and not the user's own launcher."""
        return [self._process.pid] if self._launch.command[0] == sys.executable and self._process.poll() is None else []

    def outcome(self, ending: Ending | None) -> Outcome:
        """What the folder says, read before it is removed."""
        reports = tuple(report for report in self._box.read_all("report-") if report.get("version"))
        code = self._process.returncode
        return Outcome(
            ending or _ending(reports, code),
            tuple(sorted(reports, key=lambda report: (report.get("rank", 0), report.get("pid", 0)))),
            code if code >= 0 else None,
            -code if code < 0 else None,
            self._interruption[0] if self._interruption else None,
            tuple(self._watch.with_stack(rank) for rank in self._missing),
            time.monotonic() - self._started,
            tuple(self._box.texts("trouble-")),
            self._launch.shows and (not reports or any(report.get("rank") == 0 for report in reports)),
            self._launch.command,
        )


def _ending(reports: Sequence[dict[str, Any]], code: int) -> Ending:
    """How a run ended that was not cut short; the exit status only tells what the reports cannot."""
    ends = {report.get("ended") for report in reports}
    if "error" in ends:
        return Ending.ERROR
    if ends == {"updates"}:
        return Ending.UPDATES
    if code != 0:
        return Ending.ERROR
    return Ending.SCRIPT if ends else Ending.UNSEEN


def _standard_error() -> int:
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return 2
