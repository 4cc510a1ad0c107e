"""What a way that does not train leaves out."""

from __future__ import annotations

from accumlint.source.rehearsal.skips import narrowed
from accumlint.trace import Event, Guard, Kind, Place, Turn

PLACE = Place("train.py", 3)
PROMISED = frozenset({Kind.BACKWARD, Kind.STEP})


def _event(index: int, kind: Kind, *turns: Turn) -> Event:
    return Event(index, kind, PLACE, 0, turns)


def _skip(index: int, *turns: Turn, leaves: str = "continue") -> Event:
    return Event(index, Kind.SKIP, PLACE, 0, turns, guard=Guard(Place("train.py", 2), "bad(loss)", "data"), skipped=PROMISED, leaves=leaves)


def test_only_what_happens_in_the_same_turn_is_left_out() -> None:
    first, second = Turn(1, 0), Turn(1, 1)
    events = [_skip(0, first), _event(1, Kind.BACKWARD, first), _event(2, Kind.STEP, second)]
    assert narrowed(events, {})[0].skipped == {Kind.BACKWARD}


def test_inner_loops_belong_to_the_turn() -> None:
    turn = Turn(1, 0)
    events = [_skip(0, turn), _event(1, Kind.BACKWARD, turn, Turn(2, 0)), _event(2, Kind.STEP, turn)]
    assert narrowed(events, {})[0].skipped == PROMISED


def test_a_skip_leaves_out_what_it_can_leave_out_in_any_turn() -> None:
    first, second = Turn(1, 0), Turn(1, 1)
    events = [
        _skip(0, first),
        _event(1, Kind.BACKWARD, first),
        _skip(2, second),
        _event(3, Kind.BACKWARD, second),
        _event(4, Kind.STEP, second),
    ]
    found = narrowed(events, {})
    assert found[0].skipped == found[2].skipped == PROMISED


def test_a_branch_leaves_out_what_is_in_it() -> None:
    turn = Turn(1, 0)
    events = [_skip(0, turn, leaves="branch"), _event(1, Kind.BACKWARD, turn), _event(2, Kind.STEP, turn)]
    assert narrowed(events, {0: 2})[0].skipped == {Kind.BACKWARD}
    assert not narrowed(events, {0: 1})[0].skipped


def test_a_question_before_the_loop_leaves_out_nothing() -> None:
    events = [_skip(0, leaves="branch"), _event(1, Kind.BACKWARD, Turn(1, 0)), _event(2, Kind.STEP, Turn(1, 0))]
    assert not narrowed(events, {})[0].skipped
