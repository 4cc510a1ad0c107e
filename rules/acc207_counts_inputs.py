"""The denominator counts inputs where the loss counts valid targets.

## What it does
Reports a loss divided by a number of inputs (an attention mask, `numel()` of the ids or labels, the labels before the
shift) where the source produces targets that the loss ignores. Reports as well a running count that divides each update's
loss or gradients and that nothing sets back after the update.

## Why is this bad?
Prompts, padding and the position that the shift drops are in the denominator but not in the loss. The update is smaller by
the ratio of the two counts, and the ratio changes from window to window. A count that runs on makes every update smaller
than the one before.

## Example
```python
tokens = sum(batch["attention_mask"].sum() for batch in window)
for batch in window:
    loss = F.cross_entropy(model(batch["ids"]), batch["labels"], ignore_index=-100, reduction="sum") / tokens
    loss.backward()
```
Use instead:
```python
tokens = sum((batch["labels"] != -100).sum() for batch in window)
for batch in window:
    loss = F.cross_entropy(model(batch["ids"]), batch["labels"], ignore_index=-100, reduction="sum") / tokens
    loss.backward()
```

## How it is measured
The count implied by the coefficients is larger than the number of valid targets that the loss calls saw.

## When it is silent
Nothing produces ignored or masked targets: then inputs and targets are as many. A count that is part of an object whose
code is not seen may be set back there, and one that several optimizers share is not judged.

## References
- <https://huggingface.co/blog/gradient_accumulation>
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import number, place_of, stepping, written
from accumlint.trace import SHIFTED, Event, Kind, Place, Trace, Window
from accumlint.weight import Factor, Quantity

COUNTS = (Quantity.UNITS, Quantity.INPUTS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS)


@rule("ACC207", "counts-inputs", Severity.WARNING, measured="the count used differs from the valid targets seen by the loss")
def check(trace: Trace) -> Iterator[Finding]:
    yield from _never_set_back(trace)
    yield from _before_the_shift(trace)
    evidence = trace.fact("ignored-targets")
    if evidence is None:
        return
    for window, contributions in stepping(trace):
        for each in contributions:
            by_inputs = written(each.weight, Quantity.INPUTS)
            if not by_inputs:
                continue
            factor = by_inputs[-1]
            name = factor.text or "the denominator"
            yield at(
                "ACC207",
                each.backward,
                f"`{name}` is {number(factor.value)}, more than the targets that the losses of the window count"
                if trace.measured and factor.value is not None
                else f"`{name}` counts inputs, but the loss ignores some targets ({evidence.text or 'see the labels'})",
                help="count the labels that the loss uses: after the shift, without the ignored index",
                window=window,
                place=_count(factor, window.of(Kind.COUNT)) or _count(factor, trace.of(Kind.COUNT)) or place_of(factor, each.backward),
            )


def _never_set_back(trace: Trace) -> Iterator[Finding]:
    """A running count that divides the window's losses or gradients, and still holds the targets of earlier updates."""
    if len({actor.uid for event in trace.of(Kind.STEP) for actor in event.targets}) > 1:
        return  # one of the others may have updated between two micro-batches of this window
    for window, contributions in stepping(trace):
        for each in contributions:
            counts = written(each.weight, *COUNTS)
            if len(counts) != 1 or not counts[0].stale or each.weight.of(Quantity.UNKNOWN):
                continue
            yield at(
                "ACC207",
                each.backward,
                f"`{counts[0].text or 'the denominator'}` is never set back: after an update it still holds the targets of earlier windows",
                help="set the count to zero when the gradients are cleared",
                window=window,
                place=_running(counts[0], trace) or place_of(counts[0], each.backward),
            )


def _before_the_shift(trace: Trace) -> Iterator[Finding]:
    """A count of labels as they come, where the loss drops the first of each sequence, and that one is a target."""
    if trace.fact("ignored-behind") is None:
        return
    for window, contributions in stepping(trace):
        for each in contributions:
            counts = written(each.weight, *COUNTS)
            dropped = _dropped(each.backward, window)
            whole = _counted_whole(counts[0], dropped, trace) if len(counts) == 1 and dropped else None
            if whole is not None:
                yield at(
                    "ACC207",
                    each.backward,
                    f"`{whole.text}` counts the labels before the shift, but the loss drops the first of each sequence",
                    help="count the labels that the loss uses: after the shift, without the ignored index",
                    window=window,
                    place=whole.place,
                )


def _dropped(backward: Event, window: Window) -> str:
    """The name of the labels that all losses of a micro-batch take from the second position on."""
    losses = [event for event in window.of(Kind.LOSS) if event.micro_batch == backward.micro_batch and event.index < backward.index]
    names = {option for event in losses for option in event.options if option.startswith(SHIFTED)}
    return next(iter(names)).removeprefix(SHIFTED) if len(names) == 1 and all(event.options & names for event in losses) else ""


def _counted_whole(factor: Factor, name: str, trace: Trace) -> Event | None:
    """The count of these labels as they come, which this factor goes back to."""
    spelled = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    counts = [event for event in trace.of(Kind.COUNT) if event.weight and factor.root in {one.root for one in event.weight.factors}]
    whole = all(spelled.search(event.text) and not any(option.startswith(SHIFTED) for option in event.options) for event in counts)
    return counts[0] if counts and factor.root and whole else None


def _running(factor: Factor, trace: Trace) -> Place | None:
    """Where the count goes on."""
    return next(
        (
            event.place
            for event in trace.of(Kind.COUNT)
            if event.weight and any(one.stale and one.root == factor.root for one in event.weight.factors)
        ),
        None,
    )


def _count(factor: Factor, counts: tuple[Event, ...]) -> Place | None:
    """Where the inputs of this factor were counted, when the trace can tell."""
    counted = {
        event.place: event.weight.of(Quantity.INPUTS)[0]
        for event in counts
        if event.weight is not None and event.weight.of(Quantity.INPUTS)
    }
    same = [place for place, each in counted.items() if factor.root and each.root == factor.root]
    places = same or list(counted)
    return places[0] if len(places) == 1 else None
