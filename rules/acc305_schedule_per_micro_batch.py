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

from accumlint.rules._boundary import GATED, Boundaries, passes

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Event, Kind, Place, Role, Trace, Window

CODE = "ACC305"
MEANT = frozenset({"absolute", "prepared", "horizon-in-micro-batches", GATED})


@rule(CODE, "schedule-per-micro-batch", Severity.ERROR, measured="more scheduler steps than updates")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries(trace)
    for window in trace.all_windows():
        for calls in _by_place(view, window).values():
            first = calls[0]
            following = next((call for call in calls if call.micro_batch != first.micro_batch), None)
            # A STEP of any optimizer in between may be the one that this scheduler follows.
            if following is None or window.step is None or view.steps_between(first.index, following.index):
                continue
            yield at(
                CODE,
                first,
                f"`{first.text}` advances the schedule in every micro-batch, but `{window.step.text}` runs once a window.",
                help=f"advance it beside `{window.step.text}`, or count its total in micro-batches",
                window=window,
                confidence=min(_confidence(first), view.confidence(window.optimizer, first.index, following.index)),
                guilty=calls,
            )


def _by_place(view: Boundaries, window: Window) -> dict[Place, tuple[Event, ...]]:
    """The scheduler's calls in micro-batches of this window, by line."""
    loops = {one.micro_batch: passes(one) for one in view.own(window)}
    found: dict[Place, tuple[Event, ...]] = {}
    for event in window.of(Kind.SCHEDULE):
        inside = event.micro_batch in loops and loops[event.micro_batch] <= passes(event)
        if inside and not MEANT & event.options:
            found[event.place] = (*found.get(event.place, ()), event)
    return found


def _confidence(call: Event) -> Confidence:
    """The total of a scheduler whose construction was not seen may be counted in micro-batches."""
    unseen = any(target.role is Role.SCHEDULER and not target.known for target in call.targets)
    return Confidence.MEDIUM if unseen else Confidence.HIGH
