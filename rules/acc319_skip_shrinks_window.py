"""A micro-batch that is left out shrinks the window, but the divisor does not know.

## What it does
Finds a skip inside the window (a `continue` on a loss that is not finite, a handler that swallows an out-of-memory error) that leaves out
the backward of a micro-batch while the others are still divided by K, or by a count that includes the one left out. Also a skip that can
fall on the boundary, so that the step of the whole window is left out.

## Why is this bad?
With one of K micro-batches missing, the coefficients of the window sum to (K - 1)/K, a smaller step than the learning rate says. Where the
step stands behind the skip and the index counts on, a bad last micro-batch loses the step of the good ones before it, and their gradients
run into the next window.

## Example
```python
for i, batch in enumerate(loader):
    loss = criterion(model(batch))
    if not torch.isfinite(loss):
        continue
    (loss / accum).backward()
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, batch in enumerate(loader):
    loss = criterion(model(batch))
    if torch.isfinite(loss):
        loss.backward()
        used += 1
    if (i + 1) % accum == 0:
        for p in model.parameters():
            p.grad.div_(max(used, 1))
        optimizer.step()
        optimizer.zero_grad()
        used = 0
```

## How it is measured
A window in which a forward has no backward, a batch was taken in vain or the loop's counter jumped, and whose divisor
is K or counts more targets than were used.

## When it is silent
- The skip is counted: the divisor is the number of micro-batches or targets that were used, or the counter behind the boundary stands
  still, so that the window takes another micro-batch.
- The skip clears the gradients and starts the window anew, in one process.
- The branch raises or ends the loop, or leaves out whole windows.

## References
- https://docs.pytorch.org/docs/stable/notes/faq.html#my-out-of-memory-exception-handler-can-t-allocate-memory
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Event, Kind, Trace, Window
from accumlint.weight import Factor, Quantity

GOES_ON = {"continue", "branch", "except"}
CAUSES = {"data", "memory", "exception", "clock", "unknown"}
COUNTED = "counted"  # of a skip: the divisor counts what was used; of it or the step: the boundary's counter stands still
CLEARED = "cleared"  # the skipping path zeroes the gradients itself


@rule(
    "ACC319",
    "skip-shrinks-window",
    Severity.WARNING,
    measured="a window has fewer backwards than its divisor, and coefficients that sum to less than 1",
)
def check(trace: Trace) -> Iterator[Finding]:
    boundaries = Boundaries.of(trace)
    for window in trace.all_windows():
        for skip in window.of(Kind.SKIP):
            if not _leaves_out_one(boundaries, window, skip) or _restarts(trace, skip):
                continue
            reasons = [*_divisor(window, skip), *_lost_step(boundaries, window, skip)]
            if reasons:
                what = f"`{skip.guard.text}`" if skip.guard else "this skip"
                yield at(
                    "ACC319",
                    skip,
                    f"{what} leaves a micro-batch out of the window, but {' and '.join(reasons)}",
                    help="divide by the number of micro-batches that were used, and keep the boundary test outside the skip",
                    window=window,
                )


def _leaves_out_one(boundaries: Boundaries, window: Window, skip: Event) -> bool:
    """Whether the skip leaves out the backward of one micro-batch while the window's others keep theirs."""
    if skip.leaves not in GOES_ON or Kind.BACKWARD not in skip.skipped or COUNTED in skip.options:
        return False
    if skip.guard is not None and skip.guard.cause not in CAUSES:
        return False
    if window.step is not None and COUNTED in window.step.options and Kind.STEP in skip.skipped:
        return False
    own = boundaries.own(window)
    return any(one.turns[: len(skip.turns)] != skip.turns for one in own) and skip.index < own[-1].index


def _restarts(trace: Trace, skip: Event) -> bool:
    return CLEARED in skip.options and trace.fact("distributed") is None


def _divisor(window: Window, skip: Event) -> Iterator[str]:
    """What the others are divided by though it includes the micro-batch that is left out."""
    factors = [factor for event in window.of(Kind.BACKWARD, Kind.NORMALIZE) if event.weight for factor in event.weight.factors]
    by_k = _first(factors, Quantity.ACCUMULATION)
    if by_k is not None and not by_k.implicit:
        yield f"the others are still divided by `{by_k.text or 'K'}`"
        return
    counts = [count for count in window.of(Kind.COUNT) if count.index < window.backwards[0].index]
    of_window = (Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS, *((Quantity.INPUTS,) if len(counts) > 1 else ()))
    by_count = _first(factors, *of_window)
    if by_count is not None and window.of(Kind.COUNT) and Kind.COUNT not in skip.skipped:
        yield f"`{by_count.text or 'N'}` still counts its targets"


def _lost_step(boundaries: Boundaries, window: Window, skip: Event) -> Iterator[str]:
    """Where the skip falls on the boundary, whether the step is behind it."""
    last = boundaries.own(window)[-1]
    if Kind.STEP in skip.skipped and skip.micro_batch == last.micro_batch:
        yield "on the boundary it loses the step of the whole window"


def _first(factors: list[Factor], *quantities: Quantity) -> Factor | None:
    return next((factor for factor in factors if factor.quantity in quantities and factor.power < 0), None)
