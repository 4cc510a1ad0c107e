"""Gradients are unscaled inside the window, and scaled gradients are added on top.

## What it does
Reports an unscale after which a further scaled backward of the same window adds to the same gradients.

## Why is this bad?
`unscale_` divides what is in `.grad` by the scale, once, in place. The gradients of the following micro-batches come with the full
scale on top of it, so the sum mixes two units that differ by a factor of up to 65536. The step then either
takes the sum as already unscaled, and is thousands of times too large, or divides the first part twice. torch does not
notice: its note says that the optimizer was unscaled.

## Example
```python
for micro, (x, y) in enumerate(window):
    scaler.scale(criterion(model(x), y) / len(window)).backward()
    if micro == 0:
        scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
```
Use instead:
```python
for x, y in window:
    scaler.scale(criterion(model(x), y) / len(window)).backward()
scaler.unscale_(optimizer)
scaler.step(optimizer)
scaler.update()
```

## How it is measured
An unscale on a micro-batch that is not the window's last, followed by a scaled backward.

## When it is silent
The gradients are cleared between the two, as after a probe; ACC401 already reports the line; apex, which unscales within each
`scale_loss` block by itself.

## References
- https://docs.pytorch.org/docs/stable/notes/amp_examples.html (gradient accumulation)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._amp import unscaled_twice, window_with
from accumlint.rules._order import events_of, same, works
from accumlint.trace import Actor, Event, Kind, Trace


@rule("ACC402", "unscale-inside-window", Severity.ERROR, measured="a scaled backward after the unscale of the same window")
def check(trace: Trace) -> Iterator[Finding]:
    said = {second.place for _, second, _ in unscaled_twice(trace)}
    for optimizer in trace.optimizers:
        for unscale, backward in _mixed(trace, optimizer):
            if unscale.place not in said:
                yield at(
                    "ACC402",
                    unscale,
                    f"`{unscale.text}` divides the gradients of `{optimizer.name}` by the loss scale inside the window, "
                    f"and `{backward.text}` adds scaled ones on top",
                    help="unscale after the window's last backward, right before the step",
                    window=window_with(trace, optimizer, unscale),
                    guilty=(unscale, backward),
                )


def _mixed(trace: Trace, optimizer: Actor) -> Iterator[tuple[Event, Event]]:
    unscale: Event | None = None
    filled = False
    for event in events_of(trace, optimizer):
        if event.kind in {Kind.STEP, Kind.ZERO}:
            unscale, filled = None, False
        elif event.kind is Kind.BACKWARD and event.scaled:
            if unscale is not None and same(unscale.scaler, event.scaler):
                yield unscale, event
                unscale = None
            filled = True
        elif event.kind is Kind.UNSCALE and filled and event.targets and works(event.scaler):
            unscale = event
