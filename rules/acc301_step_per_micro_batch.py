"""The loop means to accumulate, yet the optimizer steps after every micro-batch.

## What it does
Reports an optimizer step (or a second `accumulate` entry) that closes the window after one micro-batch while the code shows that a window
of K was meant: the loss carries 1/K, or the sync flag is switched off for the others.

## Why is this bad?
Nothing is accumulated. Each update uses 1/K of one micro-batch's gradient: with SGD the learning rate is K times too small, with Adam the
batch is K times too small and the optimizer steps K times too often. Schedules and step counts that were planned for updates end K times
early.

## Example
```python
for batch in loader:
    loss = model(batch) / accum_steps
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
```
Use instead:
```python
for i, batch in enumerate(loader):
    loss = model(batch) / accum_steps
    loss.backward()
    if (i + 1) % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```
With Accelerate, K given to `Accelerator(...)` divides in `accelerator.backward` whether or not the loop enters
`accelerator.accumulate(model)`; only the latter holds the prepared optimizer back. Every entry advances the window's counter, so two models
go into one call: `accelerator.accumulate(generator, discriminator)`.

## How it is measured
As many updates as backwards, while the loss that enters the backward carries 1/K.

## When it is silent
- The optimizer is prepared and steps inside `accumulate`, or an engine (DeepSpeed) holds its own step back.
- Only some windows have one micro-batch: a tail that is flushed, a first window that is cut short (ACC306).
- Several losses of one micro-batch share the division, or one backward goes through the summed losses of several.
- The step is taken in a gradient hook (ACC315).
- The step waits for the answer of something that could not be followed, or the optimizer is of an unknown make that was told
  of accumulation.
- `accumulate` calls stand in branches that exclude each other.

## References
- Accelerate, "Performing gradient accumulation": https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import GATED, Boundaries
from accumlint.rules._sync import second_entries
from accumlint.trace import Event, Kind, Trace, Window
from accumlint.weight import Factor, Quantity

CODE = "ACC301"
HELD_BACK = frozenset({GATED, "hook"})  # a step in a gradient hook is ACC315's


@rule(CODE, "step-per-micro-batch", Severity.ERROR, measured="as many updates as backwards while the loss carries 1/K")
def check(trace: Trace) -> Iterator[Finding]:
    yield from _second_entries(trace)
    view = Boundaries.of(trace)
    for optimizer in trace.optimizers:
        windows = [window for window in trace.windows(optimizer) if view.size(window)]
        if len(windows) < 2:
            continue
        if any(HELD_BACK & window.step.options for window in windows if window.step is not None):
            continue
        if all(_is_single(view, window) for window in windows):
            yield from _steady_singles(trace, view, windows)
        else:
            yield from _stray_steps(trace, view, windows)


def _steady_singles(trace: Trace, view: Boundaries, windows: list[Window]) -> Iterator[Finding]:
    """Every window holds one micro-batch."""
    if trace.fact("unclear-gate") or any(_asks_a_call(view, window) for window in windows):
        return
    if all(_share(trace, view, window) for window in windows):
        for window in windows:
            factor = _share(trace, view, window)
            if window.step is not None and factor is not None:
                yield _finding(window, f"{_who_divides(factor)}: each update uses a fraction of one micro-batch's gradient")
    elif _flag_toggles(trace, view, windows):
        for window in windows:
            if window.step is not None and any(one.sync is False for one in view.own(window)):
                yield _finding(window, "synchronisation is switched off for this one as if the window went on")


def _asks_a_call(view: Boundaries, window: Window) -> bool:
    """Whether the step waits for an answer that nobody followed, `self.every_n_iters(runner, k)`: that may be the boundary."""
    around = {guard.place for one in view.own(window) for guard in one.guards}
    guards = window.step.guards if window.step is not None else ()
    return any(guard.cause in {"setting", "unknown"} and "(" in guard.text and guard.place not in around for guard in guards)


def _stray_steps(trace: Trace, view: Boundaries, windows: list[Window]) -> Iterator[Finding]:
    """One task's step on a single 1/K micro-batch whose earlier micro-batches went into another task's step."""
    for previous, window in pairwise(windows):
        numbers, before = view.numbers(window), view.numbers(previous)
        if window.step is None or len(numbers) != 1 or len(before) < 2 or numbers[0] != before[-1]:
            continue
        shared = {one.place for one in view.own(previous) if one.micro_batch != numbers[0]}
        factor = _share(trace, view, window)
        if factor is not None and all(one.place in shared for one in view.own(window)):
            yield at(
                CODE,
                window.step,
                f"`{window.step.text}` uses one micro-batch, divided by {_divisor(factor)}: the earlier ones went into the step before it.",
                help="step once, after the backwards of all tasks",
                window=window,
            )


def _second_entries(trace: Trace) -> Iterator[Finding]:
    for event in second_entries(trace):
        yield at(
            CODE,
            event,
            f"`{event.text}` is the second accumulate entry of this micro-batch: each entry advances the window's counter.",
            help="enter it once with all models: `accumulate(model_a, model_b)`",
        )


def _is_single(view: Boundaries, window: Window) -> bool:
    """Whether the window holds one micro-batch, and each line's backward once."""
    own = view.own(window)
    return view.size(window) == 1 and len({one.place for one in own}) == len(own)


def _share(trace: Trace, view: Boundaries, window: Window) -> Factor | None:
    """The factor that leaves 1/K of this window's only micro-batch; None where the losses add up to a whole one."""
    own = view.own(window)
    if not _is_single(view, window):
        return None
    for backward in own:
        if len({trace.events[index].place for index in backward.forwards}) < len(backward.forwards):
            return None  # one backward for the summed losses of several micro-batches
        divisions = backward.weight.of(Quantity.ACCUMULATION) if backward.weight is not None else ()
        if (
            backward.weight is not None
            and divisions
            and _is_fraction(trace, backward.weight.share, backward.weight.power(Quantity.ACCUMULATION))
        ):
            return next((factor for factor in divisions if factor.power < 0), None)
    return None


def _is_fraction(trace: Trace, share: Fraction | None, power: int) -> bool:
    if share is None:
        return power == -1
    if trace.accumulation is not None:
        return trace.accumulation.value >= 2 and share == Fraction(1, trace.accumulation.value)
    return 0 < share < 1


def _flag_toggles(trace: Trace, view: Boundaries, windows: list[Window]) -> bool:
    """Whether the sync flag goes off and on over the micro-batches; always off with an average now and then is local SGD."""
    flags: set[bool | None] = {_sync(one) for window in windows for one in view.own(window)}
    return {True, False} <= flags and all("moving" in event.options for event in trace.of(Kind.AVERAGE))


def _sync(backward: Event) -> bool | None:
    return backward.sync


def _who_divides(factor: Factor) -> str:
    if factor.implicit:
        return f"the backward divides its loss by {_divisor(factor)}"
    return f"its loss is divided by {_divisor(factor)}"


def _divisor(factor: Factor) -> str:
    return f"`{factor.text}`" if factor.text else "K"


def _finding(window: Window, why: str) -> Finding:
    assert window.step is not None
    return at(
        CODE,
        window.step,
        f"`{window.step.text}` runs after every micro-batch, but {why}.",
        help="step and zero only where a window of K micro-batches ends",
        window=window,
    )
