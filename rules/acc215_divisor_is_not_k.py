"""The loop accumulates over one count and divides by another.

## What it does
Reports a division of the loss by a variable or setting that is not the number of micro-batches that the loop accumulates: another
setting, a number that changes from one micro-batch to the next (`loss / (micro_step + 1)`), or K where the test lets K + 1 or K - 1 of them
into every window (`count > K`, `count == K - 1` on a counter of those done).

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
The coefficients of the window sum to K/k' instead of 1, and to the same value in every window. A divisor that
changes within the window is not told from weights of the objective's own.

## When it is silent
The two are provably equal; the divisor is the real size of the window; the framework divides; sums of losses; a number or
setting whose name does not say that it counts micro-batches: it may be a weight, a temperature or a number of tasks.

## References
- <https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation>
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import gate_of
from accumlint.rules._division import (
    Contribution,
    Normalised,
    accumulating,
    divides_once,
    moves_in_window,
    number,
    place_of,
    setting,
    stepping,
    written,
)
from accumlint.trace import Accumulation, Trace, Window
from accumlint.weight import Factor, Quantity, Weight

# A division by any other number is a weight, a temperature or the number of tasks.
COUNTS_MICRO_BATCHES = re.compile(
    r"accum|grad_acc|micro|update_(freq|interval)|(batch|mega)_(factor|split|chunks)|iter_size|subdivisions", re.IGNORECASE
)


@rule(
    "ACC215",
    "divisor-is-not-k",
    Severity.ERROR,
    measured="coefficients of the window sum to a constant other than 1",
    exception="a divisor that changes within the window looks in a run like weights of the objective's own",
)
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is None or trace.fact("engine-divides"):
        return
    yield from _one_too_many(trace, trace.accumulation)
    yield from _one_too_few(trace, trace.accumulation)
    k = setting(trace)
    for window, contributions in accumulating(trace):
        if len({each.backward.micro_batch for each in contributions}) != trace.accumulation.value:
            continue  # a window of another size has another rule
        for each in contributions:
            factor = moves_in_window(each, contributions) or _foreign(each, trace.accumulation)
            if factor is None:
                continue
            message = f"the loop accumulates `{k}` micro-batches, but `{factor.text}` divides the loss"
            if k == factor.text:  # a run has counted others than the source says
                k, of = str(trace.accumulation.value), f", which is {number(factor.value)}," if factor.value is not None else ""
                message = f"each window has {k} micro-batches, but `{factor.text}`{of} divides the loss"
            yield _finding(each, factor, window, message, f"divide by `{k}`")


def _finding(contribution: Contribution, divisor: Factor, window: Window, message: str, remedy: str) -> Finding:
    return at(
        "ACC215",
        contribution.backward,
        message,
        help=remedy,
        window=window,
        place=place_of(divisor, contribution.backward),
        confidence=Confidence.HIGH if _followed(contribution.weight) else Confidence.MEDIUM,
    )


def _one_too_many(trace: Trace, accumulation: Accumulation) -> Iterator[Finding]:
    """`if count > k:` closes every window one micro-batch late, while k divides."""
    windows = list(accumulating(trace))
    if any(len({each.backward.micro_batch for each in found}) != accumulation.value + 1 for _, found in windows):
        return
    for window, found in windows:
        gate = gate_of(window.step) if window.step is not None else None
        if gate is None or not re.search(rf"> *{re.escape(accumulation.text)}(?!\w|\.|\s*[-+*/])", gate.text):
            return
        for each in found:
            factor = divides_once(each)
            if factor is not None and factor.value == accumulation.value:
                message = f"`{gate.text}` lets one micro-batch more into every window than `{factor.text}`, which divides the loss"
                yield _finding(each, factor, window, message, f"close the window at `>= {accumulation.text}`")


def _one_too_few(trace: Trace, accumulation: Accumulation) -> Iterator[Finding]:
    """`if count == k - 1:` on a counter of those done closes every window one micro-batch early, while k divides."""
    windows = list(stepping(trace))
    sizes = {len({each.backward.micro_batch for each in found}) for _, found in windows}
    if len(windows) < 2 or sizes != {accumulation.value - 1}:
        return
    for window, found in windows:
        gate = gate_of(window.step) if window.step is not None else None
        if gate is None or accumulation.text not in gate.text:
            return
        for each in found:
            factor = divides_once(each)
            if factor is not None and factor.value == accumulation.value and factor.root == accumulation.text:
                message = f"`{gate.text}` closes every window one micro-batch before `{factor.text}`, which divides the loss"
                yield _finding(each, factor, window, message, "compare the number of those done with what divides")


def _foreign(contribution: Contribution, accumulation: Accumulation) -> Factor | None:
    """The one division that should be by K and is by something else."""
    if contribution.normalised is not Normalised.MICRO_BATCH and _followed(contribution.weight):
        return None
    factor = divides_once(contribution)
    if factor is not None:
        other = factor.value not in {None, 1, accumulation.value} and factor.text
        return factor if other else None
    if contribution.weight.of(Quantity.ACCUMULATION):
        return None
    divisors = written(contribution.weight, Quantity.CONSTANT, Quantity.UNKNOWN)
    named = [each for each in divisors if COUNTS_MICRO_BATCHES.search(_name(each))]
    return named[0] if len(named) == 1 and accumulation.text not in {named[0].root, named[0].text} else None


def _followed(weight: Weight) -> bool:
    return weight.known and not weight.of(Quantity.UNKNOWN)


def _name(factor: Factor) -> str:
    return factor.root or factor.text
