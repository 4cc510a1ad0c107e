"""How ranks part: over the run's own store, without a collective, and with nothing left for a disk that they do not share."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "accumlint"  # the same for controllers on several nodes, whose tokens differ
CHUNK = 1 << 20  # bytes of a report in one value of the store
PARTING = 10.0  # seconds for the last words


@dataclass(frozen=True)
class Met:
    """Who came (rank 0 only knows what the others said), who did not, and the reports that came over the store."""

    absent: tuple[int, ...] = ()
    words: tuple[dict[str, Any], ...] = ()
    reports: tuple[bytes, ...] = ()


class Meeting:
    """The parting of the ranks of one run.

    `store` is any store of torch with set, get, add and check. `place` names where this rank's report lies: ranks with
    the same place share a folder, the others send their reports to rank 0.
    """

    def __init__(self, store: Any, rank: int, world: int, place: str) -> None:
        self._store, self._rank, self._world, self._place = store, rank, world, place

    def meet(self, word: dict[str, Any], report: Callable[[], bytes], patience: float) -> Met:
        """Waits for all ranks, at most `patience` seconds, and lets reports flow to rank 0.

        Nobody is kept by a rank that does not come. Errors of the store (its host is gone) are raised.
        """
        if self._rank == 0:
            self._store.set("root", self._place)
        self._set(f"done/{self._rank}", {**word, "place": self._place})
        came = self._count("came", 1)
        if came < self._world:
            came = self._wait("came", self._world, patience)
        absent = () if came >= self._world else self._missing()
        if self._rank == 0:
            return self._receive(absent)
        if 0 not in absent and self._text("root") != self._place:
            self._send(report())
        self._count("gone", 1)
        return Met(absent)

    def _missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._world) if not self._store.check([f"done/{rank}"]))

    def _send(self, data: bytes) -> None:
        packed = zlib.compress(data, 6)
        chunks = [packed[at : at + CHUNK] for at in range(0, len(packed), CHUNK)]
        for number, chunk in enumerate(chunks):
            self._store.set(f"report/{self._rank}/{number}", chunk)
        self._store.set(f"report/{self._rank}", str(len(chunks)))

    def _receive(self, absent: Sequence[int]) -> Met:
        words = [self._get(f"done/{rank}") for rank in range(self._world) if rank not in absent]
        reports: list[bytes] = []
        for rank, word in zip((rank for rank in range(self._world) if rank not in absent), words, strict=True):
            if word.get("place") != self._place and self._appears(f"report/{rank}"):
                reports.append(self._fetch(rank))
        if len(words) > 1:  # the store may live in this process: the others go first
            self._wait("gone", len(words) - 1, PARTING)
        return Met(tuple(absent), tuple(words), tuple(reports))

    def _fetch(self, rank: int) -> bytes:
        chunks = []
        for number in range(int(self._text(f"report/{rank}"))):
            key = f"report/{rank}/{number}"
            chunks.append(bytes(self._store.get(key)))
            self._store.delete_key(key)
        return zlib.decompress(b"".join(chunks))

    def _appears(self, key: str) -> bool:
        deadline = time.monotonic() + PARTING
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _count(self, key: str, more: int) -> int:
        return int(self._store.add(key, more))

    def _wait(self, key: str, number: int, patience: float) -> int:
        """Waits until a counter has reached a number; returns what it has reached."""
        deadline = time.monotonic() + patience
        pause = 0.02
        while (reached := self._count(key, 0)) < number and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return reached

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(key, json.dumps(value))

    def _get(self, key: str) -> dict[str, Any]:
        table = json.loads(self._text(key))
        return table if isinstance(table, dict) else {}

    def _text(self, key: str) -> str:
        return bytes(self._store.get(key)).decode()
