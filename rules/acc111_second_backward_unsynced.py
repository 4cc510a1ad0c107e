"""Two forwards of one DDP model, then two backwards: the second backward is not reduced.

## What it does
Reports a backward whose synchronised forward came before another backward of the same DDP model.

## Why is this bad?
A forward arms the reducer, and the next backward disarms it when it is done. If both forwards came first, the second backward finds
the reducer off and only adds the gradients of this rank. No error, no warning: the step uses a reduced part and a local part,
and the replicas drift apart.

## Example
```python
first, second = model(a), model(b)
criterion(first, y).backward()
criterion(second, y).backward()
optimizer.step()
```
Use instead:
```python
loss = criterion(model(a), y) + criterion(model(b), y)
loss.backward()
optimizer.step()
```
or run each backward right after its own forward.

## How it is measured
A backward with synchronisation on in which no bucket is reduced.

## When it is silent
One backward for both forwards; a later forward and backward of the same window that reduces the sum of both.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._sync import in_order, own_forwards, reduced_by_hand, trains
from accumlint.trace import Event, Trace, Window


@rule("ACC111", "second-backward-unsynced", Severity.ERROR, measured="a backward with synchronisation on and no bucket reduced")
def check(trace: Trace) -> Iterator[Finding]:
    for window in trace.all_windows():
        for first, second, forward in _left_local(trace, window):
            model = forward.model
            if model is not None and trains(window.optimizer, model) and not reduced_by_hand(window, second):
                yield at(
                    "ACC111",
                    second,
                    f"`{second.text}` is not reduced: `{forward.text}` ran before `{first.text}`, which switched the reducer "
                    f"of `{model.name}` off again",
                    help="add the losses and run one backward, or run each backward right after its own forward",
                    window=window,
                    guilty=(forward, first, second),
                )


def _left_local(trace: Trace, window: Window) -> Iterator[tuple[Event, Event, Event]]:
    """For each DDP model whose last backward of the window finds the reducer off: the backward before, this one, its forward."""
    disarmed: dict[int, Event] = {}
    local: dict[int, tuple[Event, Event, Event]] = {}
    for backward in in_order(window):
        for uid, forwards in own_forwards(trace, backward).items():
            latest, model = forwards[-1], forwards[-1].model
            if model is None or not model.wrapper.reads_flag_in_forward or latest.sync is not True:
                continue
            earlier = disarmed.get(uid)
            if earlier is None or latest.index > earlier.index:
                disarmed[uid] = backward
                local.pop(uid, None)
            elif latest.index not in earlier.forwards:
                local[uid] = (earlier, backward, latest)
    yield from local.values()
