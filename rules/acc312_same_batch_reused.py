"""All micro-batches of a window are the same batch.

## What it does
Finds windows whose K forwards take the very same inputs, because the batch is fetched outside the micro-batch loop, and loops that start a
fresh iterator for every window and so take the loader's first K batches each time.

## Why is this bad?
K backwards through one batch, each divided by K, give the gradient of that one batch: the effective batch is not K times larger, only K
times dearer. With a fresh iterator for each window, the model never sees more than the first K batches.

## Example
```python
for step in range(steps):
    batch = next(batches)
    for _ in range(accum):
        (criterion(model(batch)) / accum).backward()
    optimizer.step()
    optimizer.zero_grad()
```
Use instead:
```python
for step in range(steps):
    for _ in range(accum):
        batch = next(batches)
        (criterion(model(batch)) / accum).backward()
    optimizer.step()
    optimizer.zero_grad()
```

## How it is measured
The inputs of all forwards of a window have the same content, with the same other arguments. The source has to say the
same: several passes over one batch look alike in a run.

## When it is silent
- Deliberate passes over one batch: the loss is not divided by the count, or its name says so (adversarial steps, repeats, samples, views).
- Something that could not be followed makes new data of the batch in every turn (`augment(batch)`).
- The same data in every window of the run, as in a benchmark on one fixed batch.
- A fresh iterator over a loader that shuffles, or a pass over the whole loader in every window.

## References
- https://docs.python.org/3/library/itertools.html#itertools.islice
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.trace import Event, Kind, Trace, Window
from accumlint.weight import Quantity

Inputs = list[tuple[int, ...]]

ON_PURPOSE = re.compile(r"adv|pgd|attack|perturb|repeat|sample|pass|view|aug|draw|epoch|ensemble|\bmc_|particle|inner", re.IGNORECASE)
FRESH = re.compile(r"\bislice\s*\(|\bnext\s*\(\s*iter\s*\(|\bzip\s*\(.*\brange\s*\(")
RESTARTED = "restarted"
SHUFFLED = "shuffled"  # a fresh iterator draws other batches


@rule("ACC312", "same-batch-reused", Severity.ERROR, measured="the inputs of all forwards of a window are the same storage or content")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.accumulation is None or ON_PURPOSE.search(trace.accumulation.text):
        return
    boundaries = Boundaries.of(trace)
    for optimizer in trace.optimizers:
        for before, window in pairwise(trace.windows(optimizer)):
            yield from _compared(trace, boundaries, before, window)


def _compared(trace: Trace, boundaries: Boundaries, before: Window, window: Window) -> Iterator[Finding]:
    forwards = _forwards(boundaries, window)
    inputs, earlier = _inputs(forwards), _inputs(_forwards(boundaries, before))
    if trace.accumulation is None or len(inputs) != trace.accumulation.value or len(inputs) < 2 or not all(inputs):
        return
    if any("remade" in forward.options for forward in forwards):
        return  # something unseen makes new data of the batch each time
    if len({forward.micro_batch for forward in forwards}) < 2:  # several losses of one batch, not a window
        return
    fetch = _fetch(trace, forwards[0])
    k = trace.accumulation.text
    fresh = SHUFFLED not in fetch.options and (RESTARTED in fetch.options or FRESH.search(fetch.text))
    if len(set(inputs)) == 1 and (fresh or (inputs != earlier and _divides(boundaries, window))):
        message = f"`{fetch.text}` gives every micro-batch of the window the same batch"
        hint = "take a new batch in every turn of the micro-batch loop, from one iterator"
    elif inputs == earlier and fresh:
        message = f"`{fetch.text}` starts a fresh iterator for every window, so each takes the same first `{k}` batches"
        hint = "make the iterator once, before the loop over the updates"
    else:
        return
    yield at("ACC312", fetch, message, help=hint, window=window, guilty=(fetch, *forwards))


def _divides(boundaries: Boundaries, window: Window) -> bool:
    """Whether the losses are divided by K: passes on purpose (an attack's steps) often are not."""
    weights = [backward.weight for backward in boundaries.own(window)]
    return all(weight is not None and weight.of(Quantity.ACCUMULATION) for weight in weights)


def _forwards(boundaries: Boundaries, window: Window) -> tuple[Event, ...]:
    """The forwards behind the window's own backwards, those of the most used call."""
    behind = {index for backward in boundaries.own(window) for index in backward.forwards}
    forwards = [event for event in window.of(Kind.FORWARD) if event.index in behind]
    places = [event.place for event in forwards]
    return tuple(event for event in forwards if event.place == max(places, key=places.count))


def _inputs(forwards: tuple[Event, ...]) -> Inputs:
    return [event.data for event in forwards]


def _fetch(trace: Trace, forward: Event) -> Event:
    """Where the forward's data was taken; the forward itself where no such place was seen."""
    before = [event for event in trace.of(Kind.DATA) if event.index < forward.index]
    same = [event for event in before if set(event.data) & set(forward.data)]
    taken = same or [event for event in before if event.micro_batch == forward.micro_batch]
    return taken[-1] if taken else forward
