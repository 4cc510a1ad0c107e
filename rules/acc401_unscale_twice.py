"""The gradients of one optimizer are unscaled twice before the scaler's update.

## What it does
Reports a second `scaler.unscale_(optimizer)` with no `scaler.update()` between it and the first, in whichever way the calls are
reached: in a helper, or in `accelerator.clip_grad_norm_`, which unscales every prepared optimizer.

## Why is this bad?
Unscaling divides `.grad` by the loss scale in place. torch keeps a note of it and raises
`unscale_() has already been called on this optimizer since the last update()` at the second call. In an accumulation
loop this is what happens when unscale and clip stand beside the backward and not beside the step.

## Example
```python
for i, (x, y) in enumerate(loader):
    scaler.scale(criterion(model(x), y) / accumulation_steps).backward()
    scaler.unscale_(optimizer)
    if (i + 1) % accumulation_steps == 0:
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
```
Use instead:
```python
for i, (x, y) in enumerate(loader):
    scaler.scale(criterion(model(x), y) / accumulation_steps).backward()
    if (i + 1) % accumulation_steps == 0:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
```

## How it is measured
The second call is seen before torch raises.

## When it is silent
Two optimizers unscaled once each; a disabled scaler; a call that asks the scaler first whether it has unscaled already.

## References
- https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._amp import unscaled_twice
from accumlint.rules._order import sureness
from accumlint.trace import Trace


@rule("ACC401", "unscale-twice", Severity.ERROR, every_loop=True, measured="a second unscale before the scaler's update")
def check(trace: Trace) -> Iterator[Finding]:
    for first, second, optimizer in unscaled_twice(trace):
        again = "once more" if first.place == second.place else f"after `{first.text}`"
        yield at(
            "ACC401",
            second,
            f"`{second.text}` unscales the gradients of `{optimizer.name}` {again} before the scaler's update: torch raises here",
            help="unscale once an update, right before the clip and the step",
            confidence=sureness(trace, first, second, second.scaler),
            guilty=(first, second),
        )
