"""The test for the window's end is off: the first window is too short, or the test is inverted.

## What it does
Reports a boundary test after which the first window of the training has fewer micro-batches than the next ones: `i % K == 0` on a counter
that starts at zero, `(i + 1) % K == 0` on a counter that was already advanced, an inverted comparison, or a counter that advances only
under its own test, or is never set back, and so never reaches the next boundary, or never leaves the first (`pending >= K`). Where the
losses are divided by K also one after which the first window has K + 1 of them (`i % K == 0 and i > 0` from zero).

## Why is this bad?
The first update uses 1/K (or less than all) of a window with the full divisor, and all later windows are shifted, so that in every epoch
K-1 micro-batches are left over where none had to be. With an inverted test the optimizer steps on nearly every micro-batch and accumulates
only at the one place where it should step; with a stuck counter it steps once and then never again, or in every micro-batch from then on.

## Example
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if i % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, batch in enumerate(loader):
    (model(batch) / accum_steps).backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```

## How it is measured
The number of micro-batches of the first windows: the first is shorter than the next, or the first alone is a whole one.

## When it is silent
- K grows over a warm-up (1, 2, 3, …).
- The counter starts at one, or is advanced before the test.
- Only the last window of an epoch is short (ACC205, ACC307).
- Steps without any backward before them.

## References
- PyTorch, "Automatic mixed precision examples, gradient accumulation": https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries, gate_of, passes
from accumlint.trace import Actor, Event, Kind, Trace, Window
from accumlint.weight import Quantity

CODE = "ACC306"
NOT_ZERO = re.compile(r"> *0(?!\.)|!= *0|>= *1\b|\band +(not +)?[\w.]+ *(\)|$)|^\(?[\w.]+ +and\b")


COUNTER_IS = re.compile(r"\w+ *== *")  # a variable of the function's own, which nobody else sets back

UNLIKE = ("warm-up", "leaves-out", "windows-by-size")  # facts: K changes, batches are left out, or a window ends at a number of samples


@rule(CODE, "wrong-boundary", Severity.ERROR, measured="the first window is shorter than the next ones")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    for optimizer in trace.optimizers:
        windows = _first_pass(view, [window for window in trace.windows(optimizer) if view.size(window)])
        if not windows or windows[0].step is None or GATED in windows[0].step.options:
            continue
        why = (
            _short_start(trace, view, windows)
            or _long_start(trace, view, windows)
            or _inverted(trace, view, optimizer, windows)
            or _stuck(trace, view, optimizer)
            or _not_set_back(trace, view, windows)
        )
        if why:
            yield _finding(trace, windows[0], windows[0].step, why)


def _first_pass(view: Boundaries, windows: list[Window]) -> list[Window]:
    """The windows that lie in the first pass over the data."""
    if not windows:
        return []
    first = passes(view.own(windows[0])[0])
    return [window for window in windows if all(passes(one) == first for one in view.own(window))]


def _short_start(trace: Trace, view: Boundaries, windows: list[Window]) -> str:
    """The first window is short and all others are K, the pass's last perhaps flushed."""
    first, *rest = (view.size(window) for window in windows)
    if not rest or any(trace.fact(name) for name in UNLIKE):
        return ""
    full = trace.accumulation.value if trace.accumulation is not None else rest[0]
    steady = rest[0] == full and all(size == full for size in rest[:-1]) and rest[-1] <= full
    if not steady or first >= full:
        return ""
    return f"already holds after {_count(first)}: the first window is short, the next ones have {_k(trace, full)}"


def _long_start(trace: Trace, view: Boundaries, windows: list[Window]) -> str:
    """Losses are divided by K, but the first window has one micro-batch more."""
    k = trace.accumulation.value if trace.accumulation is not None else 0
    first, *rest = (view.size(window) for window in windows)
    if not rest or k < 2 or any(trace.fact(name) for name in UNLIKE) or not all(map(gate_of, _steps(windows))):
        return ""
    if any(one.weight is None or one.weight.share != Fraction(1, k) for window in windows for one in view.own(window)):
        return ""
    if first == k + 1 and all(size == k for size in rest) and all(map(_leaves_zero_out, _steps(windows))):
        return f"holds for the first time after {_count(first)}: the first window is too long, the next ones have {_k(trace, k)}"
    return ""


def _leaves_zero_out(step: Event) -> bool:
    """`i % K == 0 and i > 0`; without it, where the count starts is not known."""
    return any(NOT_ZERO.search(guard.text) for guard in step.guards)


def _steps(windows: list[Window]) -> list[Event]:
    return [window.step for window in windows if window.step is not None]


def _inverted(trace: Trace, view: Boundaries, optimizer: Actor, windows: list[Window]) -> str:
    """Of every K micro-batches all but one step."""
    k = trace.accumulation.value if trace.accumulation is not None else 0
    if k < 3:  # with K = 2 an inverted test looks like a short start
        return ""
    first = passes(view.own(windows[0])[0])
    numbers = [one.micro_batch for one in trace.of(Kind.BACKWARD) if passes(one) == first and view.means(one, optimizer)]
    order = {number: at for at, number in enumerate(dict.fromkeys(numbers))}
    stepped = {order[view.numbers(window)[-1]] for window in windows}
    missing = sorted(set(order.values()) - stepped)
    if len(order) < k + 1 or not missing or missing != list(range(missing[0], len(order), k)) or missing[0] >= k:
        return ""
    return f"holds on every micro-batch but one in {k}: the test is inverted"


def _stuck(trace: Trace, view: Boundaries, optimizer: Actor) -> str:
    """One step at the start, then none though more than a window's micro-batches follow."""
    windows, tail = trace.windows(optimizer), trace.tail(optimizer)
    if len(windows) != 1 or tail is None or trace.accumulation is None:
        return ""
    k = trace.accumulation.value
    step = windows[0].step
    gate = gate_of(step) if step is not None else None
    if step is None or gate is None or view.size(windows[0]) > k or view.size(tail) <= k:
        return ""
    whole = view.size(windows[0]) == k
    if whole and not COUNTER_IS.match(gate.text):
        return ""
    why = "is not set back" if whole else "does not advance between windows"
    return f"holds once, after {_count(view.size(windows[0]))}, and never again: its counter {why}"


def _not_set_back(trace: Trace, view: Boundaries, windows: list[Window]) -> str:
    """One whole window, then a step in every micro-batch, each of which brings a K-th of an update."""
    first, *rest = (view.size(window) for window in windows)
    if first < 2 or len(rest) < 2 or set(rest) != {1} or any(trace.fact(name) for name in UNLIKE):
        return ""
    if trace.fact("unclear-gate") or not all(map(gate_of, _steps(windows))):
        return ""
    if not all(one.weight is not None and one.weight.of(Quantity.ACCUMULATION) for window in windows for one in view.own(window)):
        return ""
    k = trace.accumulation
    count = f"`{k.text}` micro-batches" if k is not None and k.value == first else _count(first)
    return f"holds after {count}, and from there on in every one: its counter is not set back"


def _count(micro_batches: int) -> str:
    return "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"


def _k(trace: Trace, full: int) -> str:
    return f"`{trace.accumulation.text}`" if trace.accumulation is not None else str(full)


def _finding(trace: Trace, window: Window, step: Event, why: str) -> Finding:
    gate = gate_of(step)
    subject = f"`{gate.text}`" if gate is not None else f"the condition of `{step.text}`"
    k = trace.accumulation.text if trace.accumulation is not None else "K"
    return at(
        CODE,
        step,
        f"{subject} {why}.",
        help=f"count the micro-batches done: `(i + 1) % {k} == 0` with a counter from zero",
        window=window,
        place=gate.place if gate is not None else None,
    )
