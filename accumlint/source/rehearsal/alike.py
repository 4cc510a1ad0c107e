"""Whether two rehearsals show the rules the same, whatever numbers the objects in them carry."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from accumlint.trace import Actor, Event, Kind, Role, Trace

_NUMBERED = frozenset({"index", "model", "scaler", "targets", "reaches", "forwards", "data"})
_SEEN = tuple(each.name for each in fields(Event) if each.name not in _NUMBERED)


def alike(one: Sequence[Trace], other: Sequence[Trace]) -> bool:
    """Whether the same findings follow from both; under which settings they were rehearsed does not count."""
    return len(one) == len(other) and all(_seen(first) == _seen(second) for first, second in zip(one, other, strict=True))


def _seen(trace: Trace) -> tuple[Any, ...]:
    used = {number for event in trace.events if event.kind is not Kind.DATA for number in event.data}
    events = list(_shown(trace.events, used))
    actors = [*trace.actors, *(each for event in events for each in (event.model, event.scaler, *event.targets) if each is not None)]
    # The order of the numbers may matter, their distance does not.
    objects = _ranks([uid for each in actors for uid in (each.uid, each.base) if uid is not None], *(event.reaches for event in events))
    pieces = _pieces(events)
    indices = _ranks(event.index for event in events)

    def actor(of: Actor | None) -> tuple[Any, ...] | None:
        if of is None:
            return None
        name = "" if of.role is Role.OPTIMIZER else of.name  # often that of its class, of which there is a choice
        return (objects[of.uid], name, of.role, of.wrapper, None if of.base is None else objects[of.base], of.known, of.options)

    def fact(name: str) -> tuple[str, int | str]:
        """A fact about one object has the object's number behind a colon."""
        about, _, uid = name.partition(":")
        return (about, objects.get(int(uid), "unseen") if uid.isdigit() else uid)

    return (
        {fact(name): evidence for name, evidence in trace.facts.items()},
        (trace.place, trace.accumulation, trace.followed, trace.judges_tail, trace.limits, trace.frameworks),
        [actor(each) for each in trace.actors],
        [
            (
                *(getattr(event, name) for name in _SEEN),
                actor(event.model),
                actor(event.scaler),
                [actor(each) for each in event.targets],
                {objects[uid] for uid in event.reaches},
                [indices.get(each) for each in event.forwards],
                {pieces[each] for each in event.data},
            )
            for event in events
        ],
    )


def _shown(events: Iterable[Event], used: set[int]) -> Iterator[Event]:
    """The events that a rule may rest on: no data that no forward uses, unless it is taken in a loop after the training has begun."""
    begun = False
    for event in events:
        begun = begun or event.micro_batch >= 0 or event.kind is Kind.STEP
        if event.kind is not Kind.DATA or (begun and event.turns) or not used.isdisjoint(event.data):
            yield event


def _pieces(events: Iterable[Event]) -> dict[int, tuple[int, ...]]:
    """For each piece of data where it is taken and used: which events share data counts, not in how many pieces it comes."""
    found: dict[int, list[int]] = defaultdict(list)
    for at, event in enumerate(events):
        for number in event.data:
            found[number].append(at)
    return {number: tuple(places) for number, places in found.items()}


def _ranks(*numbers: Iterable[int]) -> dict[int, int]:
    return {number: at for at, number in enumerate(sorted({each for those in numbers for each in those}))}
