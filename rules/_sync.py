"""When a data-parallel wrapper synchronises: the sync flag that a forward or a backward saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from accumlint.rules._order import family, forwards_of
from accumlint.trace import Actor, Event, Kind, Role, Trace, Window


@dataclass(frozen=True, slots=True)
class Unsynced:
    """An update on local gradients: the model's last backward of a window, and the event that read the flag while it was off."""

    window: Window
    model: Actor
    backward: Event
    reader: Event


def own_forwards(trace: Trace, backward: Event) -> dict[int, list[Event]]:
    """The forwards behind a backward that went through their wrapper, by the wrapper's uid."""
    found: dict[int, list[Event]] = {}
    for forward in forwards_of(trace, backward):
        if forward.model is not None and not forward.bypass:
            found.setdefault(forward.model.uid, []).append(forward)
    return found


def in_order(window: Window) -> list[Event]:
    """The backwards of a window in the order in which they ran (a window lists them by micro-batch)."""
    return sorted(window.backwards, key=lambda backward: backward.index)


def off_boundary(window: Window) -> list[Event]:
    """The backwards of all micro-batches but the one that the step follows."""
    backwards = in_order(window)
    return [backward for backward in backwards if backward.micro_batch != backwards[-1].micro_batch]


def trains(optimizer: Actor | None, model: Actor) -> bool:
    """Whether the optimizer may hold this model's parameters."""
    return optimizer is None or optimizer.base is None or model.base is None or optimizer.base in {model.uid, model.base}


def unsynced_updates(trace: Trace) -> Iterator[Unsynced]:
    """The windows that end with a model's gradients not synchronised."""
    for window in trace.all_windows():
        last: dict[int, tuple[Event, list[Event]]] = {}
        for backward in in_order(window):
            for uid, forwards in own_forwards(trace, backward).items():
                last[uid] = (backward, forwards)
        for backward, forwards in last.values():
            model = forwards[-1].model
            reader = None if model is None else _reader(model, backward, forwards)
            if model is not None and reader is not None and trains(window.optimizer, model) and not reduced_by_hand(window, backward):
                yield Unsynced(window, model, backward, reader)


def _reader(model: Actor, backward: Event, forwards: list[Event]) -> Event | None:
    if model.wrapper.reads_flag_in_forward and all(forward.sync is False for forward in forwards):
        return forwards[-1]
    if model.wrapper.reads_flag_in_backward and backward.sync is False:
        return backward
    return None


def reduced_by_hand(window: Window, after: Event) -> bool:
    """Whether the gradients are all-reduced by hand between an event and the step, or may be: a call nobody follows gets the parameters."""
    if any(event.index > after.index and "manual" in event.options for event in window.of(Kind.REDUCE)):
        return True
    end = window.step.index if window.step is not None else after.index
    between = (event for event in window.of(Kind.OPAQUE) if after.index < event.index < end)
    return any(target.role in {Role.MODEL, Role.PARAMETERS} for event in between for target in event.targets)


def is_frozen(backward: Event, model: Actor) -> bool:
    """Whether no parameter of the model has got a gradient, so that there was nothing to reduce."""
    return bool(backward.reaches) and not {model.uid, model.base} & backward.reaches


def switch_before(trace: Trace, model: Actor, reader: Event) -> Event | None:
    """The context or flag that switched synchronisation off for this reader."""
    found = None
    for event in trace.of(Kind.SYNC_OFF):
        if event.index < reader.index and (event.model is None or family(event.model) == family(model)):
            found = event
    return found


def second_entries(trace: Trace) -> Iterator[Event]:
    """Every further `accumulate` entry of a micro-batch: each entry moves the counter of its engine."""
    first: dict[tuple[int, str], Event] = {}
    for event in trace.of(Kind.SYNC_OFF, Kind.SYNC_ON):
        if "accumulate" in event.options:
            engine = event.text.partition(".accumulate(")[0] if ".accumulate(" in event.text else ""
            before = first.setdefault((event.micro_batch, engine), event)
            elsewhere = (before.place.line, before.place.column) != (event.place.line, event.place.column)
            if event is not before and (elsewhere or trace.measured) and before.turns == event.turns:
                yield event


def times(trace: Trace) -> str:
    """How often something happens that happens in every micro-batch of a window."""
    k = trace.accumulation
    if k is None or not k.text:
        return "several times"
    return f"{k.text} times" if k.literal else f"`{k.text}` times"
