"""The graphs of several micro-batches are alive at once.

## What it does
Finds losses that keep their graph over micro-batches: summed and backpropagated once at the end of the window, added to a running sum that
no backward ever frees, or backpropagated with `retain_graph=True` and used again in a later micro-batch.

## Why is this bad?
Accumulation is there to hold the activations of one micro-batch at a time. With one backward at the end, the memory grows by a
micro-batch's activations each turn and reaches that of the full batch: the gradient is right, and nothing was saved. A sum that is never
backpropagated grows until the memory is gone.

## Example
```python
total = 0
for batch in micro_batches:
    total = total + criterion(model(batch)) / accum
total.backward()
optimizer.step()
```
Use instead:
```python
total = 0.0
for batch in micro_batches:
    loss = criterion(model(batch)) / accum
    loss.backward()
    total += loss.detach()
optimizer.step()
```

## How it is measured
One backward goes through the forwards of several micro-batches, whose graphs were alive until then, or a later
backward through a graph that was kept. The source has to say the same: parts of one batch in one loss look alike in a
run. A sum through which no backward ever goes leaves no event.

## When it is silent
- A running sum of losses each of which had its own backward: their activations are freed already (told as info).
- Features of several micro-batches that are kept for one joint loss.
- Several forwards on the same data, such as two views or the steps of a sequence.

## References
- https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
- https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Event, Kind, Place, Trace, Window

FREE_EACH = "run the backward of each micro-batch in its own turn, and add `loss.detach()` to the sum"


@rule(
    "ACC309",
    "graph-retained",
    Severity.WARNING,
    measured="one backward goes through the forwards of several micro-batches, or a later one through a graph that was kept",
    exception="a sum through which no backward ever goes leaves no event in a run",
)
def check(trace: Trace) -> Iterator[Finding]:
    for window in trace.all_windows():
        for backward in window.backwards:
            yield from _summed(trace, window, backward)
        yield from _retained_by_flag(window)
    yield from _never_freed(trace)


def _summed(trace: Trace, window: Window, backward: Event) -> Iterator[Finding]:
    """One backward through the losses of several micro-batches."""
    forwards = _repeated_call(trace, backward)
    if len({_piece(one) for one in forwards}) < 2 or any(_uses_again(earlier, backward) for earlier in window.backwards):
        return
    if "one-piece" in backward.options:
        return
    additions = [one for one in window.of(Kind.RETAIN) if set(one.forwards) & set(backward.forwards) and one.index < backward.index]
    if additions:
        message = f"`{additions[0].text}` keeps the graph of every micro-batch alive until `{backward.text}` in {backward.place.spoken}"
        yield at("ACC309", additions[0], message, help=FREE_EACH, window=window, guilty=(*additions, backward))
        return
    losses = [one.index for one in window.of(Kind.LOSS)]
    ends = [one.index for one in forwards[1:]] + [backward.index]
    if all(any(forward.index < loss < end for loss in losses) for forward, end in zip(forwards, ends, strict=True)):
        message = f"`{backward.text}` runs once through the losses of several micro-batches, whose graphs are all alive until then"
        yield at("ACC309", backward, message, help=FREE_EACH, window=window)


def _retained_by_flag(window: Window) -> Iterator[Finding]:
    """`retain_graph=True`, and a later micro-batch goes through the same graph again; not one joint loss of what several have kept."""
    pairs = [(one, next((later for later in window.backwards if _uses_again(one, later)), None)) for one in window.backwards]
    users = [again.index for _, again in pairs if again is not None]
    for backward, again in pairs:
        if again is not None and users.count(again.index) < 2:
            message = f"`{backward.text}` keeps its graph, and a later micro-batch goes through it again"
            hint = "detach what is carried into the next micro-batch, and drop `retain_graph=True`"
            yield at("ACC309", backward, message, help=hint, window=window, guilty=(backward, again))


def _never_freed(trace: Trace) -> Iterator[Finding]:
    """A running sum of losses through which no backward ever goes."""
    places: dict[Place, list[Event]] = {}
    for event in trace.of(Kind.RETAIN):
        places.setdefault(event.place, []).append(event)
    for additions in places.values():
        fates = {_fate(trace, addition) for addition in additions}
        if len({one.micro_batch for one in additions}) < 2 or len(fates) != 1:
            continue
        fate, first = fates.pop(), additions[0]
        hint = f"add the value without its graph: `.detach()` or `.item()` in `{first.text}`"
        if fate == "never":
            message = f"`{first.text}` adds a loss with its graph to a sum through which no backward goes, so the graphs pile up"
            yield at("ACC309", first, message, help=hint, guilty=tuple(additions))
        elif fate == "own":
            message = f"`{first.text}` keeps the nodes of every micro-batch's graph, though their activations are freed"
            yield at("ACC309", first, message, help=hint, guilty=tuple(additions), severity=Severity.INFO)


def _fate(trace: Trace, addition: Event) -> str:
    """What becomes of the added term's graph: backpropagated in its "own" micro-batch, in a "later" one, "never", or "" where unknown."""
    forwards = set(addition.forwards)
    if not forwards:
        return ""
    through = [one for one in trace.of(Kind.BACKWARD) if forwards & set(one.forwards)]
    if not through:
        return "never"
    return "own" if all(one.micro_batch == addition.micro_batch for one in through) else "later"


def _repeated_call(trace: Trace, backward: Event) -> list[Event]:
    """The forwards behind a backward that come from the same call of the model, where it has run most often."""
    wanted = set(backward.forwards)
    calls: dict[Place, list[Event]] = {}
    for event in trace.of(Kind.FORWARD):
        if event.index in wanted:
            calls.setdefault(event.place, []).append(event)
    return max(calls.values(), key=len, default=[])


def _piece(forward: Event) -> tuple[int, ...]:
    """Which data a forward took: its inputs, or where those are not known its micro-batch."""
    return forward.data or (forward.micro_batch,)


def _uses_again(earlier: Event, later: Event) -> bool:
    return (
        earlier.retains_graph
        and later.index > earlier.index
        and later.micro_batch != earlier.micro_batch
        and bool(set(earlier.forwards) & set(later.forwards))
        and bool(set(later.forwards) - set(earlier.forwards))  # else it is another loss of the same forward
    )
