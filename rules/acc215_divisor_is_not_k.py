"""The loop accumulates over one count and divides by another.

## What it does
Reports a division of the loss by a variable or setting that is not the number of micro-batches that the loop accumulates.

## Why is this bad?
The update is K/k' times its right size, where k' is the divisor. As long as the two settings agree nothing shows; the
first configuration that sets them apart changes the size of every update.

## Example
```python
for k in range(cfg.micro_batches):
    loss = criterion(model(x[k]), y[k]) / cfg.accumulation_steps
    loss.backward()
optimizer.step()
```
Use instead:
```python
for k in range(cfg.micro_batches):
    loss = criterion(model(x[k]), y[k]) / cfg.micro_batches
    loss.backward()
optimizer.step()
```

## How it is measured
The coefficients of the window sum to K/k' instead of 1, and to the same value in every window.

## When it is silent
The two are provably equal; the divisor is the real size of the window; the framework divides; sums of losses; a plain
number, which may be a weight.

## References
- <https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.rules._division import Contribution, Normalised, accumulating, divides_once, place_of, setting

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Trace
from accumlint.weight import Factor


@rule("ACC215", "divisor-is-not-k", Severity.ERROR, measured="coefficients of the window sum to a constant other than 1")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is None or trace.fact("engine-divides"):
        return
    k = setting(trace)
    for window, contributions in accumulating(trace):
        if len({each.backward.micro_batch for each in contributions}) != trace.accumulation.value:
            continue  # a window of another size has another rule
        for each in contributions:
            factor = _foreign(each, trace.accumulation.value)
            if factor is None:
                continue
            yield at(
                "ACC215",
                each.backward,
                f"the loop accumulates `{k}` micro-batches, but `{factor.text}` divides the loss",
                help=f"divide by `{k}`",
                window=window,
                place=place_of(factor, each.backward),
                confidence=Confidence.HIGH if each.weight.known else Confidence.MEDIUM,
            )


def _foreign(contribution: Contribution, k: int) -> Factor | None:
    factor = divides_once(contribution)
    if factor is None or factor.value is None or factor.value == k or not factor.text:
        return None
    means = contribution.normalised is Normalised.MICRO_BATCH or not contribution.weight.known
    return factor if means else None
