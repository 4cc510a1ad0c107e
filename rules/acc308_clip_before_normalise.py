"""Gradients are clipped before they are divided by the window's count.

## What it does
Finds a clip between the window's last backward and a scaling of `.grad` by a count (K, the number of targets, the number of ranks) that
only comes afterwards.

## Why is this bad?
`max_norm` then bounds the norm of a sum that grows with the number of targets. The clip is active in nearly every window, and the division
shrinks what it left once more: the update's length is about `max_norm / N` instead of at most `max_norm`, so the effective learning rate
falls with the size of the window.

## Example
```python
clip_grad_norm_(model.parameters(), 1.0)
for p in model.parameters():
    p.grad.div_(num_tokens)
optimizer.step()
```
Use instead:
```python
for p in model.parameters():
    p.grad.div_(num_tokens)
clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
```

## How it is measured
The norm that the clip saw differs from the norm of the gradient after the division, by the factor of the division.

## When it is silent
- The gradient is scaled by a plain number, or by a factor that is 1.
- `max_norm` carries the same count (`max_norm * num_tokens`), or is infinite, so that the call only measures.
- A further backward comes between the two (ACC304 speaks of that clip).

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Event, Kind, Trace, Window
from accumlint.weight import Factor, Quantity

PLAIN = {Quantity.CONSTANT, Quantity.SCALE}
NAME = re.compile(r"[A-Za-z_]\w*\b(?!\s*[.(])")  # the last part of a dotted name, no function
INFINITE = re.compile(r"\binf\b|\binfinity\b", re.IGNORECASE)


@rule("ACC308", "clip-before-normalise", Severity.ERROR, measured="the norm that was clipped is not the norm of the normalised gradient")
def check(trace: Trace) -> Iterator[Finding]:
    boundaries = Boundaries.of(trace)
    for window in trace.all_windows():
        for scaling in window.of(Kind.NORMALIZE):
            if boundaries.acts_on(scaling, window.optimizer):
                yield from _clips_before(boundaries, window, scaling)


def _clips_before(boundaries: Boundaries, window: Window, scaling: Event) -> Iterator[Finding]:
    counts = _counts(scaling)
    if counts == () or _cancels(scaling):
        return
    after_last_backward = max((one.index for one in window.backwards if one.index < scaling.index), default=-1)
    for clip in window.of(Kind.CLIP):
        if not after_last_backward < clip.index < scaling.index or not boundaries.acts_on(clip, window.optimizer):
            continue
        if INFINITE.search(clip.text) or _bound_carries(clip, counts or ()):
            continue
        yield at(
            "ACC308",
            clip,
            f"`{clip.text}` bounds the norm of a gradient that `{scaling.text}` in {scaling.place.spoken} only normalises afterwards",
            help="normalise the gradient first, then clip it",
            window=window,
            guilty=(clip, scaling),
            confidence=Confidence.MEDIUM if counts is None else boundaries.confidence(window.optimizer, after_last_backward, scaling.index),
        )


def _counts(scaling: Event) -> tuple[Factor, ...] | None:
    """The factors that count something; None where the operand is not known to be a count, () where it is a plain number."""
    if scaling.weight is None or not scaling.weight.factors:
        return None
    telling = tuple(factor for factor in scaling.weight.factors if factor.quantity not in PLAIN)
    if telling and all(factor.quantity is Quantity.UNKNOWN for factor in telling):
        return None
    return telling


def _cancels(scaling: Event) -> bool:
    return scaling.weight is not None and bool(scaling.weight.factors) and scaling.weight.value() == 1


def _bound_carries(clip: Event, counts: tuple[Factor, ...]) -> bool:
    """Whether the bound itself is multiplied by the count."""
    names = {name for factor in counts for name in NAME.findall(factor.text)}
    return bool(names & set(NAME.findall(clip.text)))
