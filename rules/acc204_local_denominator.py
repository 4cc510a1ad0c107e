"""Each rank divides by its own number of targets, and the ranks are then averaged as if they were equal.

## What it does
Reports a division by the targets of the window that were counted on this rank only, in a model whose wrapper averages
gradients, where the number of targets varies.

## Why is this bad?
Within a rank all targets weigh the same; between ranks they do not. A target on a rank with few valid targets counts more.
It is the mean of means again, over ranks instead of micro-batches.

## Example
```python
targets = sum((y != -100).sum() for _, y in window)
for x, y in window:
    loss = F.cross_entropy(model(x), y, reduction="sum") / targets
    loss.backward()
```
Use instead:
```python
targets = sum((y != -100).sum() for _, y in window)
dist.all_reduce(targets)
for x, y in window:
    loss = F.cross_entropy(model(x), y, reduction="sum") * dist.get_world_size() / targets
    loss.backward()
```

## How it is measured
The coefficients agree within a rank and differ between ranks.

## When it is silent
One rank; the number of targets does not vary; a count per micro-batch (that is ACC201); gradients that are reduced by hand.

## References
- <https://huggingface.co/blog/gradient_accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Normalised, averages, confidence, place_of, stepping, uneven, written
from accumlint.trace import Trace
from accumlint.weight import Quantity


@rule("ACC204", "local-denominator", Severity.ERROR, measured="coefficients equal within a rank, different between ranks")
def check(trace: Trace) -> Iterator[Finding]:
    for window, contributions in stepping(trace):
        if not averages(trace, window):
            continue
        for each in contributions:
            by_own = written(each.weight, Quantity.WINDOW_UNITS)
            if each.normalised is not Normalised.LOCAL_WINDOW or not by_own:
                continue
            if uneven(trace, each.weight) is None and trace.fact("ignored-targets") is None:
                continue
            factor = by_own[-1]
            yield at(
                "ACC204",
                each.backward,
                f"`{factor.text or 'the count'}` holds the targets of this rank only, "
                "yet the gradients are averaged over ranks that have other counts",
                help="sum the count over the ranks and multiply the loss by the world size",
                window=window,
                place=place_of(factor, each.backward),
                confidence=confidence(trace, window),
            )
