"""The turns of the loops around each event, and which micro-batch it belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from accumlint.runtime.assemble.windows import Report, Row
from accumlint.trace import Kind, Turn

Position = tuple[int, int]  # line and entry of a loop


class Loops:
    """What the turns of all events together say: which turn was a loop's last, which forward an event stands before."""

    def __init__(self, report: Report) -> None:
        self._rows: Sequence[Row] = report["events"]
        self._ended = report["ended"] in {"script", "error"}
        self._last: dict[Position, tuple[int, int]] = {}
        self._newest: dict[int, int] = {}
        self._micro_batches: dict[int, int] = {}
        self._borrowed: dict[int, Row] = {}
        inside: dict[Position, set[int]] = defaultdict(set)
        self._over: set[Position] = set()
        running: set[Position] = set()
        for row in self._rows:
            if row["at"] >= 0:
                now = {(line, entry) for line, _, entry, *_ in row["turns"]}
                self._over |= running - now
                running = now
            for line, index, entry, *_ in row["turns"]:
                self._last[line, entry] = (index, row["micro_batch"])
                self._newest[line] = entry
                if row["kind"] == Kind.BACKWARD.value:
                    inside[line, entry].add(row["micro_batch"])
        self._assign()
        most: dict[int, int] = defaultdict(int)
        for (line, _), micro_batches in inside.items():
            most[line] = max(most[line], len(micro_batches))
        # A loop that is entered anew in every micro-batch (over hooks, heads or parameters) is no pass over the data.
        self._inner = {line for line, number in most.items() if number <= 1 and self._newest[line] > 0}

    def micro_batch(self, row: Row) -> int:
        return self._micro_batches.get(row["index"], int(row["micro_batch"]))

    def turns(self, row: Row) -> tuple[Turn, ...]:
        """Outermost first."""
        source = self._borrowed.get(row["index"], row)
        return tuple(
            Turn(line, index, entry, last=self._is_last(line, index, entry, source))
            for line, index, entry, *_ in source["turns"]
            if line not in self._inner
        )

    def ends_pass(self, row: Row) -> bool:
        """Whether the event lies in the last turn of its innermost loop."""
        turns = self.turns(row)
        return bool(turns) and turns[-1].last

    def counters(self, row: Row) -> list[int]:
        return [turn[4] for turn in row["turns"]]

    def _is_last(self, line: int, index: int, entry: int, row: Row) -> bool:
        if self._newest[line] == entry and not self._ended and (line, entry) not in self._over:
            return False
        last, micro_batch = self._last[line, entry]
        return index == last and (last > 0 or row["micro_batch"] == micro_batch)

    def _assign(self) -> None:
        """What happens before a forward, in its turn, belongs to its micro-batch: a batch that is taken, gradients that are cleared."""
        waiting: list[Row] = []
        last: Row | None = None
        for row in self._rows:
            if row["kind"] == Kind.BACKWARD.value:
                waiting, last = [], row
            elif row["kind"] == Kind.FORWARD.value:
                for earlier in waiting:
                    if earlier["kind"] == Kind.DATA.value:
                        self._micro_batches[earlier["index"]] = row["micro_batch"]
                        self._borrowed[earlier["index"]] = row
                    elif earlier["turns"] and _within(earlier, row) and not (last is not None and _within(earlier, last)):
                        self._micro_batches[earlier["index"]] = row["micro_batch"]
                waiting = []
            else:
                waiting.append(row)


def _within(one: Row, other: Row) -> bool:
    """Whether both lie in the same turns of the loops that they share, down to the innermost one of the first."""
    return [turn[:3] for turn in one["turns"]] == [turn[:3] for turn in other["turns"]][: len(one["turns"])] and len(one["turns"]) == len(
        other["turns"]
    )
