"""Gradients are cleared inside the window, before the step that should use them.

## What it does
Reports a `zero_grad` between a backward and the optimizer step that this backward is meant for. It is a warning where the clearing has a
period of its own (`if step % eval_every == 0: evaluate(); optimizer.zero_grad()`), which may be a multiple of K.

## Why is this bad?
The step uses only what came after the last `zero_grad`. With a clearing in every micro-batch that is the last micro-batch alone, usually
with a loss divided by K: K-1 of K micro-batches are computed and thrown away, and nothing looks wrong but a slow descent.

## Example
```python
for i, batch in enumerate(loader):
    optimizer.zero_grad()
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
```
Use instead:
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```
In Accelerate a prepared optimizer's `zero_grad` runs in the last micro-batch only; as the first statement inside `accumulate` it clears the
window right there. It belongs after the step.

## How it is measured
Gradients that a backward of this window wrote are cleared before any step has read them.

## When it is silent
- A probe: the cleared backward ran on the same micro-batch as the one that follows, or its line is never part of an update, or it ran
  before the loop that holds the window was entered (a warm-up that allocates memory).
- The clearing opens the window (`if i % accum_steps == 0: optimizer.zero_grad()` before the backward).
- What is cleared are the leftovers of an epoch that ended inside a window (ACC307).
- It clears another optimizer's parameters, or what another optimizer's loss left behind.
- The gradients were copied before (per-sample clipping).
- It runs only on a condition on data, such as a loss that is not finite, or clears only parameters that are picked by their names.

## References
- PyTorch, `torch.optim.Optimizer.zero_grad`: https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, passes
from accumlint.trace import Event, Kind, Place, Trace, Window
from accumlint.weight import Quantity

CODE = "ACC302"
BY_NAME = re.compile(r"""['"] (not )?in \w|\.(starts|ends)with\(['"]""")
COPIED = "copied"  # the gradients were read into something else first
CLOSURE = "closure"  # the step's own closure begins its evaluation anew


@rule(
    CODE,
    "zero-grad-inside-window",
    Severity.ERROR,
    measured="gradients cleared between their backward and the step",
    exception="a clearing with a period of its own looks in a run like the beginning of another window",
)
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    kept = {one.place for window in trace.all_windows() for one in _kept(view, window)}
    for window in trace.all_windows():
        own = view.own(window)
        cleared = -1
        for zero in _clearings(view, window):
            wiped = tuple(one for one in own if cleared < one.index < zero.index)
            rest = tuple(one for one in own if one.index > zero.index)
            cleared = zero.index
            if _is_inside(window, zero, wiped, rest, kept):
                yield _finding(view, window, zero, wiped, rest)


def _clearings(view: Boundaries, window: Window) -> Iterator[Event]:
    """The clearings of this optimizer's gradients before the window's step."""
    for event in window.of(Kind.ZERO):
        if window.step is None or event.index > window.step.index:
            return
        if {GATED, COPIED} & event.options or _begins(window, event) or _of_its_own_accord(view, window, event) or _of_some(event):
            continue
        if view.acts_on(event, window.optimizer):
            yield event


def _begins(window: Window, zero: Event) -> bool:
    """Whether the step's closure clears once, outside any loop of its own."""
    return CLOSURE in zero.options and (window.step is None or len(zero.turns) <= len(window.step.turns))


def _of_its_own_accord(view: Boundaries, window: Window, zero: Event) -> bool:
    """Whether the data decide about the clearing alone: not where the same condition holds for the backwards as well."""
    shared = [{guard.place for guard in one.guards} for one in view.own(window)]
    return any(guard.cause == "data" and not all(guard.place in places for places in shared) for guard in zero.guards)


def _of_some(zero: Event) -> bool:
    """Whether only parameters of some names are cleared, so that they are not updated: `if "head" in name: p.grad = None`."""
    return ".grad" in zero.text and any(BY_NAME.search(guard.text) for guard in zero.guards)


def _kept(view: Boundaries, window: Window) -> tuple[Event, ...]:
    """The backwards whose gradients the step does use."""
    last = max((zero.index for zero in _clearings(view, window)), default=-1)
    return tuple(one for one in view.own(window) if one.index > last)


def _is_inside(window: Window, zero: Event, wiped: tuple[Event, ...], rest: tuple[Event, ...], kept: set[Place]) -> bool:
    if not wiped or window.step is None:
        return False
    if not rest:
        between = (event.kind for event in window.events if zero.index < event.index < window.step.index)
        return not any(kind in {Kind.DATA, Kind.FORWARD} for kind in between)
    lost = [
        one
        for one in wiped
        if one.micro_batch < rest[0].micro_batch and _in_one_pass(one, zero) and (one.place in kept or _is_a_share(one))
    ]
    return bool(lost) and passes(rest[0]) <= passes(zero) and not _is_in_inner_loop(zero, wiped[-1], rest[0])


def _is_a_share(backward: Event) -> bool:
    """Whether the loss was divided for a window; that of a probe, whose gradients no step ever uses, is not."""
    return backward.weight is not None and bool(backward.weight.of(Quantity.ACCUMULATION))


def _in_one_pass(backward: Event, zero: Event) -> bool:
    """Whether the clearing lies in the same pass of the loops; leftovers cleared in the next epoch do not."""
    return passes(backward) <= passes(zero) or not backward.turns


def _is_in_inner_loop(zero: Event, before: Event, after: Event) -> bool:
    """Whether several passes over one micro-batch (an attack's steps) have the clearing between them."""
    return before.micro_batch == after.micro_batch and len(zero.turns) > min(len(before.turns), len(after.turns))


def _other_period(window: Window, zero: Event) -> bool:
    """Whether the clearing has a period of its own, which may well be a multiple of K."""
    own = {guard.text for guard in window.step.guards} if window.step is not None else set()
    return any("%" in guard.text and guard.text not in own and guard.cause in {"gate", "counter"} for guard in zero.guards)


def _finding(view: Boundaries, window: Window, zero: Event, wiped: tuple[Event, ...], rest: tuple[Event, ...]) -> Finding:
    step = window.step.text if window.step is not None else "the step"
    count = len({one.micro_batch for one in wiped})
    lost = "the last micro-batch" if count == 1 else f"{count} micro-batches"
    where = "inside the window" if rest else "between the backward and the step"
    return at(
        CODE,
        zero,
        f"`{zero.text}` runs {where} and clears the gradients of {lost} before `{step}` could use them.",
        help=f"clear once a window, right after `{step}`",
        window=window,
        confidence=view.confidence(window.optimizer, wiped[-1].index, zero.index),
        guilty=(*wiped, zero),
        severity=Severity.WARNING if _other_period(window, zero) else None,
    )
