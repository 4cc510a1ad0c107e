"""Which micro-batch an event of a run belongs to: told from the calls and the turns of the loops that the forwards ran in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accumlint.runtime.places import Site
from accumlint.trace import Kind

if TYPE_CHECKING:
    from accumlint.runtime.recorder import Row

CONTINUES = "continues"  # a forward whose inputs come out of a graph


class MicroBatches:
    """Numbers the micro-batches.

    A new one begins with a forward from a call that this one has seen already, after a backward, after a new batch of a
    loader, or in another turn of a loop over data, save where it goes on with what came out of the last one (a recurrent
    model's steps); and with any forward after a backward, once a loop around this one's
    first forward has gone on to another turn, or a loop over data that the same line ran in has been left. A loop over
    data with a forward and a backward of its own takes what was there for it: the first or the last of a window's
    batches may have a line before or after the loop over the others.
    """

    def __init__(self) -> None:
        self._number = 0
        self._events = 0  # backwards, and batches that were taken
        self._calls: dict[int, tuple[int, list[list[int]]]] = {}
        self._lines: dict[Site, list[list[int]]] = {}
        self._first: list[list[int]] = []
        self._latest: list[list[int]] = []  # the turns of the last forward
        self._ran: list[list[int]] | None = None  # the turns that the last backward shares with it; None before one
        self._moved_on = False

    def number(self, row: Row, line: Site | None) -> int:
        if row.kind == Kind.FORWARD.value:
            taken = [turn for turn in row.turns if turn[3]]
            if self._is_new(row, line, taken):
                self._number += 1
                self._calls.clear()
                self._lines.clear()
            if not self._calls:
                self._first = row.turns
            self._calls[row.at] = self._events, taken
            if line is not None:
                self._lines[line] = [turn[:3] for turn in row.turns]
            self._moved_on = False
            self._latest, self._ran = row.turns, None
        elif row.kind in {Kind.BACKWARD.value, Kind.DATA.value}:
            self._moved_on = True
            self._events += 1
            if row.kind == Kind.BACKWARD.value:
                self._ran = _in_common(self._latest, row.turns)
        return self._number

    def _is_new(self, row: Row, line: Site | None, taken: list[list[int]]) -> bool:
        before = self._calls.get(row.at)
        if before is not None:
            events, turns = before
            return events != self._events or (turns != taken and CONTINUES not in row.options)
        if not self._moved_on or not self._calls:
            return False
        elsewhere = self._lines.get(line) if line is not None else None
        if elsewhere is not None and elsewhere != [turn[:3] for turn in row.turns]:
            return True
        return _gone_on(self._first, row.turns) or (CONTINUES not in row.options and self._beside_a_loop(row))

    def _beside_a_loop(self, row: Row) -> bool:
        """Whether a loop over data held the last forward and its backward and this one not, or came after them and holds this one."""
        if self._ran is None:
            return False
        common = len(_in_common(self._ran, row.turns))
        left, entered = self._ran[common:], row.turns[common:]
        if left and entered:
            return False  # another loop: of another phase
        return any(turn[3] or turn[1] for turn in left) or any(turn[3] for turn in entered)


def _in_common(one: list[list[int]], other: list[list[int]]) -> list[list[int]]:
    """The turns that both lie in."""
    found: list[list[int]] = []
    for mine, theirs in zip(one, other, strict=False):
        if mine[:3] != theirs[:3]:
            break
        found.append(mine)
    return found


def _gone_on(before: list[list[int]], now: list[list[int]]) -> bool:
    """Whether a loop that both lie in has gone on to another turn."""
    for one, other in zip(before, now, strict=False):
        if one[0] != other[0]:
            return False
        if one[1:3] != other[1:3]:
            return True
    return False
