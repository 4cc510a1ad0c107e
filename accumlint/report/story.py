"""Which windows tell the story of a finding: its own, and the neighbours that it is to be compared with."""

from __future__ import annotations

from collections.abc import Sequence

from accumlint.findings import Finding
from accumlint.report.timeline import Part
from accumlint.trace import Event, Kind, MicroBatch, Trace, Window


def story(finding: Finding) -> list[Part]:
    """The windows to draw, titled when there are several."""
    if not finding.events:
        return []
    for windows in sequences(finding.trace):
        at = _find(windows, finding.events)
        if at is None:
            continue
        assert finding.trace is not None
        first, last = _reach(windows, at, finding, finding.trace)
        if first == last:
            return [Part(windows[at])]
        return titled(windows[first : last + 1], first)
    return [Part(_loose(finding.events))]


def sequences(trace: Trace | None) -> list[list[Window]]:
    """The windows of each optimizer, with its tail as the last; of all events, where nothing steps."""
    if trace is None:
        return []
    found = []
    for optimizer in trace.optimizers or (None,):
        tail = trace.tail(optimizer)
        found.append([*trace.windows(optimizer), *([tail] if tail else [])])
    return found


def titled(windows: Sequence[Window], first: int) -> list[Part]:
    return [Part(window, f"window {first + at + 1}" if window.step else "tail") for at, window in enumerate(windows)]


def _find(windows: Sequence[Window], events: tuple[Event, ...]) -> int | None:
    first = events[0].index
    return next((at for at, window in enumerate(windows) if any(event.index == first for event in window.events)), None)


def _reach(windows: Sequence[Window], at: int, finding: Finding, trace: Trace) -> tuple[int, int]:
    """From the finding's own window to those that hold another guilty event, make up K micro-batches, or stand before a tail."""
    first = last = at
    for near in (at - 1, at + 1):
        if 0 <= near < len(windows) and any(event.index in finding.guilty for event in windows[near].events):
            first, last = min(first, near), max(last, near)
    if windows[at].step is None and at:
        first = min(first, at - 1)
    wanted = trace.accumulation.value if trace.accumulation else 2
    wanted = min(wanted, 4) if windows[at].step else 0
    while sum(max(window.size, 1) for window in windows[first : last + 1]) < wanted and last + 1 < len(windows):
        last += 1
    return first, last


def _loose(events: tuple[Event, ...]) -> Window:
    """A window of events that belong to none: micro-batches up to the last backward, then the rest."""
    last = max((at for at, event in enumerate(events) if event.kind is Kind.BACKWARD), default=-1)
    groups: dict[int, list[Event]] = {}
    for event in events[: last + 1]:
        groups.setdefault(event.micro_batch, []).append(event)
    step = next((event for event in events[last + 1 :] if event.kind is Kind.STEP), None)
    return Window(None, tuple(MicroBatch(number, tuple(group)) for number, group in groups.items()), events[last + 1 :], step)
