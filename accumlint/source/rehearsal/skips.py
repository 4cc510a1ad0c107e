"""What the ways that do not train really leave out: only events that the other way brought about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from accumlint.trace import Event, Kind, Place, Turn

HANGS = "hangs:"  # cause of a loss that has no graph on the way that a skip, whose index follows, stands for


def narrowed(events: Sequence[Event], ends: dict[int, int]) -> list[Event]:
    """The events, each skip with only the kinds that some pass by its place would have left out.

    What a skip leaves out is first told by the names in the source, which promise more than is there. `ends` holds, by the
    index of a skip, where the statements end that it passes over; the others go on to the end of the turn.
    """
    skips = [event for event in events if _leaves_out(event)]
    if not skips:
        return list(events)
    happened: dict[tuple[Place, str], set[Kind]] = {}
    for skip in skips:
        happened.setdefault(_where(skip), set()).update(_missed(events, skip, ends))
    return [replace(event, skipped=event.skipped & happened[_where(event)]) if _leaves_out(event) else event for event in events]


def _leaves_out(event: Event) -> bool:
    return event.kind is Kind.SKIP and bool(event.skipped)


def _where(skip: Event) -> tuple[Place, str]:
    return (skip.guard.place if skip.guard is not None else skip.place, skip.leaves)


def _missed(events: Sequence[Event], skip: Event, ends: dict[int, int]) -> set[Kind]:
    if not skip.turns:
        return set()  # asked once, before the loop
    end = ends.get(skip.index, len(events))
    found: set[Kind] = set()
    for event in events[skip.index + 1 : end]:
        if not _same_turn(skip.turns, event.turns):
            break
        found.add(event.kind)
    return found


def _same_turn(outer: tuple[Turn, ...], inner: tuple[Turn, ...]) -> bool:
    """Whether an event happened in the turn, or in loops inside it."""
    return len(inner) >= len(outer) and all(
        (one.line, one.index, one.entry) == (other.line, other.index, other.entry) for one, other in zip(outer, inner, strict=False)
    )
