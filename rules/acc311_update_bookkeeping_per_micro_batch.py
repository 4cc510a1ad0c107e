"""What belongs to an update, such as the moving average of the weights, is done in every micro-batch.

## What it does
Reports an average of the weights (EMA, SWA, momentum or target network) or a counter of updates that advances in several micro-batches of
one window.

## Why is this bad?
Between two steps the weights stand still. An average that is moved towards them K times decays by `decay ** K` an update: with 0.999 and
K = 8 its memory shrinks from about 1000 updates to 125. Changing K to fit the memory of another GPU changes the averaged model. A counter
of updates that counts micro-batches ends the run, its warm-up and its schedules K times early.

## Example
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    ema.update(model)
```
Use instead:
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
```
With Accelerate, call it under `if accelerator.sync_gradients:`.

## How it is measured
`AveragedModel.update_parameters` is called in several micro-batches between two steps. Averages of other making are not seen in a run.

## When it is silent
- Doing it twice is the same as doing it once: clamps to a maximal norm, weights that are copied or restored.
- The average is that of a metric, not of weights.
- Nothing shows that a counter is one of updates. It is where its limit is made of `len(loader)` divided by K, where it sets the learning
  rate beside the step, or where its name says so (`num_updates`, `optimizer_steps`).
- The average was told of K or given the optimizer, or waits for an answer that could not be followed.
- It is moved once an epoch, or where no window is open.
- Averages over ranks (`PeriodicModelAverager`).

## References
- PyTorch, "Weight Averaging (SWA and EMA)": https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, in_the_loop
from accumlint.trace import Event, Kind, Place, Trace

CODE = "ACC311"
COUNTER = "counter"


@rule(
    CODE,
    "update-bookkeeping-per-micro-batch",
    Severity.WARNING,
    measured="an average of the weights is moved in several micro-batches of a window",
    exception="only torch's own AveragedModel tells a run that it moves",
)
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    windows = [window for window in trace.all_windows() if window.step is not None]
    for calls in _by_place(trace).values():
        for call, following in pairwise(calls):
            if call.micro_batch == following.micro_batch or view.steps_between(call.index, following.index):
                continue
            window = next((one for one in windows if call in one.events), None)
            if window is None or window.step is None:
                continue
            yield at(
                CODE,
                call,
                _message(call, window.step),
                help=f"put it beside `{window.step.text}`",
                window=window,
                confidence=view.stands_still(window.optimizer, call.index, following.index),
            )
            break


def _message(call: Event, step: Event) -> str:
    if COUNTER in call.options:
        return f"`{call.text}` counts micro-batches, but {call.note}."
    return f"`{call.text}` runs in every micro-batch, but `{step.text}` once a window: in between the weights stand still."


def _by_place(trace: Trace) -> dict[Place, list[Event]]:
    """The calls, by line, that stand in the same loop as the micro-batch's backward."""
    found: dict[Place, list[Event]] = {}
    for event in in_the_loop(trace, Kind.AVERAGE):
        if GATED not in event.options:
            found.setdefault(event.place, []).append(event)
    return found
