"""The number of ranks scales a loss whose gradients are averaged over the ranks anyway.

## What it does
Reports a multiplication or division by the world size of a loss (or its gradients) that is already a mean on every rank,
in a model whose wrapper averages gradients.

## Why is this bad?
DDP and FSDP average the gradients of the ranks: a mean loss needs no further factor. `/ W` makes the update W times too
small, `* W` makes it W times too large, and both change with the number of ranks.

## Example
```python
loss = criterion(model(x), y) / (K * dist.get_world_size())
loss.backward()
```
Use instead:
```python
loss = criterion(model(x), y) / K
loss.backward()
```

## How it is measured
The coefficients, multiplied by the measured factor of the reduction, sum to W or to 1/W.

## When it is silent
A sum divided by the targets of all ranks, which needs `* W`, or by a setting that may be their number; sums with a
convention of their own; gradients that are reduced by hand or by a hook that sums; values that are only logged.

## References
- <https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Contribution, Normalised, averages, place_of, stepping, uneven
from accumlint.trace import Trace
from accumlint.weight import Factor, Quantity

GUESSED = frozenset({"criterion", "function"})


@rule("ACC212", "extra-world-size", Severity.ERROR, measured="coefficients sum to W or 1/W")
def check(trace: Trace) -> Iterator[Finding]:
    for window, contributions in stepping(trace):
        if not averages(trace, window):
            continue
        for each in contributions:
            factor = _surplus(trace, each)
            if factor is None:
                continue
            done = "multiplying" if factor.power > 0 else "dividing"
            yield at(
                "ACC212",
                each.backward,
                f"{done} by `{factor.text or 'the world size'}` is one factor too many: the reduction already averages over the ranks",
                help="leave the factor out",
                window=window,
                place=place_of(factor, each.backward),
                confidence=_confidence(each),
            )


def _confidence(contribution: Contribution) -> Confidence:
    """MEDIUM for a loss that is a mean by its name only: one that its author scales by the batch may well want the factor."""
    guessed = any(factor.implicit and factor.root in GUESSED for factor in contribution.weight.of(Quantity.UNITS))
    return Confidence.MEDIUM if guessed else Confidence.HIGH


def _surplus(trace: Trace, contribution: Contribution) -> Factor | None:
    """The factor of the world size that should not be there."""
    weight = contribution.weight
    power = weight.power(Quantity.WORLD)
    factors = [factor for factor in weight.of(Quantity.WORLD) if not factor.implicit]
    if weight.mixed or power == 0 or not factors:
        return None
    match contribution.normalised:
        case Normalised.MICRO_BATCH:
            wrong = power < 0 or not any(_may_count_all(factor) for factor in weight.factors)
        case Normalised.LOCAL_WINDOW:
            # Otherwise the count that was not summed over the ranks is the mistake.
            wrong = uneven(trace, weight) is None and trace.fact("ignored-targets") is None
        case Normalised.GLOBAL_WINDOW:
            wrong = power != 1
        case _:
            wrong = False
    if not wrong:
        return None
    return next((factor for factor in reversed(factors) if (factor.power > 0) == (power > 0)), None)


def _may_count_all(factor: Factor) -> bool:
    """Whether a loss is divided by a setting, which may be the number of samples of all ranks: `loss.sum() / (global_batch // world)`."""
    return factor.power < 0 and factor.quantity in {Quantity.CONSTANT, Quantity.UNKNOWN} and bool(factor.root)
