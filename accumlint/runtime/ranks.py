"""The ranks of a run as the controller sees them: by the files that they write, and by their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accumlint.runtime import mailbox, processes
from accumlint.runtime.mailbox import FINAL, Mailbox

TOGETHER = 1.0  # seconds within which two ends are one


@dataclass(frozen=True)
class Rank:
    """How far a rank is.

    `state` is "running", "armed", "waiting", "done" or "released"; `status` is its exit status, negative for a signal,
    None where unknown.
    """

    pid: int
    rank: int
    world: int
    updates: int
    micro_batches: int
    events: int
    last: str  # kind of its last event
    state: str
    signal: int
    stack: str = ""
    status: int | None = None

    @property
    def seen(self) -> tuple[int, int, str]:
        """What changes when it gets on."""
        return (self.events, self.updates, self.state)


class Watch:
    """Looks at the folder of a run: which ranks there are, which live, which vanished, since when nothing has moved."""

    def __init__(self, box: Mailbox, clock: Callable[[], float] = time.monotonic) -> None:
        self._box = box
        self._clock = clock
        self._ranks: dict[int, Rank] = {}
        self._alive: set[int] = set()
        self._ended: dict[int, str] = {}
        self._status: dict[int, int] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._died: dict[int, Rank] = {}
        self._failed_at: float | None = None
        self._moved_at = clock()

    def look(self) -> None:
        """Reads what is new."""
        for name in self._box.names("rank-"):
            self._read(name)
        for pid in self._ranks:
            self._look_at(pid)
        now = self._clock()
        if self.failed and self._failed_at is None:
            self._failed_at = now
        # Peers of a rank that vanishes fail at once, and may say so before it is noticed; what vanishes long after an error is its victim.
        if not self._died and (self._failed_at is None or now - self._failed_at < TOGETHER):
            self._died = {pid: rank for pid, rank in self._ranks.items() if pid not in self._alive and self._vanished(pid)}

    def _read(self, name: str) -> None:
        path = self._box.path(name)
        try:
            stat = os.stat(path)
        except OSError:
            return
        pid = int(name.removeprefix("rank-").removesuffix(".json"))
        stamp = (stat.st_mtime_ns, stat.st_ino)
        if self._stamps.get(pid) == stamp:
            return
        table = mailbox.read(path)
        if not table:
            return
        self._stamps[pid] = stamp
        rank = _rank(table)
        if pid not in self._ranks or self._ranks[pid].seen != rank.seen:
            self._moved_at = self._clock()
        self._ranks[pid] = rank

    def _look_at(self, pid: int) -> None:
        status = processes.wait_status(pid)
        if status is not None:
            self._status[pid] = status
        if processes.alive(pid):
            self._alive.add(pid)
            return
        self._alive.discard(pid)
        if pid not in self._ended:
            self._ended[pid] = str(mailbox.read(self._box.report(pid)).get("ended", ""))
            self._moved_at = self._clock()

    def _vanished(self, pid: int) -> bool:
        """It is gone, and neither said so nor was told to go by its launcher."""
        return self._ended.get(pid) not in FINAL and not mailbox.read_text(self._box.terminated(pid))

    @property
    def ranks(self) -> Sequence[Rank]:
        return sorted(self._ranks.values(), key=lambda rank: (rank.rank, rank.pid))

    @property
    def living(self) -> Sequence[Rank]:
        return [rank for rank in self.ranks if rank.pid in self._alive]

    @property
    def unfinished(self) -> tuple[Rank, ...]:
        """Those that have not made their updates."""
        return tuple(rank for rank in self.living if rank.state == "running")

    @property
    def died(self) -> tuple[Rank, ...]:
        """Those that vanished first; what follows them is the launcher's doing."""
        return tuple(self._died.values())

    @property
    def all_final(self) -> bool:
        """Whether there are ranks, and all have said how they ended."""
        return bool(self._ranks) and all(self._ended.get(pid) in FINAL for pid in self._ranks)

    @property
    def failed(self) -> bool:
        """Whether a rank has ended with an error of its own."""
        return "error" in self._ended.values()

    @property
    def moved(self) -> bool:
        """Whether a rank has had an event."""
        return any(rank.events for rank in self._ranks.values())

    @property
    def idle(self) -> float:
        """Seconds since something moved."""
        return self._clock() - self._moved_at

    def stack_of(self, rank: Rank) -> str:
        return mailbox.read_text(self._box.stack(rank.pid)) or mailbox.read_text(self._box.terminated(rank.pid))

    def with_stack(self, rank: Rank) -> Rank:
        """The same with its stacks and its exit status; a report may know of more updates than the last word did."""
        updates = max(rank.updates, int(mailbox.read(self._box.report(rank.pid)).get("updates", 0)))
        return replace(rank, updates=updates, stack=self.stack_of(rank), status=self._status.get(rank.pid))


def _rank(table: dict[str, Any]) -> Rank:
    def number(key: str) -> int:
        return int(table.get(key, 0))

    return Rank(
        number("pid"),
        number("rank"),
        number("world"),
        number("updates"),
        number("micro_batches"),
        number("events"),
        str(table.get("last", "")),
        str(table.get("state", "")),
        number("signal"),
    )
