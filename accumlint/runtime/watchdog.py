"""A thread in each rank that tells the controller how far it is, and ends the rank when it is told to or left alone."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, BinaryIO

from accumlint.runtime import mailbox
from accumlint.runtime.mailbox import LEAVE, STACKS, Mailbox

if TYPE_CHECKING:
    from accumlint.runtime.stop import Stopper

PAUSE = 0.2  # seconds between two looks
POST = 0.5  # seconds between two words to the controller
IDLE = 3.0  # seconds without an event after which an armed rank is waited for no longer
ASKED = getattr(signal, "SIGRTMIN", 0) + 11 if hasattr(signal, "SIGRTMIN") else 0  # asks for stacks, 0 where there is no such signal


class Stacks:
    """Writes the stacks of all threads when a signal comes, whatever the interpreter is waiting for."""

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self._files: list[BinaryIO] = []
        self._numbers: list[int] = []

    def register(self) -> None:
        """When asked for, and when told to terminate, after which it terminates."""
        self._on(signal.SIGTERM, self._box.terminated(os.getpid()), chain=True)
        if ASKED:
            self._on(ASKED, self._box.stack(os.getpid()), chain=False)

    def unregister(self) -> None:
        for number in self._numbers:
            faulthandler.unregister(number)
        for file in self._files:
            file.close()
        self._numbers, self._files = [], []

    def _on(self, number: int, path: str, *, chain: bool) -> None:
        file = open(path, "ab", buffering=0)  # noqa: SIM115 - the handler writes to it for as long as the process lives
        faulthandler.register(number, file=file, all_threads=True, chain=chain)
        self._files.append(file)
        self._numbers.append(number)


class Watchdog(threading.Thread):
    """Looks a few times a second; the thread that trains is never waited for."""

    def __init__(self, stopper: Stopper) -> None:
        super().__init__(name="accumlint", daemon=True)
        self._stopper = stopper
        self._box = stopper.mailbox
        self._lock = threading.Lock()
        self._seen: tuple[Any, ...] = ()
        self._posted: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._watches_controller = mailbox.is_running(stopper.settings.controller)

    def run(self) -> None:
        posted = 0.0
        while not self._stopper.is_forked:
            time.sleep(PAUSE)
            try:
                self._look()
                if time.monotonic() - posted >= POST:
                    self.post()
                    posted = time.monotonic()
            except Exception as error:
                self._stopper.recorder.trouble(f"the watchdog: {type(error).__name__}: {error}")

    def post(self) -> None:
        """Writes how far this rank is, if it has moved."""
        with self._lock:
            if (now := self._where()) != self._posted:
                mailbox.write(self._box.progress(os.getpid()), self._progress())
                self._posted = now

    def _where(self) -> tuple[Any, ...]:
        recorder = self._stopper.recorder
        return (len(recorder.rows), recorder.updates, self._stopper.state)

    def _progress(self) -> dict[str, Any]:
        from accumlint.runtime.stop import position

        recorder = self._stopper.recorder
        last = recorder.rows[-1] if recorder.rows else None
        rank, world = position()
        return {
            "pid": os.getpid(),
            "rank": rank,
            "world": world,
            "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
            "updates": recorder.updates,
            "micro_batches": last.micro_batch + 1 if last is not None else 0,
            "events": len(recorder.rows),
            "last": last.kind if last is not None else "",
            "state": self._stopper.state,
            "at": time.monotonic(),
            "signal": ASKED,
        }

    def _look(self) -> None:
        if not self._box.exists() or (self._watches_controller and not mailbox.is_running(self._stopper.settings.controller)):
            shutil.rmtree(self._box.folder, ignore_errors=True)
            os._exit(1)
        if not ASKED and self._box.exists(STACKS) and not os.path.exists(self._box.stack(os.getpid())):
            with open(self._box.stack(os.getpid()), "wb") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        if self._box.exists(LEAVE):
            self._stopper.leave_stalled(mailbox.read_text(self._box.stack(os.getpid())))
        if self._stopper.armed and not self._stopper.settings.keep_going and self._idle() > IDLE:
            self._stopper.leave()

    def _idle(self) -> float:
        if (now := self._where()) != self._seen:
            self._seen, self._since = now, time.monotonic()
        return time.monotonic() - self._since
