"""The micro-batches left at the end of a loader are never stepped on their own.

## What it does
Looks at the end of every pass over a loader whose length K does not divide. The last micro-batches have run their backward, but the
boundary test is not true for them, and then either a later statement zeroes their gradients or the next pass, whose index starts at 0
again, adds a full window on top of them. The finding stands at that test; where the loop only hands the test to a helper that steps, at
what clears the rest.

## Why is this bad?
Zeroed gradients are data that was paid for and thrown away, in every pass. Gradients that leak into the next pass make its first
window larger than K, so its update is too large and mixes two epochs. A loader shorter than K never updates the model at all.

## Example
```python
for epoch in range(epochs):
    for i, batch in enumerate(loader):
        (model(batch).mean() / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
```
Use instead:
```python
for epoch in range(epochs):
    for i, batch in enumerate(loader):
        first = i // accum * accum
        window = min(accum, len(loader) - first)
        (model(batch).mean() / window).backward()
        if i + 1 == first + window:
            optimizer.step()
            optimizer.zero_grad()
```

## How it is measured
A pass over the data ends inside a window, and the next event on those gradients is a zero, or a backward of the next pass whose window
closes later than a full one.

## When it is silent
- The loop over the loader is not repeated: at most K - 1 micro-batches are lost in a run.
- The loader does not end.
- The counter, or that of an engine, runs on over the epochs, so that the leftovers belong to a full window.
- The rest is cleared on purpose right after the loop, in the same epoch.
- The rest is dropped before its forward, or a loader of the project gives no more batches than fill whole windows.
- The first window is shorter than the next ones: then the boundary itself is wrong (ACC306), unless every pass begins so.

## References
- https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation
- https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import dropwhile, pairwise

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, gate_of
from accumlint.trace import Event, Guard, Kind, Place, Trace, Turn, Window

COUNTS_DOWN = re.compile(r">\s*0$")  # what a resumed run passes over lies at the beginning of its first pass
HELP = "step on the last batch too (`or i + 1 == len(loader)`) and divide that window by its own size, or drop the rest before its forward"


@rule(
    "ACC307",
    "tail-lost",
    Severity.WARNING,
    measured="a pass over the data ends inside a window whose gradients are then zeroed or mixed",
    exception="where a framework runs the loop, the script has no loop whose passes a run could tell apart",
)
def check(trace: Trace) -> Iterator[Finding]:
    if not trace.judges_tail or trace.fact("whole-windows") or _drops_the_rest(trace):
        return
    boundaries = Boundaries.of(trace)
    for optimizer in trace.optimizers:
        windows = tuple(
            dropwhile(lambda window: not boundaries.own(window), trace.windows(optimizer))
        )  # a step before the training fills none
        if windows and (_starts_with_a_full_one(boundaries, windows) or (trace.measured and _starts_late_each_pass(boundaries, windows))):
            for window in windows[1:]:
                yield from _leftovers(boundaries, windows[0], window)
        elif windows:
            yield from _left_by_a_late_start(boundaries, windows)
            yield from _left_by_a_running_count(trace, boundaries, windows)
            for window in windows[2:] if trace.measured and boundaries.size(windows[0]) == 1 else ():
                yield from _leftovers(boundaries, windows[1], window)


def _drops_the_rest(trace: Trace) -> bool:
    """Whether batches from some count on are passed over before their forward: `if step >= steps_per_epoch: continue`."""
    return any(
        guard.cause in {"gate", "counter"} and not guard.holds and ">" in guard.text and not COUNTS_DOWN.search(guard.text)
        for forward in trace.of(Kind.FORWARD)
        for guard in forward.guards
    )


def _starts_with_a_full_one(boundaries: Boundaries, windows: tuple[Window, ...]) -> bool:
    """Whether no window of the first pass is larger than the first; else the boundary itself is wrong (ACC306)."""
    own = [boundaries.own(window) for window in windows]
    if not own[0]:
        return False
    first = [_entries(one) for one in own[0]]
    sizes = [
        boundaries.size(window) for window, backwards in zip(windows, own, strict=True) if all(_entries(one) in first for one in backwards)
    ]
    return sizes[0] == max(sizes)


def _starts_late_each_pass(boundaries: Boundaries, windows: tuple[Window, ...]) -> bool:
    """Whether the first window of the first two passes ends after one micro-batch of its pass, and all others are of one size."""
    own = [boundaries.own(window) for window in windows]
    last = [backwards[-1].turns[-1:] for backwards in own if backwards]
    if len(last) < len(own) or not all(last):
        return False
    ends = [(turn.entry, turn.index) for (turn,) in last]
    firsts = [index for entry, index in ends if (entry, index) == min(each for each in ends if each[0] == entry)]
    inner = {boundaries.size(window) for window, backwards in zip(windows, own, strict=True) if backwards[-1].turns[-1].index > 0}
    return len(firsts) > 1 and set(firsts) == {0} and len(inner) == 1


def _left_by_a_late_start(boundaries: Boundaries, windows: tuple[Window, ...]) -> Iterator[Finding]:
    """A zero-based boundary closes each pass's first window after one micro-batch: a pass of 2K+1 ends on it, any other does not."""
    passes: dict[tuple[int, int], list[Window]] = {}
    for window in windows:
        turns = [turn for backward in boundaries.own(window) for turn in backward.turns[-1:]]
        around = {(turn.line, turn.entry) for turn in turns}
        if len(around) != 1 or any(turn.endless for turn in turns):
            return
        passes.setdefault(next(iter(around)), []).append(window)
    sizes = [[boundaries.size(window) for window in each] for each in passes.values()]
    if len(sizes) < 2 or len({line for line, _ in passes}) != 1:
        return
    if any(len(each) < 3 or each[0] != 1 or each[1] < 2 or set(each[1:]) != {each[1]} for each in sizes):
        return
    first, second = list(passes.values())[:2]
    step, begun = first[0].step, boundaries.own(second[0])[0]
    gate = gate_of(step) if step is not None else None
    if step is None or gate is None or (begun.turns[-1].last or "==" not in gate.text or " or " in gate.text):
        return
    yield at(
        "ACC307",
        step,
        f"`{gate.text}` closes a window only where the count of a pass happens to fit: the micro-batches left at its end are stepped or"
        " cleared with the first of the next pass",
        help=HELP,
        window=first[0],
        place=gate.place,
        confidence=boundaries.confidence(first[0].optimizer, boundaries.own(first[-1])[-1].index, begun.index),
    )


def _left_by_a_running_count(trace: Trace, boundaries: Boundaries, windows: tuple[Window, ...]) -> Iterator[Finding]:
    """A zero-based count that goes on from pass to pass: the first pass of 2K+1 ends on a boundary, any other does not, and is cleared."""
    sizes = [boundaries.size(window) for window in windows]
    if len(sizes) < 4 or sizes[0] != 1 or sizes[1] < 2 or set(sizes[1:]) != {sizes[1]}:
        return
    for previous, window in pairwise(windows[1:]):
        before, after = boundaries.own(previous)[-1], boundaries.own(window)[0]
        turn, gate = _crossed(before, after), gate_of(window.step) if window.step is not None else None
        if turn is None or gate is None or window.step is None or "==" not in gate.text or " or " in gate.text:
            continue
        between = [zero for zero in trace.of(Kind.ZERO) if before.index < zero.index < after.index]
        zeros = [zero for zero in between if len(zero.turns) < len(after.turns) and boundaries.acts_on(zero, window.optimizer)]
        fate = _discarded(zeros, before, after, turn) if zeros else ""
        if fate:
            yield at(
                "ACC307",
                window.step,
                f"`{gate.text}` holds at the end of a pass only where the count happens to fit: {fate}",
                help=HELP,
                window=window,
                place=gate.place,
                confidence=boundaries.stands_still(window.optimizer, before.index, after.index),
            )


def _entries(event: Event) -> list[tuple[int, int]]:
    return [(turn.line, turn.entry) for turn in event.turns]


def _leftovers(boundaries: Boundaries, first: Window, window: Window) -> Iterator[Finding]:
    own = boundaries.own(window)
    crossed_by_all = {turn.line for before, after in pairwise(boundaries.own(first)) if (turn := _crossed(before, after))}
    for before, after in pairwise(own):
        turn = _crossed(before, after)
        if turn is None or turn.line in crossed_by_all or window.step is None:
            continue
        zeros = [
            one for one in window.of(Kind.ZERO) if before.index < one.index < after.index and boundaries.acts_on(one, window.optimizer)
        ]
        if any(_clears_inside(boundaries, first, zero) for zero in zeros):
            continue
        counted = GATED in window.step.options  # by an engine, whose count goes on from one pass to the next
        fate = _discarded(zeros, before, after, turn) if zeros else "" if counted else _mixed(boundaries, first, own, after)
        if fate:
            gate = gate_of(window.step)
            missing = f"no step follows under `{gate.text}`" if gate else f"`{window.step.text}` takes no step"
            yield at(
                "ACC307",
                window.step,
                f"{missing} for the micro-batches left at the end of a pass over the loader: {fate}",
                help=HELP,
                window=window,
                guilty=(before, window.step),
                place=_place(window.step, gate, zeros),
                confidence=boundaries.stands_still(window.optimizer, before.index, after.index),
            )


def _place(step: Event, gate: Guard | None, zeros: list[Event]) -> Place:
    """The test; where it is only handed to a helper that steps, what throws the gradients away; else what the loop steps by."""
    call = step.in_loop
    if gate is None or gate.place.path != call.path:
        return call
    handed = call is not step.place and call.line <= gate.place.line <= max(call.line, call.end_line)
    thrown = [zero.place for zero in zeros if zero.place.path == call.path]
    return thrown[0] if handed and thrown else gate.place


def _clears_inside(boundaries: Boundaries, first: Window, zero: Event) -> bool:
    """Whether the same line clears in the middle of a full window as well, which is ACC302."""
    own = boundaries.own(first)
    return any(one.place == zero.place and own[0].index < one.index < own[-1].index for one in first.of(Kind.ZERO))


def _crossed(before: Event, after: Event) -> Turn | None:
    """The outermost loop that ended after the first event and was entered anew for the second."""
    for old, new in zip(before.turns, after.turns, strict=False):
        if old.line != new.line:
            return None
        if old.entry != new.entry:
            return None if old.endless else new
    return None


def _discarded(zeros: list[Event], before: Event, after: Event, turn: Turn) -> str:
    """What a zero between two passes discards; "" where it is a clean-up on purpose."""
    depth = after.turns.index(turn)
    for zero in zeros:
        within = zero.turns[depth : depth + 1]
        starts_next = bool(within) and (within[0].line, within[0].entry) == (turn.line, turn.entry)
        if not starts_next and _positions(zero.turns[:depth]) == _positions(before.turns[:depth]):
            return ""
    return f"`{zeros[0].text}` in {zeros[0].place.spoken} discards their gradients before any step"


def _mixed(boundaries: Boundaries, first: Window, own: tuple[Event, ...], after: Event) -> str:
    """What the next pass adds on top; "" where the leftovers belong to a window of the usual size."""
    size = boundaries.size(first)
    restart = len({one.micro_batch for one in own if one.index >= after.index})
    if restart != size or len({one.micro_batch for one in own}) == size:
        return ""
    return "the next pass adds a full window on top of their gradients before it steps"


def _positions(turns: tuple[Turn, ...]) -> list[tuple[int, int, int]]:
    return [(turn.line, turn.entry, turn.index) for turn in turns]
