"""The loss that is logged was divided by K before.

## What it does
Notes a loss that is divided by K under its own name and then printed or logged, with no multiplication by K.

## Why is this bad?
The training is right, the curve is not: it shows 1/K of the loss of one micro-batch. Runs with different K cannot be compared, and a
change of K in the middle of a run looks like progress. It is also one micro-batch's loss where the window's mean was meant.

## Example
```python
loss = criterion(model(x), y) / accum_steps
loss.backward()
print(loss.item())
```
Use instead:
```python
loss = criterion(model(x), y)
(loss / accum_steps).backward()
window_loss += loss.detach() / accum_steps
```
and log `window_loss` at the boundary.

## How it is measured
Not: a run does not see what is logged.

## When it is silent
- The logged value is multiplied by K.
- It is summed over the window under another name.

## References
- https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Kind, Trace

NEAR = 60  # lines after the backward


@rule("ACC214", "logged-loss-scale", Severity.INFO, exception="a run does not see what is logged")
def check(trace: Trace) -> Iterator[Finding]:
    if not any(window.size >= 2 for window in trace.all_windows()):
        return
    lines = {event.place.line for event in trace.of(Kind.BACKWARD)}
    for evidence in trace.facts.get("logs-a-fraction", ()):
        if any(0 <= evidence.place.line - line < NEAR for line in lines):
            yield Finding(
                "ACC214",
                evidence.place,
                f"`{evidence.text}` was divided by K: what is logged is a fraction of one micro-batch's loss.",
                help="log the loss before the division, summed or averaged over the window",
            )
