"""The loss is not scaled, but the step goes through the scaler.

## What it does
Reports a backward of an unscaled loss whose gradients are stepped with `scaler.step(optimizer)`.

## Why is this bad?
The scaler divides `.grad` by the loss scale before the step. Gradients that never carried it come out up to 65536 times
too small; with SGD the model stands still, with Adam epsilon takes over. A window in which only one of several losses is scaled
loses the others. torch raises only if nothing at all was ever scaled.

## Example
```python
loss = criterion(model(x), y)
loss.backward()
scaler.step(optimizer)
scaler.update()
```
Use instead:
```python
loss = criterion(model(x), y)
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
```

## How it is measured
The coefficients of that backward are 1/S of the right ones at the step.

## When it is silent
A disabled scaler; a loss multiplied by the scale by hand; a backward whose gradients are cleared before the step.

## References
- https://docs.pytorch.org/docs/stable/amp.html (`GradScaler.scale`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._order import events_of, same_choice, sureness, works
from accumlint.trace import Actor, Event, Kind, Trace
from accumlint.weight import Quantity


@rule("ACC406", "backward-unscaled", Severity.ERROR, every_loop=True, measured="coefficients of 1/S of the right ones")
def check(trace: Trace) -> Iterator[Finding]:
    for optimizer in trace.optimizers:
        for backward, step in _unscaled(trace, optimizer):
            scaler = step.scaler
            confidence = sureness(trace, trace.events[0], step, scaler)
            if not backward.forwards:
                confidence = Confidence.MEDIUM  # it may end at cached representations, short of the parameters
            yield at(
                "ACC406",
                backward,
                f"`{backward.text}` runs on an unscaled loss, but `{step.text}` divides its gradients by the loss scale",
                help=f"run the backward on `{scaler.name if scaler else 'scaler'}.scale(loss)`",
                confidence=confidence if same_choice(backward, step) else Confidence.MEDIUM,
                guilty=(backward, step),
            )


def _unscaled(trace: Trace, optimizer: Actor) -> Iterator[tuple[Event, Event]]:
    waiting: list[Event] = []
    for event in events_of(trace, optimizer):
        if event.kind is Kind.BACKWARD and event.scaled is False and not _scaled_otherwise(event):
            waiting.append(event)
        elif event.kind is Kind.ZERO:
            waiting = []
        elif event.kind is Kind.STEP:
            if works(event.scaler):
                for backward in waiting:
                    yield backward, event
            waiting = []


def _scaled_otherwise(event: Event) -> bool:
    """By hand, by an engine, by apex's own context, or a gradient that is passed on as it came."""
    if event.options & {"engine", "scale-loss", "replay"} or ".scale(" in event.text:
        return True
    return event.weight is not None and bool(event.weight.of(Quantity.SCALE))
