"""A loss is divided by a number of targets that can be zero.

## What it does
Reports an explicit division of the loss or the gradients by a count of targets, with no `clamp`, `max` or `if`, where the
source filters or masks targets so that none may be left.

## Why is this bad?
A micro-batch or window without a valid target gives 0/0. The NaN reaches every parameter with the step, and on one rank it
is enough: the reduction spreads it to all.

## Example
```python
valid = labels != -100
loss = (nll * valid).sum() / valid.sum()
(loss / K).backward()
```
Use instead:
```python
valid = labels != -100
loss = (nll * valid).sum() / valid.sum().clamp(min=1)
(loss / K).backward()
```

## How it is measured
A micro-batch or a window without targets is seen, or a NaN that comes from it: only if that happens in the updates that are run.

## When it is silent
A clamp, a maximum or a condition guards the division; the mask always keeps a target; the mean is that of a loss function.

## References
- <https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import place_of, stepping, written
from accumlint.trace import Trace
from accumlint.weight import Quantity

COUNTS = (Quantity.UNITS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS)


@rule(
    "ACC208",
    "unguarded-zero-denominator",
    Severity.WARNING,
    measured="a micro-batch or window without targets, or a NaN from it",
    exception="a run shows it only if some micro-batch or window of that run really has no targets",
)
def check(trace: Trace) -> Iterator[Finding]:
    evidence = trace.fact("may-lose-targets")
    if evidence is None:
        return
    for window, contributions in stepping(trace):
        for each in contributions:
            for factor in written(each.weight, *COUNTS):
                if factor.guarded:
                    continue
                yield at(
                    "ACC208",
                    each.backward,
                    f"`{factor.text or 'the count'}` can be zero ({evidence.text or 'targets are filtered'}), and then the loss is NaN",
                    help="clamp the count to at least 1",
                    window=window,
                    place=place_of(factor, each.backward),
                )
