"""The total of the learning rate schedule is counted in micro-batches, but the schedule advances once an update.

## What it does
Reports the total that a schedule is given (`num_training_steps`, `T_max`, `total_steps`, …) when it is a number of batches that nothing
divides by K, the setting that ends a loop of micro-batches, or a number of updates multiplied by K, while the schedule is stepped beside
the optimizer.

## Why is this bad?
The schedule gets through 1/K of its course. A cosine from 1 to 0 with K = 8 ends near 0.96, so that the decay that the run was planned
with never happens. A warm-up that is a share of the total lasts K times as long.

## Example
```python
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * len(loader))
for epoch in range(epochs):
    for i, batch in enumerate(loader):
        (model(batch) / accum_steps).backward()
        if (i + 1) % accum_steps == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
```
Use instead:
```python
scheduler = CosineAnnealingLR(optimizer, T_max=epochs * (len(loader) // accum_steps))
```
with the same loop. `OneCycleLR(steps_per_epoch=len(loader))` is the same mistake. A scheduler that went through Accelerate's `prepare`
advances W times an update: its total is updates times the number of processes, and never times K.

## How it is measured
Not: a run does not tell what the total of a schedule is made of.

## When it is silent
- The schedule is stepped in every micro-batch; then such a total fits it.
- The total is divided by K, or is a setting of its own that ends no loop of micro-batches.
- What the total is made of cannot be told, or is told in two ways.
- A total in updates for a schedule that advances per micro-batch is ACC305.
- A missing factor of the number of processes alone.

## References
- PyTorch, "How to adjust learning rate": https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
- Accelerate, "Learning rate schedulers": https://huggingface.co/docs/accelerate/concept_guides/performance
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, passes
from accumlint.trace import FILE_LINES, Actor, Event, Kind, Role, Trace, Window

HELD_BACK = frozenset({GATED, "prepared"})
FACT = "horizon-in-micro-batches:"


@rule("ACC316", "schedule-horizon-units", Severity.WARNING, exception="a run does not tell what the total of a schedule is made of")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    for scheduler in _schedulers(trace):
        total = trace.fact(f"{FACT}{scheduler.uid}")
        if total is None:
            continue
        for window in trace.all_windows():
            steps = _steps(view, window, scheduler)
            if window.step is None or view.size(window) < 2 or not steps or not _once_an_update(view, trace, scheduler):
                continue
            if _is_one_batch(trace, view.own(window)):
                continue
            yield at(
                "ACC316",
                steps[0],
                f"`{total.text}` counts micro-batches, but `{steps[0].text}` runs once an update: the schedule ends at 1/K of its course.",
                help="count updates: divide the number of batches by K",
                window=window,
                place=total.place,
            )
            break


def _schedulers(trace: Trace) -> tuple[Actor, ...]:
    found = {target.uid: target for event in trace.of(Kind.SCHEDULE) for target in event.targets if target.role is Role.SCHEDULER}
    return tuple(found.values())


def _steps(view: Boundaries, window: Window, scheduler: Actor) -> tuple[Event, ...]:
    """The steps of a scheduler that stand in the same loop as the window's micro-batches."""
    own = view.own(window)
    inside = passes(own[-1]) if own else frozenset()
    return tuple(
        event
        for event in window.of(Kind.SCHEDULE)
        if any(target.uid == scheduler.uid for target in event.targets) and (inside <= passes(event) or _of_window(event, own))
    )


def _of_window(event: Event, own: tuple[Event, ...]) -> bool:
    """Whether the loop around the micro-loop is the event's own: the window is a turn of it."""
    return bool(own) and bool(event.turns) and event.turns == own[-1].turns[: len(event.turns)]


def _is_one_batch(trace: Trace, own: tuple[Event, ...]) -> bool:
    """Whether the micro-batches are parts of one batch of a loader, whose length counts updates then."""
    around = own[-1].turns[:-1]
    taken = {data.place.line for data in trace.of(Kind.DATA) if data.turns and data.turns == around[: len(data.turns)]}
    return own[0].turns[: len(around)] == around and any(turn.line % FILE_LINES in taken for turn in around)


def _once_an_update(view: Boundaries, trace: Trace, scheduler: Actor) -> bool:
    if scheduler.options & HELD_BACK or any(GATED in event.options for event in trace.of(Kind.SCHEDULE)):
        return True
    counts = Counter(len(_steps(view, window, scheduler)) for window in trace.all_windows() if view.size(window) >= 2)
    return counts[1] >= 2 and counts[1] >= sum(counts.values()) - 1 and not any(number > 1 for number in counts)
