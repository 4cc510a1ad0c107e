"""Only the forward runs inside `no_sync`, but this wrapper reads the flag in the backward.

## What it does
Reports, for FSDP, FSDP2 and ZeRO, a micro-batch before the window's last whose forward ran with synchronisation off and
whose backward ran with it on again.

## Why is this bad?
These wrappers decide in the backward whether gradients are reduce-scattered. A context that ends before the
backward suppresses nothing: each micro-batch reduces, and the code says otherwise.

## Example
```python
with model.no_sync() if not boundary else nullcontext():
    loss = criterion(model(x), y) / accumulation_steps
loss.backward()
```
Use instead:
```python
with model.no_sync() if not boundary else nullcontext():
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
```

## How it is measured
A reduce-scatter is seen on every micro-batch of the window.

## When it is silent
`DistributedDataParallel` reads the flag in the forward: there the context around the forward alone does what it says.
A flag that is switched on after the forward of the window's last micro-batch is right for these wrappers too.

## References
- https://docs.pytorch.org/docs/stable/fsdp.html (`no_sync`)
- https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (`set_requires_gradient_sync`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._sync import off_boundary, own_forwards
from accumlint.trace import Actor, Event, Trace, Window


@rule("ACC104", "forward-only-no-sync", Severity.ERROR, measured="a reduce-scatter on every micro-batch")
def check(trace: Trace) -> Iterator[Finding]:
    for window in trace.all_windows():
        for backward in off_boundary(window):
            for forwards in own_forwards(trace, backward).values():
                if forwards[-1].model and _suppresses_nothing(forwards, backward):
                    yield _finding(window, forwards[-1], backward, forwards[-1].model)


def _suppresses_nothing(forwards: list[Event], backward: Event) -> bool:
    model = forwards[-1].model
    if model is None or not model.wrapper.reads_flag_in_backward or backward.sync is not True:
        return False
    return all(forward.sync is False for forward in forwards)


def _finding(window: Window, forward: Event, backward: Event, model: Actor) -> Finding:
    return at(
        "ACC104",
        backward,
        f"`{forward.text or 'the forward'}` ran with synchronisation off, but `{model.name}` is {model.wrapper.value} and reads the flag "
        f"in `{backward.text}`, where it is on: the gradients are reduced on this micro-batch",
        help="keep the backward inside the same context as the forward",
        window=window,
        guilty=(forward, backward),
    )
