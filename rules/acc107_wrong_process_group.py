"""The loss is scaled for all ranks, but the gradients are averaged over a process group of their own.

## What it does
Reports a factor of the global world size in a loss whose wrapper was given a `process_group`, and a count of targets that was reduced over
other ranks than those that average the gradients.

## Why is this bad?
DDP divides by the size G of its own group, not by the number W of all ranks. `* W` on a loss that is divided by the group's targets makes
the update W/G times too large; targets summed over all ranks with a factor of G make it too small. In a run where the group holds everybody
the numbers agree, so the mistake shows only once tensor or pipeline parallelism is switched on.

## Example
```python
model = DistributedDataParallel(model, process_group=dp_group)
dist.all_reduce(targets, group=dp_group)
loss = loss_sum * dist.get_world_size() / targets
```
Use instead:
```python
model = DistributedDataParallel(model, process_group=dp_group)
dist.all_reduce(targets, group=dp_group)
loss = loss_sum * dist.get_world_size(dp_group) / targets
```

## How it is measured
By the product of the factor in the loss and that of the reduction, which a run measures; what is too much or too little in it is
reported as ACC203 or ACC212, since a run does not tell which group a number was meant for.

## When it is silent
- The group is that of all ranks (`None`, `dist.group.WORLD`, `new_group()` without ranks).
- Both the factor and the count are of all ranks: where every group sees the same number of targets, they undo each other.
- What a group is cannot be told.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Contribution, averages, confidence, place_of, stepping
from accumlint.trace import Kind, Trace, Window
from accumlint.weight import Factor, Quantity


@rule(
    "ACC107",
    "wrong-process-group",
    Severity.ERROR,
    exception="a run measures the product of the loss's factor and the reduction's: what is too much in it is ACC203's or ACC212's",
)
def check(trace: Trace) -> Iterator[Finding]:
    for window, contributions in stepping(trace):
        if not averages(trace, window):
            continue
        own = _has_own_group(window)
        for each in contributions:
            factor = _of_others(each, own)
            if factor is None:
                continue
            over = "a process group of its own" if own else "all ranks"
            yield at(
                "ACC107",
                each.backward,
                f"`{factor.text}` counts other ranks than those that average the gradients: the model is reduced over {over}.",
                help="take the number of ranks and the targets of the wrapper's process group",
                window=window,
                place=place_of(factor, each.backward),
                confidence=confidence(trace, window),
            )


def _has_own_group(window: Window) -> bool:
    models = [event.model for event in window.of(Kind.FORWARD) if event.model is not None]
    return any("process_group" in model.options for model in models)


def _of_others(contribution: Contribution, own: bool) -> Factor | None:
    """The factor that is of other ranks than the wrapper's, where the other factor is not of the same ranks."""
    right, wrong = ("own", "all") if own else ("all", "own")
    weight = contribution.weight
    worlds = [factor for factor in weight.of(Quantity.WORLD) if not factor.implicit]
    counts = list(weight.of(Quantity.GLOBAL_UNITS))
    if weight.mixed or len(worlds) > 1 or len(counts) != 1:
        return None
    if worlds and worlds[0].group == wrong and counts[0].group == right:
        return worlds[0]
    if counts[0].group == wrong and worlds and worlds[0].group == right:
        return counts[0]
    return None
