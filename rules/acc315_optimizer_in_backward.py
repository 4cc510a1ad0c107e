"""Hooks step the optimizer inside the backward of every micro-batch.

## What it does
Finds an optimizer step in a hook of a parameter (`register_post_accumulate_grad_hook` and its kin) that runs in each backward while the
loop accumulates K of them.

## Why is this bad?
The hook updates a parameter as soon as its gradient is there and clears it to save the memory. Nothing is left to accumulate: each
micro-batch is an update of its own, with 1/K of its gradient, and the later micro-batches of the window run on changed parameters.

## Example
```python
def update(p):
    optimizers[p].step()
    optimizers[p].zero_grad()

for p in model.parameters():
    p.register_post_accumulate_grad_hook(update)
for batch in micro_batches:
    (criterion(model(batch)) / accum).backward()
```
Use instead:
```python
def update(p):
    if state.boundary:
        optimizers[p].step()
        optimizers[p].zero_grad()
```
or K = 1: fusing the step into the backward and accumulating exclude each other, for the one frees the gradients that the other keeps.

## How it is measured
The versions of parameters change between the first and the last backward of a window.

## When it is silent
- K is 1, or is checked to be 1.
- The hook is gated by the boundary, or calls a prepared optimizer that gates itself.

## References
- https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Event, Kind, Place, Trace

HOOK = "hook"
PREPARED = "prepared"


@rule("ACC315", "optimizer-in-backward", Severity.ERROR, measured="parameters change between two backwards of a window")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is not None and trace.accumulation.value < 2:
        return
    k = trace.accumulation.text if trace.accumulation else "K"
    places: dict[Place, list[Event]] = {}
    for step in trace.of(Kind.STEP):
        if HOOK in step.options and not _gated(step):
            places.setdefault(step.place, []).append(step)
    for steps in places.values():
        if _steps_from_the_start(trace, steps):
            yield at(
                "ACC315",
                steps[0],
                f"`{steps[0].text}` runs in the backward of every micro-batch, so nothing is accumulated over {k}",
                help="gate the hook by the boundary, or set the accumulation to 1 where the step is fused into the backward",
                guilty=tuple(steps[:2]),
            )


def _gated(step: Event) -> bool:
    return any(guard.cause == "gate" for guard in step.guards) or any(PREPARED in target.options for target in step.targets)


def _steps_from_the_start(trace: Trace, steps: list[Event]) -> bool:
    """Whether both of the first two micro-batches with a backward are stepped: a gate leaves out one of any two within a window."""
    first = list(dict.fromkeys(event.micro_batch for event in trace.of(Kind.BACKWARD)))[:2]
    return len(first) == 2 and set(first) <= {step.micro_batch for step in steps}
