"""A loss is divided by the targets of all ranks, and the averaging over ranks divides once more.

## What it does
Reports a division of the summed loss by a count that was reduced over the ranks, in a model whose wrapper averages
gradients, when nothing multiplies by the number of ranks.

## Why is this bad?
DDP and FSDP divide the summed gradient by the number of ranks W. With the global count N in the denominator already, every
target enters with 1/(WN): the learning rate falls with each rank that is added.

## Example
```python
dist.all_reduce(targets)
for batch in window:
    loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum") / targets
    loss.backward()
```
Use instead:
```python
dist.all_reduce(targets)
for batch in window:
    loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum") * dist.get_world_size() / targets
    loss.backward()
```

## How it is measured
The coefficients of the window, summed over ranks and multiplied by the measured factor of the reduction, give 1/W.

## When it is silent
Averaging is switched off (`set_gradient_divide_factor(1)`, a communication hook that sums, a reduction by hand); the
gradients are multiplied by W later; the wrapper is not seen.

## References
- <https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>
- <https://huggingface.co/blog/gradient_accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Normalised, averages, confidence, place_of, stepping, written
from accumlint.trace import Trace
from accumlint.weight import Quantity


@rule("ACC203", "missing-world-size", Severity.ERROR, measured="coefficients sum to 1/W")
def check(trace: Trace) -> Iterator[Finding]:
    for window, contributions in stepping(trace):
        if not averages(trace, window):
            continue
        for each in contributions:
            by_all = written(each.weight, Quantity.GLOBAL_UNITS)
            if each.normalised is not Normalised.GLOBAL_WINDOW or each.weight.of(Quantity.WORLD) or not by_all:
                continue
            factor = by_all[-1]
            yield at(
                "ACC203",
                each.backward,
                f"`{factor.text or 'the count'}` is the number of targets of all ranks, "
                "and averaging the gradients divides by the number of ranks again",
                help="multiply by the world size of the group that averages",
                window=window,
                place=place_of(factor, each.backward),
                confidence=confidence(trace, window),
            )
