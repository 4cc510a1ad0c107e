"""Gradients are never cleared between a step and the next window.

## What it does
Reports an optimizer step after which the next window's first backward adds to the old gradients.

## Why is this bad?
`backward` adds to `.grad`. Without a clearing every update uses the sum of all gradients since the start (or since the last clearing): a
momentum of 1 that nobody asked for, with a norm that grows by the step. Clipping hides the growth and leaves only the direction wrong.

## Example
```python
optimizer.zero_grad()
for i, batch in enumerate(loader):
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

## How it is measured
The last window's gradients are still there when the first backward of the next window begins.

## When it is silent
- An engine or the step itself clears (`zero_grad=True`); a loop sets `p.grad = None`.
- `torch.distributed.autograd`, whose contexts hold the gradients.
- The gradients are cleared later, inside the next window (ACC302).
- The zeroing waits for the boundary and the loss is divided by K, only the step does not wait (ACC301).
- Something that could not be followed holds the optimizer, or was handed it, and may clear after a step.
- Another optimizer's loss leaves gradients here in between (ACC314).
- An optimizer whose construction is not seen and that is cleared nowhere is reported with medium confidence: its own `step` may clear.

## References
- PyTorch, "Zeroing out gradients": https://docs.pytorch.org/tutorials/recipes/recipes/zeroing_out_gradients.html
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Actor, Event, Kind, Trace, Window
from accumlint.weight import Quantity

CODE = "ACC303"
CLEARS_ITSELF = frozenset({"engine", "zeroes", "dist-autograd"})


@rule(
    CODE,
    "zero-grad-missing",
    Severity.ERROR,
    every_loop=True,
    measured="the last window's gradients present at the next one's first backward",
)
def check(trace: Trace) -> Iterator[Finding]:
    if trace.fact("dist-autograd"):
        return
    view = Boundaries.of(trace)
    for optimizer in trace.optimizers:
        zeros = [event.index for event in trace.of(Kind.ZERO) if view.may_act_on(event, optimizer)]
        if _steps_too_often(view, trace.windows(optimizer), zeros):
            continue
        for window, following in pairwise(trace.windows(optimizer)):
            step, last, added = window.step, following.step, view.own(following)
            if step is None or last is None or not added or not view.own(window) or _clears_itself(step):
                continue
            if any(step.index < zero < last.index for zero in zeros) or view.leaks(following):
                continue
            yield at(
                CODE,
                step,
                f"nothing clears the gradients after `{step.text}`, so the next backward adds to those that this step has used.",
                help=f"call `{optimizer.name}.zero_grad()` after the step",
                window=window,
                confidence=min(
                    _confidence(optimizer, zeros),
                    _left_alone(trace, optimizer, step),
                    view.confidence(optimizer, step.index, added[0].index),
                ),
                place=step.in_loop,
            )


def _steps_too_often(view: Boundaries, windows: tuple[Window, ...], zeros: list[int]) -> bool:
    """Whether the window is there, with its K in the loss and its zeroing at the boundary, and only the step does not wait (ACC301)."""
    added = [one for window in windows for one in view.own(window)]
    divided = all(one.weight is not None and one.weight.power(Quantity.ACCUMULATION) < 0 for one in added)
    steps = [window.step.index for window in windows if window.step is not None]
    cleared = [any(step < zero < following for zero in zeros) for step, following in pairwise(steps)]
    return divided and (any(cleared) or len(steps) < _most(added)) and all(view.size(window) == 1 for window in windows)


def _most(backwards: list[Event]) -> float:
    """The K that divides the losses: a run that ends before so many updates may not have come to the zeroing."""
    weights = [one.weight for one in backwards if one.weight is not None]
    return max((float(each.value or 0) for weight in weights for each in weight.of(Quantity.ACCUMULATION)), default=0)


def _clears_itself(step: Event) -> bool:
    return bool(CLEARS_ITSELF & step.options) or "zero_grad=True" in step.text.replace(" ", "")


def _left_alone(trace: Trace, optimizer: Actor, step: Event) -> Confidence:
    """A function that nobody followed and that was handed the optimizer may have seen to it that a step clears."""
    handed = (event for event in trace.of(Kind.OPAQUE) if "said" in event.options and event.index < step.index)
    patched = any(target.uid == optimizer.uid for event in handed for target in event.targets)
    return Confidence.MEDIUM if patched else Confidence.HIGH


def _confidence(optimizer: Actor, zeros: list[int]) -> Confidence:
    """An optimizer known only by name may clear in its own `step`, unless this code clears it elsewhere."""
    return Confidence.HIGH if optimizer.known or zeros else Confidence.MEDIUM
