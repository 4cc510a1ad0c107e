"""Which micro-batch an event belongs to, told from its call and its loops' turns."""

from __future__ import annotations

import pytest

from accumlint.runtime.microbatches import CONTINUES, MicroBatches
from accumlint.runtime.recorder import Row
from accumlint.trace import Kind

STEP, LOOP = 10, 20  # lines of an outer loop and of the one inside it
FIRST, IN_LOOP, AFTER = 1, 2, 3  # calls


def outer(index: int) -> list[list[int]]:
    return [[STEP, index, 0, 0, index]]


def inner(index: int, turn: int, *, batches: bool = True) -> list[list[int]]:
    return [*outer(index), [LOOP, turn, index, int(batches), -1 if batches else turn]]


def number_all(calls: list[tuple[int, list[list[int]]]], *options: str) -> list[int]:
    """The numbers of these forwards; each has a backward behind it."""
    numbering = MicroBatches()
    found = []
    for position, (call, turns) in enumerate(calls):
        forward = Row(2 * position, Kind.FORWARD.value, at=call, turns=turns, options=list(options))
        found.append(numbering.number(forward, ("train.py", call, 0, call, 0, "train", "")))
        numbering.number(Row(2 * position + 1, Kind.BACKWARD.value, at=10 * call, turns=turns), None)
    return found


def test_the_last_batch_has_a_line_behind_the_loop() -> None:
    window = [(IN_LOOP, inner(0, 0)), (IN_LOOP, inner(0, 1)), (AFTER, outer(0))]
    following = [(IN_LOOP, inner(1, 0)), (IN_LOOP, inner(1, 1)), (AFTER, outer(1))]
    assert number_all(window + following) == [0, 1, 2, 3, 4, 5]


def test_a_window_of_two_with_the_last_behind_the_loop() -> None:
    assert number_all([(IN_LOOP, inner(0, 0)), (AFTER, outer(0)), (IN_LOOP, inner(1, 0)), (AFTER, outer(1))]) == [0, 1, 2, 3]


def test_the_first_batch_has_a_line_before_the_loop() -> None:
    assert number_all([(FIRST, outer(0)), (IN_LOOP, inner(0, 0)), (IN_LOOP, inner(0, 1)), (FIRST, outer(1))]) == [0, 1, 2, 3]


def test_counted_batches_and_one_behind_them() -> None:
    calls = [(IN_LOOP, inner(0, turn, batches=False)) for turn in range(2)]
    assert number_all([*calls, (AFTER, outer(0))]) == [0, 1, 2]


def test_what_goes_on_with_the_loops_results_is_no_new_micro_batch() -> None:
    assert number_all([(FIRST, outer(0)), (AFTER, outer(0))], CONTINUES) == [0, 0]


@pytest.mark.parametrize("turns", [outer(0), []])
def test_two_losses_side_by_side_are_one_micro_batch(turns: list[list[int]]) -> None:
    assert number_all([(FIRST, turns), (AFTER, turns)]) == [0, 0]


def test_a_forward_whose_backward_comes_after_the_loop_keeps_the_next_one() -> None:
    numbering = MicroBatches()
    assert numbering.number(Row(0, Kind.FORWARD.value, at=IN_LOOP, turns=inner(0, 0)), None) == 0
    numbering.number(Row(1, Kind.BACKWARD.value, at=9, turns=outer(0)), None)
    assert numbering.number(Row(2, Kind.FORWARD.value, at=AFTER, turns=outer(0)), None) == 0
