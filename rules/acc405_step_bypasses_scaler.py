"""The optimizer steps on gradients that still carry the loss scale.

## What it does
Reports `optimizer.step()` after a scaled backward when neither the scaler nor the code has taken the scale out.

## Why is this bad?
`scaler.step(optimizer)` unscales, looks for infinities and then steps. `optimizer.step()` does none of it: the update is up to 65536
times too large with SGD, and with Adam the scale gets into the second moment and epsilon. A batch that overflows
writes NaN into the weights. torch complains only if `scaler.update()` follows and no other optimizer was unscaled.

## Example
```python
scaler.scale(loss).backward()
optimizer.step()
optimizer.zero_grad()
```
Use instead:
```python
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
optimizer.zero_grad()
```

## How it is measured
The gradients reach the step multiplied by the loss scale.

## When it is silent
The gradients were unscaled before, by the scaler or by hand; a disabled scaler; something that could not be followed was given the
parameters in between.

## References
- https://docs.pytorch.org/docs/stable/amp.html (`GradScaler.step`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._amp import takes_scale_out
from accumlint.rules._order import events_of, same_choice, sureness, works
from accumlint.trace import Actor, Event, Kind, Trace


@rule("ACC405", "step-bypasses-scaler", Severity.ERROR, every_loop=True, measured="gradients reach the step times the loss scale")
def check(trace: Trace) -> Iterator[Finding]:
    for optimizer in trace.optimizers:
        for backward, step in _still_scaled(trace, optimizer):
            confidence = sureness(trace, backward, step, backward.scaler, optimizer)
            name = backward.scaler.name if backward.scaler else "scaler"
            yield at(
                "ACC405",
                step,
                f"`{step.text}` uses gradients that `{backward.text}` left multiplied by the loss scale of `{name}`",
                help=f"step through the scaler: `{name}.step({optimizer.name})`, then `{name}.update()`",
                confidence=confidence if same_choice(backward, step) else Confidence.MEDIUM,
                guilty=(backward, step),
            )


def _still_scaled(trace: Trace, optimizer: Actor) -> Iterator[tuple[Event, Event]]:
    scaled: Event | None = None
    for event in events_of(trace, optimizer):
        if event.kind is Kind.BACKWARD and event.scaled and works(event.scaler):
            scaled = event
        elif event.kind in {Kind.UNSCALE, Kind.ZERO} or (event.kind is Kind.NORMALIZE and takes_scale_out(event)):
            scaled = None
        elif event.kind is Kind.STEP:
            if scaled is not None and event.scaler is None:
                yield scaled, event
            scaled = None
