"""The events of a rehearsal, by the training loop that they belong to."""

from __future__ import annotations

from accumlint.trace import Event, Kind


def split_by_loop(events: list[Event]) -> list[tuple[Event, ...]]:
    """The events of each outermost loop that trains; what stands between those goes with the next one, what stands last with the last."""
    training = {event.turns[0].line for event in events if event.turns and event.kind in {Kind.FORWARD, Kind.BACKWARD}}
    groups: list[list[Event]] = []
    pending: list[Event] = []
    current: int | None = None
    for event in events:
        line = event.turns[0].line if event.turns else None
        if line not in training:  # such as one over the parameters
            pending.append(event)
            continue
        if line != current or not groups:
            groups.append([])
            current = line
        groups[-1].extend(pending)
        pending.clear()
        groups[-1].append(event)
    if pending:
        if not groups:
            groups.append([])
        groups[-1].extend(pending)
    return [_renumbered(group) for group in groups]


def _renumbered(events: list[Event]) -> tuple[Event, ...]:
    number = {event.index: at for at, event in enumerate(events)}
    trained = dict.fromkeys(event.micro_batch for event in events if event.kind in {Kind.FORWARD, Kind.BACKWARD})
    order = {micro_batch: at for at, micro_batch in enumerate(sorted(trained), start=0)}
    found: list[Event] = []
    current = -1
    for event in events:
        current = order.get(event.micro_batch, current)
        forwards = tuple(number[one] for one in event.forwards if one in number)
        found.append(event.renumbered(number[event.index], forwards, current))
    return tuple(found)
