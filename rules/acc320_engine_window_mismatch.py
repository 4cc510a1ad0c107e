"""A window made by hand and the window of an engine do not end together.

## What it does
Reports a test against K, `if step % accumulation_steps == 0:`, whose step the engine ignores because its own window goes on; and an
`accumulate` entry without a backward in it, such as an evaluation pass, that moves the engine's counter. Also `accumulate` entered for each
part of a batch while the last batch of the prepared loader ends windows, and a window made by hand over an engine whose own K is 1 and
which takes each backward for the last one of an update.

## Why is this bad?
A prepared optimizer steps only where the engine's own counter says so, and clears only there. Where the test by hand lets the call
through on other micro-batches, the two must meet for anything to happen: the loop updates far less often than it says, on gradients of many
windows, or never. A counter that something else moves ends windows at other micro-batches than the code around it assumes.

On the last batch of a prepared loader Accelerate synchronises in every entry, to flush what is left. Where a batch is gone through in
parts, each part of that batch becomes an update of its own, with 1/K of its gradient, and the learning rate moves as often.

A DeepSpeed engine counts the micro-batches in `engine.step()`: under a test against K its window becomes one of K * K. With K left at 1,
ZeRO 1 and 2 replace in each backward what they have averaged before: the update uses the last micro-batch alone.

## Example
```python
accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps)
for step, batch in enumerate(loader):
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).loss)
        if step % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
```
Use instead:
```python
accelerator = Accelerator(gradient_accumulation_steps=accumulation_steps)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).loss)
        optimizer.step()
        optimizer.zero_grad()
```

For the parts of a batch, let the count alone end windows:
```python
plugin = GradientAccumulationPlugin(num_steps=accumulation_steps, sync_with_dataloader=False)
accelerator = Accelerator(gradient_accumulation_plugin=plugin)
```

With DeepSpeed:
```python
for batch in loader:
    engine.backward(engine(batch).loss)
    engine.step()
```

## How it is measured
Only in the source: a call that the engine ignores leaves nothing in a run.

## When it is silent
- Both windows end at the same micro-batches.
- The test is about the engine's own flag (`accelerator.sync_gradients`).
- `sync_with_dataloader=False` is given, or the loader is not one that was prepared.
- The test is about another period than K: saving, logging, a discriminator that trains less often.

## References
- https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Event, Kind, Trace

CODE = "ACC320"
HELD_BACK = "step-held-back"  # a fact: a boundary by hand at which the engine ignores the step
PARTS = "window-within-batch"  # a fact: an entry for each part of a batch, though the loader's last batch ends windows
LOST = "window-not-kept"  # a fact: a window by hand of which the engine keeps the last micro-batch only


@rule(
    CODE,
    "engine-window-mismatch",
    Severity.ERROR,
    exception="a step that the engine ignores leaves nothing in a run",
)
def check(trace: Trace) -> Iterator[Finding]:
    yield from _held_back(trace)
    yield from _lost(trace)
    yield from _parts(trace)
    yield from _without_backward(trace)


def _held_back(trace: Trace) -> Iterator[Finding]:
    backwards = trace.of(Kind.BACKWARD)
    for evidence in trace.facts.get(HELD_BACK, ()):
        if not backwards:
            return
        yield at(
            CODE,
            backwards[0],
            f"`{evidence.text}` lets the step through where the engine's own window goes on, so the call does nothing there",
            help="leave the window to the engine: call step and zero_grad in every micro-batch",
            place=evidence.place,
        )


def _lost(trace: Trace) -> Iterator[Finding]:
    backwards = trace.of(Kind.BACKWARD)
    for evidence in trace.facts.get(LOST, ()) if backwards else ():
        yield at(
            CODE,
            backwards[0],
            f"`{evidence.text}` makes a window by hand, but to an engine of K = 1 each backward ends one: the update uses the last alone",
            help="give the engine its K, and call step in every micro-batch",
            place=evidence.place,
        )


def _parts(trace: Trace) -> Iterator[Finding]:
    backwards = trace.of(Kind.BACKWARD)
    for evidence in trace.facts.get(PARTS, ()) if backwards else ():
        yield at(
            CODE,
            backwards[0],
            f"`{evidence.text}` is entered for each part of a batch: on the loader's last batch every part becomes an update of its own",
            help="let the count alone end windows: `GradientAccumulationPlugin(num_steps=…, sync_with_dataloader=False)`",
            place=evidence.place,
        )


def _without_backward(trace: Trace) -> Iterator[Finding]:
    """Entries at a place where no backward ever follows, in a loop that accumulates at others."""
    entries = [event for event in trace.of(Kind.SYNC_OFF, Kind.SYNC_ON) if "accumulate" in event.options]
    after = (*entries[1:], None) if entries else ()
    busy = {entry.place for entry, following in zip(entries, after, strict=True) if _trains(trace, entry, following)}
    if not busy:
        return
    for entry in entries:
        if entry.place not in busy:
            yield at(
                CODE,
                entry,
                f"`{entry.text}` moves the engine's counter though no backward follows in it: the next window of the training ends early",
                help="keep passes that do not train out of `accumulate`",
            )


def _trains(trace: Trace, entry: Event, following: Event | None) -> bool:
    """Whether something between two entries goes backward, or may do so."""
    end = following.index if following is not None else len(trace.events)
    if following is not None and following.turns == entry.turns:
        return True  # another model of the same call, or a second context of the same micro-batch
    between = trace.of(Kind.BACKWARD, Kind.FORWARD, Kind.OPAQUE, Kind.SKIP)
    return any(entry.index < event.index < end for event in between)
