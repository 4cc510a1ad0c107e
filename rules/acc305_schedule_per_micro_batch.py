"""The learning rate schedule advances in every micro-batch, though the optimizer steps once a window.

## What it does
Reports a scheduler step that runs in several micro-batches of one window.

## Why is this bad?
The schedule runs K times faster than the updates. Warm-up is over after 1/K of the planned updates, a cosine or linear decay reaches its
end at 1/K of the run and stays there, a cyclic one goes round K times. Each update also uses the rate of its last micro-batch only.

## Example
```python
scheduler = LambdaLR(optimizer, warmup_then_decay(total_updates))
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
```
Use instead:
```python
scheduler = LambdaLR(optimizer, warmup_then_decay(total_updates))
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
```

## How it is measured
More scheduler steps than optimizer updates.

## When it is silent
- The schedule's total is counted in micro-batches too.
- The scheduler went through `prepare()` and is held back by the framework.
- A position is handed over that does not move inside the window (`scheduler.step(epoch)`, `step_update(num_updates)`).
- It runs several times for one update on purpose (`for _ in range(accum_steps): scheduler.step()` beside the optimizer's step).
- It runs once an epoch.

## References
- PyTorch, "How to adjust learning rate": https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, in_the_loop
from accumlint.trace import Event, Kind, Place, Role, Trace

CODE = "ACC305"
MEANT = frozenset({"absolute", "prepared", "horizon-in-micro-batches", GATED})


@rule(CODE, "schedule-per-micro-batch", Severity.ERROR, measured="more scheduler steps than updates")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    windows = [window for window in trace.all_windows() if window.step is not None]
    for calls in _by_place(trace).values():
        for call, following in pairwise(calls):
            # A STEP of any optimizer in between may be the one that this scheduler follows.
            if call.micro_batch == following.micro_batch or view.steps_between(call.index, following.index):
                continue
            window = next((one for one in windows if call in one.events), None)
            if window is None or window.step is None:
                continue
            yield at(
                CODE,
                call,
                f"`{call.text}` advances the schedule in every micro-batch, but `{window.step.text}` runs once a window.",
                help=f"advance it beside `{window.step.text}`, or count its total in micro-batches",
                window=window,
                confidence=min(_confidence(call), view.confidence(window.optimizer, call.index, following.index)),
            )


def _by_place(trace: Trace) -> dict[Place, list[Event]]:
    """The scheduler's calls, by line, that stand in the same loop as the micro-batch's backward."""
    found: dict[Place, list[Event]] = {}
    for event in in_the_loop(trace, Kind.SCHEDULE):
        if not MEANT & event.options:
            found.setdefault(event.place, []).append(event)
    late = {event.place for event in trace.of(Kind.SCHEDULE) if "horizon-in-micro-batches" in event.options}
    return {place: calls for place, calls in found.items() if place not in late}  # its unit is seen where its counter ends


def _confidence(call: Event) -> Confidence:
    """The total of a scheduler whose construction was not seen may be counted in micro-batches."""
    unseen = any(target.role is Role.SCHEDULER and not target.known for target in call.targets)
    return Confidence.MEDIUM if unseen else Confidence.HIGH
