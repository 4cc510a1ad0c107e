"""A shorter last window steps with its losses divided by K.

## What it does
Reports the division by K where the batches left over at the end of the data are stepped on as well: their window holds
m < K micro-batches, yet each loss is divided by K.

## Why is this bad?
The last update of every epoch is m/K of the size that the mean over its own micro-batches has: with K = 8 and one batch
left over, an eighth. Its samples count less than all others, and with a shuffled loader other samples are hit each epoch.

## Example
```python
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / K
    loss.backward()
    if (i + 1) % K == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, (x, y) in enumerate(loader):
    first = i - i % K
    loss = criterion(model(x), y) / min(K, len(loader) - first)
    loss.backward()
    if (i + 1) % K == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
```

## How it is measured
The coefficients of the last window sum to m/K, those of the others to 1.

## When it is silent
The loader's length is a multiple of K, or the loader drops what is left over; the divisor is the real size of the window
or its number of targets; the framework divides by a fixed K by itself (Accelerate, Lightning's automatic optimisation);
sums of losses; the window ends at a number of samples or tokens.

## References
- <https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import passes
from accumlint.rules._division import (
    Contribution,
    Normalised,
    divides_once,
    ends_its_loader,
    normalised,
    number,
    place_of,
    setting,
    stepping,
    without_term_weights,
)
from accumlint.trace import Trace

LEFT_OUT = "left-out"  # a step that a run did not take


@rule("ACC205", "tail-divided-by-k", Severity.WARNING, measured="coefficients of the last window sum to m/K")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is None or not trace.judges_tail or trace.fact("leaves-out") or trace.fact("windows-by-size"):
        return
    full = trace.accumulation.value
    k = setting(trace)
    sizes = [len({each.backward.micro_batch for each in contributions}) for _, contributions in stepping(trace)]
    if max(sizes, default=0) < min(full, 2) or (trace.measured and full not in sizes):
        return  # every micro-batch steps, one backward spans the window, or no window is whole: no tail is meant
    before: set[int] = set()
    early = _early(trace, full)
    for window, contributions in stepping(trace):
        numbers = {each.backward.micro_batch for each in contributions}
        shared, before = numbers & before, numbers
        if shared:  # another task's step has used this micro-batch already: no tail, but a step too many
            continue
        size = len({each.backward.micro_batch for each in contributions})
        if window.step is not None and LEFT_OUT in window.step.options:
            continue  # the window was given up
        if id(window) in early:
            continue
        if size >= full or not ends_its_loader(trace, contributions[-1].backward) or not all(_fixed(each, full) for each in contributions):
            continue
        last = contributions[-1]
        factor = divides_once(last)
        if factor is None or factor.value is None:
            continue
        yield at(
            "ACC205",
            last.backward,
            f"the last window can have fewer than `{k}` micro-batches, yet `{factor.text or k}` divides their losses: "
            f"with {size} of {full} the update is {number(size / factor.value)} of its size",
            help="divide by the number of micro-batches in this window, or drop what is left over",
            window=window,
            place=place_of(factor, last.backward),
        )


def _early(trace: Trace, full: int) -> set[int]:
    """The windows behind a short one of the same pass: there not the tail is short, but the boundary comes too early."""
    found: set[int] = set()
    short: dict[object, frozenset[tuple[int, int]] | None] = {}  # by optimizer the pass of its last window, if that was short
    for window, contributions in stepping(trace):
        optimizer = window.optimizer.uid if window.optimizer is not None else None
        where = passes(contributions[-1].backward)
        if short.get(optimizer) == where:
            found.add(id(window))
        short[optimizer] = where if len({each.backward.micro_batch for each in contributions}) < full else None
    return found


def _fixed(contribution: Contribution, full: int) -> bool:
    """The loss is divided by K itself, whatever the window holds; a known sum has its own convention."""
    factor = divides_once(contribution)
    if factor is None or factor.value != full:
        return False
    weight = without_term_weights(contribution.weight)
    return normalised(weight) is Normalised.MICRO_BATCH or not weight.known
