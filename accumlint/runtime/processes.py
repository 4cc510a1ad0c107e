"""The processes of a run: all that carry its token in their environment; finding, ending and outliving them.

Run as a program, this is the reaper: it waits until its standard input ends, which is when the controller is gone for any
reason, and then ends every process of the run and removes the folder. It imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

GRACE = 3.0  # seconds between asking a process to end and ending it
LINUX = sys.platform.startswith("linux")
INTERPRETER = re.compile(r"-?(python[\d.]*|pypy[\d.]*|(ba|da|z|k)?sh)")
QUIET_SCANS = 2  # in a row: a process that is starting another program shows no environment for a moment


def of_run(token: str) -> set[int]:
    """The living processes that carry the token. Linux only: elsewhere the set is empty."""
    mark = token.encode()
    found: set[int] = set()
    if not LINUX:
        return found
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    carries = mark in file.read()
            except OSError:
                continue
            if carries and alive(int(name)):
                found.add(int(name))
    return found


def talkative(token: str) -> list[int]:
    """Those of a run that would tell at length that they are asked to terminate, interpreters of Python and of shells, parents first.

    What removes the shared memory of others when they are gone is none of them.
    """
    return [pid for pid in sorted(of_run(token)) if _interprets(pid)]


def _interprets(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return False
    return INTERPRETER.fullmatch(os.path.basename(words[0])) is not None and not any("resource_tracker" in word for word in words)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not yet waited for does not."""
    if LINUX:
        return _state(pid) not in {"", "Z", "X"}
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _stat(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return next(iter(_stat(pid)), "")


def wait_status(pid: int) -> int | None:
    """How a process ended, as `os.waitstatus_to_exitcode` tells it, while its parent has not yet asked; None when unknown."""
    fields = _stat(pid)
    if len(fields) < 50 or fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            continue


def end_all(token: str, *, first: Iterable[int] = (), group: int = 0, grace: float = GRACE) -> set[int]:
    """Ends every process of a run; returns those that could not be ended.

    The processes named `first` are killed at once, for a rank that is asked to terminate may run code of the user, such
    as saving a checkpoint. The others are asked to, and killed after `grace` seconds. `group` is a process group to end as well.
    """
    send(first, signal.SIGKILL)
    started = time.monotonic()
    asked: set[int] = set()
    quiet = 0
    left: set[int] = set()
    while time.monotonic() - started < grace + 5.0:
        left = of_run(token)
        quiet = 0 if left or _group_alive(group) else quiet + 1
        if quiet == QUIET_SCANS:
            return set()
        if time.monotonic() - started < grace:
            send(left - asked, signal.SIGTERM)
            if not asked:
                _end_group(group, signal.SIGTERM)
            asked |= left
        else:
            send(left, signal.SIGKILL)
            _end_group(group, signal.SIGKILL)
        reap()
        time.sleep(0.02)
    return left


def _group_alive(group: int) -> bool:
    """Whether a process group has members that run; on Linux the token finds them."""
    if not group or LINUX:
        return False
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


def _end_group(group: int, number: int) -> None:
    if group:
        with contextlib.suppress(OSError):
            os.killpg(group, number)


def adopt() -> None:
    """Makes this process the parent of orphans below it, on Linux, so that none is lost sight of."""
    if not LINUX:
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    except (OSError, AttributeError, ImportError):
        pass


def reap() -> None:
    """Waits for adopted processes that have ended; children that were started here keep their status."""
    if not LINUX:
        return
    for name in _children():
        if name not in STARTED and _state(name) == "Z":
            try:
                os.waitpid(name, os.WNOHANG)
            except OSError:
                continue


STARTED: set[int] = set()  # children whose status somebody will ask for


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(each) for each in file.read().split()]
    except OSError:
        return []


class Reaper:
    """The process that cleans up after a controller, also after one that was killed."""

    def __init__(self, token: str, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, token, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        STARTED.add(self._process.pid)

    def finish(self) -> None:
        """Lets it go: the controller has cleaned up by itself."""
        try:
            self._process.communicate(b"done", timeout=GRACE)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        STARTED.discard(self._process.pid)


def remove(folder: str) -> None:
    """Removes a folder in which something may still be written."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.02)


def _reap_when_alone(token: str, folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == b"done":
        return
    end_all(token, grace=0.0)
    remove(folder)
    end_all(token, grace=0.0)


if __name__ == "__main__":
    _reap_when_alone(*sys.argv[1:3])
