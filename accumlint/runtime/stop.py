"""How a rank ends: after its last update, at the script's end, at an error, or when it is told to.

After update N what still belongs to it (the scaler's update, the scheduler, zeroing) must be seen, so the end is armed
there, and comes with the first thing that no longer does: a forward, the next batch, a checkpoint, a change to a file, a
program that is started, or nothing at all for a while.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from accumlint.runtime import mailbox
from accumlint.runtime.disk import watch_changes
from accumlint.runtime.gather import PARTING, Meeting, Met
from accumlint.runtime.mailbox import Mailbox
from accumlint.runtime.places import USER, belongs_to, is_probe
from accumlint.runtime.recorder import Recorder
from accumlint.runtime.reference import across
from accumlint.runtime.watchdog import Stacks, Watchdog

ReportOf = Callable[..., dict[str, Any]]
SNAPSHOT_SHARE = 20  # a snapshot of the report may cost this part of the time between two


class Finished(SystemExit):
    """Ends the script after the last update, so that its `finally` blocks run."""


class Stopper:
    """The end of one process. `report_of(recorder, ended=…, error=…, stack=…)` makes its report."""

    def __init__(self, recorder: Recorder, report_of: ReportOf) -> None:
        self.recorder = recorder
        self.settings = recorder.settings
        self.mailbox = Mailbox(self.settings.folder)
        self.here = self.settings.host == socket.gethostname() and self.mailbox.exists()
        self.is_forked = False
        self.successor: Stopper | None = None  # of the rank that a fork of this process has become
        self.armed = False
        self.state = "running"
        self.thread = 0  # the one that made the last update
        self._report_of = report_of
        self._final = ""  # how the report ended for good
        self._parted = False
        self._script = str(getattr(sys.modules.get("__main__"), "__file__", None) or "")  # gone when the interpreter exits
        self._error: dict[str, Any] | None = None
        self._leaving = threading.Lock()
        self._owner = 0
        self._next_snapshot = 0.0
        self._store: Any = None
        self._watchdog: Watchdog | None = None
        self._stacks = Stacks(self.mailbox) if self.here else None

    def start(self) -> None:
        """Begins to watch this process."""
        self.recorder.progress.append(self._moved)
        self.recorder.on_release(self._released)
        atexit.register(self.script_ended)
        if "RANK" in os.environ and "--multiprocessing-fork" not in sys.orig_argv and not self._is_helper():
            self.show()

    def _is_helper(self) -> bool:
        """Whether a rank has started this process: it has the environment of one, and is none until it trains."""
        return os.path.exists(self.mailbox.progress(os.getppid()))

    def show(self) -> None:
        """Makes this process known to the controller as a rank."""
        if self._watchdog is None and self.here and not self.is_forked:
            self._watchdog = Watchdog(self)
            if self._stacks is not None:
                self._stacks.register()
            self._watchdog.post()

    def _moved(self) -> None:
        if self._watchdog is None or not self._watchdog.is_alive():
            self._guarded(self._awake)

    def _awake(self) -> None:
        self.show()
        if self._watchdog is not None and not self.is_forked and not self._watchdog.is_alive():
            self._watchdog.start()

    def update_done(self) -> None:
        """After each update: arms the end at the last, and keeps what was seen so far on the disk."""
        self._guarded(self._update_done)

    def _update_done(self) -> None:
        if self._final or self.armed or self.is_forked:
            return
        self._store = self._store or run_store()
        if self.recorder.updates < self.settings.steps:
            self._snapshot()
            return
        self._snapshot(at_once=True)
        self.thread = threading.get_ident()
        self.armed, self.state = True, "armed"
        if not self.settings.keep_going:
            watch_changes(self)
        if self._watchdog is not None:
            self._watchdog.post()

    def passing(self) -> None:
        """Something begins that no longer belongs to the last update. Does not return, or raises `Finished`, if the end is due."""
        if self.armed and not self.is_forked:
            self.leave()

    def leave(self) -> None:
        """Writes the report, waits for the other ranks, and ends the process (or, with `keep_going`, only the observation)."""
        if self.settings.keep_going:
            self._release()
            return
        if not self._claim():
            return
        self.recorder.active = False
        self._guarded(lambda: self._write("updates"))
        self._guarded(lambda: self._part(self.settings.timeout))
        if self.settings.graceful and threading.get_ident() == threading.main_thread().ident:
            self.armed = False
            raise Finished(0)
        self.exit(0)

    def leave_stalled(self, stack: str) -> None:
        """Ends a process that does not get on, from the watchdog's thread."""
        self._guarded(lambda: self._write("stalled", stack=stack))
        self.exit(0)

    def exit(self, status: int) -> None:
        """Ends the process without running anything more of the user's; what they have printed is not lost."""
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                continue
        os._exit(status)

    def failed(self, error: BaseException) -> None:
        """The script raised an error that it does not catch."""
        self._guarded(lambda: self._failed(error))

    def _failed(self, error: BaseException) -> None:
        if self._error is None:
            self._error = described(error)

    def script_ended(self) -> None:
        """The script has come to its end by itself."""
        if self.successor is not None:
            self.successor.script_ended()
        elif not self.is_forked and self._owner == 0:
            self._guarded(self._script_ended)

    def _script_ended(self) -> None:
        if self._parted or (not self.recorder.rows and self._watchdog is None and not self._failed_at_once()):
            return  # no rank: a launcher, or a helper that happens to import torch
        if self.armed:
            if not self._final:
                self._write("updates")
            self._part(self.settings.timeout)
            return
        if (last := _uncaught()) is not None:
            self._failed(last)
        self._settle()
        self._write("error" if self._error else "script")
        self._part(0.0 if self._error else PARTING)

    def _failed_at_once(self) -> bool:
        """Whether this is a script that failed before it came to anything that a rank does."""
        return _uncaught() is not None and bool(self._script) and belongs_to(self._script) == USER and not self.mailbox.names("rank-")

    def _settle(self) -> None:
        settle = getattr(self.recorder, "settle", None)
        if settle is not None:
            settle()

    def child_joined(self, process: Any) -> None:
        """A process that this one has started and waited for: where it was a rank that is done, what follows is not run either."""
        if self.is_forked or self.settings.keep_going or self.recorder.rows or process.exitcode is None or not self.here:
            return
        if mailbox.read(self.mailbox.report(process.pid)).get("ended") == "updates":
            if self.settings.graceful:
                raise Finished(0)
            self.exit(0)

    def forked(self) -> None:
        """This is now a copy of the process, made by a fork: a worker of a loader, in most cases. It stays silent."""
        self.is_forked, self.armed = True, False
        self.recorder.active = False
        self._watchdog = None
        if self._stacks is not None:
            self._stacks.unregister()

    def _claim(self) -> bool:
        """Whether this thread is the first to end the process; another one waits here for ever."""
        if self._leaving.acquire(blocking=False):
            self._owner = threading.get_ident()
            self.state = "waiting"
            return True
        if self._owner != threading.get_ident():
            threading.Event().wait()
        return False

    def _release(self) -> None:
        """The observation ends, the script goes on."""
        if self._final:
            return
        self._guarded(lambda: self._write("updates"))
        self.recorder.release()

    def _released(self) -> None:
        self.state = "released"

    def _part(self, patience: float) -> None:
        """Waits for the other ranks over the run's own store, at most `patience` seconds."""
        self._parted = True
        rank, world = position()
        if world < 2:
            return
        store = self._store or run_store()
        if store is None:
            return
        place = f"{self.settings.token}@{socket.gethostname()}" if self.here else f"{socket.gethostname()}:{os.getpid()}"
        meeting = Meeting(store, rank, world, place)
        word = {"rank": rank, "updates": self.recorder.updates, "host": socket.gethostname()}
        met = meeting.meet(word, self._data, patience)
        compared = rank == 0 and self._compare(met)
        self._keep(met, compared)

    def _compare(self, met: Met) -> bool:
        """Rank 0 finishes what takes the sums of all ranks; whether there was any."""
        try:
            reports = [self._report(self._final), *self.mailbox.read_all("report-"), *map(json.loads, met.reports)]
            return across.finish(self.settings.folder, self.recorder.rows, reports)
        except Exception as error:  # the reports that came must be kept all the same
            self.recorder.trouble(f"the reference of all ranks: {type(error).__name__}: {error}")
            return False

    def _keep(self, met: Met, compared: bool) -> None:
        """Puts what came over the store into the folder, under names of its own."""
        for number, data in enumerate(met.reports):
            mailbox.write_bytes(self.mailbox.report(f"sent-{number}"), data, to_disk=True)
        if compared or (met.absent and self._final == "updates"):
            self._write(self._final, absent=list(met.absent))

    def _data(self) -> bytes:
        return mailbox.encode(self._report(self._final))

    def _report(self, ended: str, **more: Any) -> dict[str, Any]:
        report = self._report_of(self.recorder, ended=ended, error=self._error, stack=more.pop("stack", ""))
        return {**report, **more}

    def _snapshot(self, *, at_once: bool = False) -> None:
        """The report so far, for a process that may be killed."""
        started = time.monotonic()
        if self.here and (at_once or started >= self._next_snapshot):
            mailbox.write(self.mailbox.report(os.getpid()), self._report("running"))
            now = time.monotonic()
            self._next_snapshot = now + SNAPSHOT_SHARE * (now - started)

    def _write(self, ended: str, **more: Any) -> None:
        self._final = ended
        self.state = "done"
        if self.here:
            mailbox.write(self.mailbox.report(os.getpid()), self._report(ended, **more), to_disk=True)
            if self._watchdog is not None:
                self._watchdog.post()

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self.recorder.trouble(f"the end of a rank: {type(error).__name__}: {error}")


def _uncaught() -> BaseException | None:
    """The error that has ended the script; the interpreter keeps it while it exits."""
    last = getattr(sys, "last_value", None)
    return last if isinstance(last, BaseException) and not isinstance(last, SystemExit) else None


def run_store() -> Any:
    """The store that the ranks of this run have met over, None without a process group."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return None
        from torch.distributed import distributed_c10d

        return distributed.PrefixStore("accumlint", distributed_c10d._get_default_store())
    except Exception:
        return None


def position() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain data: type, message, traceback, and the innermost line of the user's own code."""
    place = _place(error.__traceback__)
    return {
        "time": time.time(),  # the first error of a run is the cause of the others
        "type": type(error).__name__,
        "message": str(error),
        "text": _traceback(error),
        "file": place[0],
        "line": place[1],
    }


def _traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without the lines of the probes."""
    told = traceback.TracebackException.from_exception(error)
    waiting: list[traceback.TracebackException | None] = [told]
    while waiting:
        each = waiting.pop()
        if each is not None:
            own = [frame for frame in each.stack if not is_probe(frame.filename)]
            each.stack = traceback.StackSummary.from_list(own)
            waiting += [each.__cause__, each.__context__]
    return "".join(told.format())


def _place(trace: TracebackType | None) -> tuple[str, int]:
    found = ("", 0)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if belongs_to(name) == USER:
            found = (os.path.realpath(name), trace.tb_lineno)
        trace = trace.tb_next
    return found
