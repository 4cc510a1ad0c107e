"""K mean losses are added up and never divided by K.

## What it does
Reports the backward of a mean loss in a window of K micro-batches when neither the loss nor the gradients are divided
by K (or by the targets of the window) before the optimizer steps.

## Why is this bad?
The gradients of the micro-batches are added. Without a division the update is that of K mean losses: K times the gradient
of the batch that was meant. With SGD this is K times the learning rate; a gradient norm to clip at is reached K times
sooner; an adaptive optimizer hides the factor, save for its epsilon and for terms that do not grow with it, such as a
regulariser added once a window.

## Example
```python
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y)
    loss.backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / args.accum
    loss.backward()
    if (i + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
```

## How it is measured
The upstream gradient that reaches each loss call, times what happened to `.grad` before the step, is added up over the
window: about K instead of 1.

## When it is silent
Losses that are sums; a learning rate that is divided by K instead (`lr=0.2 / k`); losses whose formula could not be followed; engines
and communication hooks that divide; the replay of cached features over the chunks of one batch. A division by the element count of a
scalar, `x.sum() / x.sum().numel()`, is no division. A factor that is a plain number is taken for an intended weight when
it divides. A call that could not be followed and is given K beside the model or the optimizer may divide the gradients.

## References
- <https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import (
    TRUSTED,
    Contribution,
    Normalised,
    accumulating,
    confidence,
    moves_in_window,
    normalised,
    setting,
    without_multipliers,
)
from accumlint.trace import Accumulation, Kind, Trace, Window
from accumlint.weight import Factor, Quantity, Weight

WEIGHS = re.compile(r"lambda|weight|coeff?(?![a-z])|coefficient|(^|[._])(alpha|beta|gamma)|num_(labels|classes)", re.IGNORECASE)
OTHERWISE_RIGHT = ("sum-convention", "engine-divides", "may-divide", "replays-features")


@rule("ACC202", "unnormalised-accumulation", Severity.WARNING, measured="coefficients of the window sum to about K instead of 1")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is None or any(trace.fact(name) for name in OTHERWISE_RIGHT):
        return
    k = setting(trace)
    for window, contributions in accumulating(trace):
        for each in contributions:
            if TRUSTED in each.backward.options or moves_in_window(each, contributions):
                continue  # the loss was to be divided by the count that is handed over: ACC209
            if _undivided(each, trace.accumulation) and not _divided_by_hook(trace, each):
                text = each.backward.text or "the backward"
                yield at(
                    "ACC202",
                    each.backward,
                    f"`{text}` adds a mean loss that nothing divides by `{k}` before the step: "
                    f"the window's gradient is `{k}` times too large",
                    help=f"divide the loss by `{k}`, or the summed losses by the targets of the window",
                    window=window,
                    place=each.backward.in_loop,
                    confidence=Confidence.MEDIUM if _alternates(window) else confidence(trace, window),
                )


def _alternates(window: Window) -> bool:
    """Another optimizer steps on the way: one that is updated more rarely than another may be meant to sum."""
    first, step = window.backwards[0], window.step
    if step is None:
        return False
    between = [event for event in window.of(Kind.STEP) if first.index < event.index < step.index and event.micro_batch < step.micro_batch]
    return any(not event.concerns(window.optimizer) for event in between)


def _undivided(contribution: Contribution, accumulation: Accumulation) -> bool:
    """A mean that nothing divides, or a sum of means of which one is not even weighted by a setting: what divides all would divide it."""
    weight = _without_named_weights(contribution.weight)
    if not weight.mixed and normalised(weight) is Normalised.MICRO_BATCH:
        return _is_whole(weight, accumulation)
    means = [without_multipliers(term.weight) for term in weight.terms]
    if any(normalised(mean) is not Normalised.MICRO_BATCH or _divided_by_k(mean, accumulation) for mean in means):
        return False
    return any(normalised(term.weight) is Normalised.MICRO_BATCH and _is_whole(term.weight, accumulation) for term in weight.terms)


def _without_named_weights(weight: Weight) -> Weight:
    """Less what weighs a loss: a setting of such a name, `loss * args.lambda_mlm`, or what comes with the data, `losses * weights`."""
    kept = tuple(each for each in weight.factors if not (each.power > 0 and (_is_named_weight(each) or _comes_with_data(each))))
    return replace(weight, factors=kept)


def _is_named_weight(factor: Factor) -> bool:
    return factor.root == "setting" and WEIGHS.search(factor.text) is not None


def _comes_with_data(factor: Factor) -> bool:
    return factor.quantity is Quantity.UNKNOWN and bool(factor.of)


def _divided_by_k(weight: Weight, accumulation: Accumulation) -> bool:
    """Whether K is in a weight; the element count of a scalar is 1, whatever K is."""
    return any(factor.value != 1 or factor.root == accumulation.text for factor in weight.of(Quantity.ACCUMULATION))


def _is_whole(weight: Weight, accumulation: Accumulation) -> bool:
    if _divided_by_k(weight, accumulation):
        return False
    summands = [term.weight for term in weight.terms]
    return not all(_made_smaller(each, len(summands)) for each in summands or [weight])


def _made_smaller(weight: Weight, summands: int) -> bool:
    """Whether a plain number below 1 scales a loss, or a summand of it; a weight that other summands do not share is no division by K."""
    # `(start + end) / 2` is the mean of two losses of one micro-batch
    constants = [factor for factor in weight.of(Quantity.CONSTANT) if not (factor.power == -1 and factor.value == summands)]
    return any(factor.power < 0 or (factor.value is not None and factor.value < 1) for factor in constants)


def _divided_by_hook(trace: Trace, contribution: Contribution) -> bool:
    forwards = [event for event in trace.events if event.index in contribution.backward.forwards]
    return any(event.model is not None and "comm-hook" in event.model.options for event in forwards)
