"""Turns and passes of running loops are told from the loops' own variables."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from accumlint.runtime.turns import Turns


def recorded(turns: Turns) -> list[tuple[int, int]]:
    """Index and entry of the loops around the caller, outermost first."""
    return [(index, entry) for _, index, entry, *_ in turns.of([sys._getframe(1)])]


def test_epochs_and_batches() -> None:
    turns = Turns()
    seen = []
    for _epoch in range(2):
        for _i, _batch in enumerate("ab"):
            seen.append(recorded(turns))
    assert seen == [[(0, 0), (0, 0)], [(0, 0), (1, 0)], [(1, 0), (0, 1)], [(1, 0), (1, 1)]]


def test_a_name_that_both_loops_set_belongs_to_the_inner_one() -> None:
    turns = Turns()
    seen = []
    for _ in range(2):
        for _ in range(2):
            seen.append(recorded(turns))  # noqa: PERF401
    assert [inner for _, inner in seen] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_objects_in_a_list_are_told_apart() -> None:
    turns = Turns()
    batches = [[1], [2], [3]]
    seen = []
    for _batch in batches:
        seen.append(recorded(turns))  # noqa: PERF401
    assert seen == [[(0, 0)], [(1, 0)], [(2, 0)]]


def test_reading_a_frame_keeps_nothing_alive() -> None:
    import gc
    import weakref

    class Batch:
        pass

    turns = Turns()

    def run() -> Iterator[weakref.ref[Batch]]:
        for _i in range(2):
            batch = Batch()
            recorded(turns)
            held = weakref.ref(batch)
            del batch
            gc.collect()
            yield held

    assert all(held() is None for held in run())
