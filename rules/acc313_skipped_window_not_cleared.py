"""A window whose step is skipped leaves its gradients to the next one.

## What it does
Finds a condition on data (a gradient norm that is not finite, an overflow, an exception) under which neither the step nor the zeroing of
the gradients runs.

## Why is this bad?
The gradients that were found unfit stay in `.grad`, and the next window adds to them. A NaN stays one whatever is added to it: every later
norm is not finite either, and the model is never updated again, while the loss goes on being printed.

## Example
```python
norm = clip_grad_norm_(model.parameters(), 1.0)
if torch.isfinite(norm):
    optimizer.step()
    optimizer.zero_grad()
```
Use instead:
```python
norm = clip_grad_norm_(model.parameters(), 1.0)
if torch.isfinite(norm):
    optimizer.step()
optimizer.zero_grad()
```

## How it is measured
A window without a step whose gradients are still there at the next window's first backward.

## When it is silent
- The skipping branch zeroes the gradients itself, the same condition did so before, or the next window does so before its first
  backward.
- The branch raises or ends the loop.
- No step of the loop is followed by a zero (ACC303 says that).

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Event, Kind, Trace, Window

GOES_ON = {"continue", "branch", "except"}
CHOSEN = {"gate", "setting"}


@rule("ACC313", "skipped-window-not-cleared", Severity.ERROR, measured="gradients of a window without a step are present in the next one")
def check(trace: Trace) -> Iterator[Finding]:
    boundaries = Boundaries.of(trace)
    for window in trace.all_windows():
        for skip in window.of(Kind.SKIP):
            if _loses_step(window, skip) and not _is_the_boundary(trace, skip) and not _cleared(boundaries, trace, window, skip):
                what = f"`{skip.guard.text}`" if skip.guard else "this skip"
                yield at(
                    "ACC313",
                    skip,
                    f"{what} leaves out the step and the zeroing, so the gradients that were found unfit stay in the next window",
                    help="zero the gradients on the skipping path as well",
                    window=window,
                    confidence=boundaries.confidence(window.optimizer, skip.index, _next_backward(trace, skip)),
                )


def _loses_step(window: Window, skip: Event) -> bool:
    """Whether the skip comes after the window's last backward and leaves out its step and a zero, but goes on."""
    if window.step is None or skip.index > window.step.index or any(one.index > skip.index for one in window.backwards):
        return False
    if (skip.guard is not None and skip.guard.cause in CHOSEN) or "presence" in skip.options:
        return False
    return skip.leaves in GOES_ON and {Kind.STEP, Kind.ZERO} <= skip.skipped


def _is_the_boundary(trace: Trace, skip: Event) -> bool:
    """Whether the condition is met after every backward: then it is the boundary's own test, which was not understood."""
    asked = {one.micro_batch for one in trace.of(Kind.SKIP) if one.place == skip.place}
    trained = {one.micro_batch for one in trace.of(Kind.BACKWARD)}
    return len(asked) * 3 > len(trained) * 2


def _cleared(boundaries: Boundaries, trace: Trace, window: Window, skip: Event) -> bool:
    """Whether some zero before the next backward is outside what the skip leaves out."""
    if "zeroes" in skip.options or _cleared_before(trace, skip):
        return True
    end = _next_backward(trace, skip)
    zeros = [one for one in trace.of(Kind.ZERO) if skip.index < one.index < end and boundaries.acts_on(one, window.optimizer)]
    if not zeros or any(one.turns != skip.turns for one in zeros):
        return True
    inside = [skip.guard is not None and any(guard.place == skip.guard.place for guard in one.guards) for one in zeros]
    return skip.leaves == "branch" and any(inside) and not all(inside)


def _cleared_before(trace: Trace, skip: Event) -> bool:
    """Whether the same condition zeroed the gradients earlier in the micro-batch."""
    return skip.guard is not None and any(
        one.guard is not None and "zeroes" in one.options and one.guard.text in skip.guard.text
        for one in trace.of(Kind.SKIP)
        if one.micro_batch == skip.micro_batch and one.index < skip.index
    )


def _next_backward(trace: Trace, skip: Event) -> int:
    after = (one.index for one in trace.of(Kind.BACKWARD) if one.index > skip.index)
    return min(after, default=len(trace.events))
