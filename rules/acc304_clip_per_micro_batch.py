"""Gradients are clipped in every micro-batch instead of once a window.

## What it does
Reports a clip of gradients to which later micro-batches of the same window are still added.

## Why is this bad?
The clip is meant for the gradient of the update. Applied to the running sum it shrinks what the earlier micro-batches left, and then later
ones are added at full size: the micro-batches no longer count the same, the last one counts most, and the norm of the update is not bounded
by the limit. It also costs a pass over all parameters K times, and inside `no_sync` the norm is that of one rank.

## Example
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
```
`accelerator.clip_grad_norm_` is not held back off the boundary: put it under `if accelerator.sync_gradients:`.

## How it is measured
A clip between two backwards of one window that belong to different micro-batches.

## When it is silent
- apex with `delay_unscale`, and frameworks that hold the clip back themselves.
- The gradients are cleared before the next micro-batch (then ACC302 says so).
- Only the norm is asked for (`max_norm=float("inf")`).
- It clips copies that a 16-bit optimizer makes anew from the gradients (`optimizer.clip_master_grads(1.0)`).
- It clips another optimizer's parameters.

## References
- PyTorch, "Automatic mixed precision examples, gradient accumulation": https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Kind, Trace

CODE = "ACC304"
HARMLESS = frozenset({"delay-unscale", "norm-only", "copies"})


@rule(CODE, "clip-per-micro-batch", Severity.ERROR, measured="a clip between two backwards of one window")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    for window in trace.all_windows():
        zeros = [event.index for event in window.of(Kind.ZERO) if view.may_act_on(event, window.optimizer)]
        for clip in view.off_boundary(window, Kind.CLIP):
            following = next(one for one in view.own(window) if one.index > clip.index)
            if HARMLESS & clip.options or any(clip.index < zero < following.index for zero in zeros):
                continue
            step = window.step.text if window.step is not None else "the step"
            yield at(
                CODE,
                clip,
                f"`{clip.text}` clips the running sum of the window, to which more micro-batches are added before `{step}`.",
                help=f"clip once a window, right before `{step}`",
                window=window,
                confidence=view.confidence(window.optimizer, clip.index, following.index),
            )
