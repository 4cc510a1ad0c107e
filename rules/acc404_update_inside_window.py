"""The scaler is updated while a window still collects scaled gradients.

## What it does
Reports a `scaler.update()` between two scaled backwards of one window, or between the last of them and its step.

## Why is this bad?
`update` may change the loss scale: it halves it after an overflow and doubles it after many good steps. Gradients
that were added before then carry another scale than those added after, and the one division at the step is wrong for a part
of them. It also clears the scaler's notes, so gradients that were unscaled already are divided again. With one scaler
for two optimizers the update belongs behind the steps of both.

## Example
```python
for i, (x, y) in enumerate(loader):
    scaler.scale(criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
```
Use instead:
```python
for i, (x, y) in enumerate(loader):
    scaler.scale(criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
```

## How it is measured
An update of the scaler on a micro-batch that is not the window's last.

## When it is silent
`update(new_scale)` with a scale of the caller's own; a disabled scaler.

## References
- https://docs.pytorch.org/docs/stable/amp.html (`GradScaler.update`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._amp import window_with
from accumlint.rules._order import events_of, same, works
from accumlint.trace import Actor, Event, Kind, Trace


@rule("ACC404", "update-inside-window", Severity.ERROR, measured="an update of the scaler off the boundary")
def check(trace: Trace) -> Iterator[Finding]:
    for optimizer in trace.optimizers:
        for update, then in _inside(trace, optimizer):
            after = "the window's step" if then.kind is Kind.STEP else "the window's next backward"
            yield at(
                "ACC404",
                update,
                f"`{update.text}` comes before {after}, `{then.text}`: the gradients that `{optimizer.name}` has collected so far "
                f"carry the old loss scale",
                help="update the scaler once a window, after every optimizer's step",
                window=window_with(trace, optimizer, update),
                guilty=(update, then),
            )


def _inside(trace: Trace, optimizer: Actor) -> Iterator[tuple[Event, Event]]:
    """Updates that find scaled gradients waiting, with the backward or step that comes next."""
    scaled: Event | None = None
    update: Event | None = None
    for event in events_of(trace, optimizer):
        if event.kind is Kind.SCALER_UPDATE:
            if scaled is not None and works(event.scaler) and same(scaled.scaler, event.scaler) and "new-scale" not in event.options:
                update = event
        elif event.kind is Kind.BACKWARD and event.scaled:
            if update is not None:
                yield update, event
            scaled, update = event, None
        elif event.kind is Kind.STEP:
            if update is not None and works(event.scaler) and same(update.scaler, event.scaler):
                yield update, event
            scaled, update = None, None
        elif event.kind is Kind.ZERO:
            scaled, update = None, None
