"""The window is normalised twice.

## What it does
Reports the second of two divisions that each make a mean of the window: K twice by hand, K by hand and by the engine's
own backward, the targets of the window and K, or the targets of the window on top of a loss that is already a mean.

## Why is this bad?
The update is 1/K (or 1/N) of its right size. The loss falls slowly and the learning rate looks too small; where it is
tuned to make up for it, it holds for this K only.

## Example
```python
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
for x, y in loader:
    loss = criterion(engine(x), y) / config["gradient_accumulation_steps"]
    engine.backward(loss)
    engine.step()
```
Use instead:
```python
engine, _, _, _ = deepspeed.initialize(model=model, config=config)
for x, y in loader:
    loss = criterion(engine(x), y)
    engine.backward(loss)
    engine.step()
```

## How it is measured
The coefficients of the window sum to 1/K, or to 1/N, instead of 1.

## When it is silent
A factor undoes one of the two (`loss * K` before an engine that divides); the loss is divided after its backward, for a
log; two divisors that come from different settings; a mean over the tokens of each sequence divided by the number of
sequences; one division that an earlier micro-batch has gone through already, because a branch leaves the loss as it was.

## References
- <https://deepspeed.readthedocs.io/en/latest/training.html#gradient-accumulation>
- <https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation>
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Contribution, Normalised, accumulating, normalised, place_of, setting
from accumlint.trace import Trace
from accumlint.weight import Factor, Quantity, Weight

SHARE = re.compile(r"ratio|weight|alpha|beta|lambda|coef", re.IGNORECASE)
WINDOW_COUNTS = (Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS)


@rule("ACC206", "double-normalised", Severity.ERROR, measured="coefficients of the window sum to 1/K or 1/N of the right value")
def check(trace: Trace) -> Iterator[Finding]:
    k = setting(trace)
    for window, contributions in accumulating(trace):
        for each in contributions:
            pair = _twice(each)
            by_hand = [position for position, factor in enumerate(pair) if not factor.implicit]
            if not by_hand:
                continue
            guilty = pair[by_hand[-1]]
            other = pair[by_hand[-1] - 1]
            yield at(
                "ACC206",
                each.backward,
                f"dividing by `{guilty.text or k}` normalises the window a second time: {_said(other, k)}",
                help="keep one of the two",
                window=window,
                place=place_of(guilty, each.backward),
            )


def _twice(contribution: Contribution) -> tuple[Factor, ...]:
    """The divisions of which one is too many, in order; empty when none is."""
    weight = contribution.weight
    by_k = tuple(factor for factor in contribution.divisions if factor.value != 1)
    net = weight.power(Quantity.ACCUMULATION)
    if net <= -2 and _same_setting(by_k):
        return by_k
    by_count = tuple(factor for factor in weight.of(*WINDOW_COUNTS) if factor.power < 0)
    if net == 0 and len(by_count) == 2 and sum(weight.power(count) for count in WINDOW_COUNTS) == -2 and _same_setting(by_count):
        return by_count
    if net == -1 and by_k and contribution.normalised in {Normalised.LOCAL_WINDOW, Normalised.GLOBAL_WINDOW}:
        return tuple(factor for factor in weight.factors if factor in by_k or factor in by_count)
    if normalised(_without_shares(weight)) is Normalised.TWICE:
        means = tuple(factor for factor in weight.of(Quantity.UNITS) if factor.implicit)
        return means + by_count
    return ()


def _without_shares(weight: Weight) -> Weight:
    """Less the settings that say how much a term counts, `1 - self.kd_ratio`: the same number for every micro-batch, and no count."""
    kept = (one for one in weight.factors if not (one.quantity is Quantity.UNKNOWN and one.root == "setting" and SHARE.search(one.text)))
    return replace(weight, factors=tuple(kept))


def _same_setting(factors: tuple[Factor, ...]) -> bool:
    """Two settings (`/ accum / tasks`) are two intentions, even where a rehearsal gives them the same number."""
    roots = {factor.root for factor in factors if factor.root}
    places = {factor.place for factor in factors if factor.place is not None}
    once = len(places) == 1 and not any(factor.implicit for factor in factors)  # one line, gone through again by what an earlier turn left
    return len(factors) >= 2 and len({factor.value for factor in factors}) == 1 and len(roots) <= 1 and not once


def _said(other: Factor, k: str) -> str:
    if other.quantity is Quantity.ACCUMULATION:
        return f"the framework already divides by `{other.text or k}`" if other.implicit else f"`{other.text or k}` already divides it"
    if other.quantity is Quantity.UNITS:
        return f"`{other.text or 'the loss'}` is already a mean"
    return f"`{other.text or 'the number of targets'}` already divides it"
