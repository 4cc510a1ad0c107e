"""What the rules on mixed precision share."""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.rules._order import same, works
from accumlint.trace import Actor, Event, Kind, Trace, Window
from accumlint.weight import Quantity

ASKS = re.compile(r"OptState|_per_optimizer_states|\bUNSCALED\b")  # what the scaler remembers of an optimizer


def unscaled_twice(trace: Trace) -> Iterator[tuple[Event, Event, Actor]]:
    """Every unscale of an optimizer that was unscaled before and not updated since: both calls and the optimizer."""
    pending: dict[int, Event] = {}
    for event in trace.of(Kind.UNSCALE, Kind.SCALER_UPDATE):
        if event.kind is Kind.SCALER_UPDATE:
            pending = {uid: first for uid, first in pending.items() if not same(first.scaler, event.scaler)}
            continue
        if not works(event.scaler) or any(ASKS.search(guard.text) for guard in event.guards):
            continue
        for optimizer in event.targets:
            first = pending.setdefault(optimizer.uid, event)
            if first is not event and same(first.scaler, event.scaler):
                yield first, event, optimizer


def takes_scale_out(normalize: Event) -> bool:
    """Whether a scaling of gradients may be an unscale by hand."""
    return normalize.weight is None or bool(normalize.weight.of(Quantity.SCALE, Quantity.UNKNOWN))


def window_with(trace: Trace, optimizer: Actor, event: Event) -> Window | None:
    """The window of an optimizer in which an event happens."""
    return next((window for window in trace.windows(optimizer) if event in window.events), None)
