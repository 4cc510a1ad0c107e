"""How far a run is, on standard error: one line that is drawn over in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accumlint.runtime.ranks import Rank

SELDOM = 15.0  # seconds between two lines that stay


class Progress:
    """Shows the ranks of a run whenever it is called; `steps` is the number of updates asked for."""

    def __init__(self, steps: int, *, quiet: bool = False) -> None:
        self._steps = steps
        self._quiet = quiet
        self._overwrites = not quiet and sys.stderr.isatty()
        self._shown = ""
        self._updates = -1
        self._next = 0.0

    def __call__(self, ranks: Sequence[Rank], seconds: float) -> None:
        """`seconds` since the start of the run."""
        if self._quiet:
            return
        line = self._line(ranks)
        if self._overwrites:
            self._draw(f"{line}, {seconds:.0f} s")
            return
        updates = min((rank.updates for rank in ranks), default=0)
        alive = any(rank.state != "done" for rank in ranks)
        if alive and updates != self._updates and (seconds >= self._next or updates >= self._steps):
            self._updates, self._next = updates, seconds + SELDOM
            sys.stderr.write(f"accumlint: {line}\n")

    def clear(self) -> None:
        """Takes the line away."""
        if self._overwrites and self._shown:
            self._draw("")

    def _line(self, ranks: Sequence[Rank]) -> str:
        if not ranks:
            return "waiting for the first rank"
        updates = min(rank.updates for rank in ranks)
        alive = sum(rank.state != "done" for rank in ranks)
        world = max(max(rank.world for rank in ranks), len(ranks))
        return f"{min(updates, self._steps)} of {self._steps} updates, {alive} of {world} {'rank' if world == 1 else 'ranks'} alive"

    def _draw(self, line: str) -> None:
        if line != self._shown:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._shown = line
