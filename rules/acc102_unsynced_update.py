"""The optimizer steps on gradients that were never synchronised between the ranks.

## What it does
Reports a window whose last micro-batch still runs with synchronisation off: the forward for DDP, the backward for FSDP,
FSDP2 and ZeRO. Also an optimizer that steps inside a gradient hook of a DDP model, before the reducer has seen the gradient.

## Why is this bad?
Skipping the reduction is right for the first K - 1 micro-batches only because the last one reduces the sum of all. If
the last one does not, every rank steps on the gradients of its own data and the replicas drift apart. Nothing fails:
each rank's loss falls, and what is saved at the end is the model of rank 0, trained on 1/W of the data. With FSDP2 the
sharded `.grad` is even None, and the step changes nothing.

A flag that is set between the forward and the backward has the same effect under DDP: the forward of the last
micro-batch still sees the value that the micro-batch before left behind.

## Example
```python
loss = model(x, y) / accumulation_steps
model.require_backward_grad_sync = micro == accumulation_steps - 1
loss.backward()
```
Use instead:
```python
model.require_backward_grad_sync = micro == accumulation_steps - 1
loss = model(x, y) / accumulation_steps
loss.backward()
```

## How it is measured
No bucket is reduced in the window's last micro-batch, and the gradients or the parameters differ between the ranks
after the step.

## When it is silent
Gradients that are all-reduced by hand after the window; a call that could not be followed and is given the model between
the last backward and the step, for it may do that; a sync flag that waits for an answer that could not be followed.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
- https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (`set_requires_gradient_sync`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.rules._order import forwards_of, sureness
from accumlint.rules._sync import Unsynced, second_entries, switch_before, trains, unsynced_updates
from accumlint.trace import Actor, Event, Kind, Trace
from accumlint.weight import Quantity


@rule(
    "ACC102",
    "unsynced-update",
    Severity.ERROR,
    every_loop=True,
    measured="no bucket reduced in the window's last micro-batch; ranks differ after the step",
)
def check(trace: Trace) -> Iterator[Finding]:
    moved = next(second_entries(trace), None)  # a window that ends where nobody meant it to is ACC301's
    if trace.accumulates and moved is None and not trace.fact("averages-parameters"):
        updates = [update for update in unsynced_updates(trace) if not _steps_each(trace, update)]
        yield from (_unsynced(trace, update) for update in updates)
    yield from _steps_in_hooks(trace)


def _steps_each(trace: Trace, update: Unsynced) -> bool:
    """Whether the step follows every micro-batch, synchronised or not, of a loop that divides by K: that is ACC301's."""
    view = Boundaries.of(trace)
    windows = [window for window in trace.windows(update.window.optimizer) if view.size(window)]
    own = [one for window in windows for one in view.own(window)]
    divides = all(one.weight is not None and one.weight.of(Quantity.ACCUMULATION) for one in own)
    return divides and all(view.size(window) == 1 for window in windows) and {False, True} <= {one.sync for one in own}


def _unsynced(trace: Trace, update: Unsynced) -> Finding:
    model, step = update.model, update.window.step or update.backward
    switch = switch_before(trace, model, update.reader)
    where = "forward" if model.wrapper.reads_flag_in_forward else "backward"
    if switch is not None and _too_late(trace, update, switch):
        message = (
            f"`{switch.text or 'the flag'}` is set after the forward, which is where `{model.name}` reads it: the window's last "
            f"forward sees the value of the micro-batch before, and `{step.text}` uses gradients that no rank has shared"
        )
        help = "set the flag before the forward of the same micro-batch"
    else:
        message = (
            f"the {where} of the window's last micro-batch runs with synchronisation off, "
            f"so `{step.text}` updates `{model.name}` with gradients that no rank has shared"
        )
        help = f"leave synchronisation on for the {where} of the micro-batch that the step follows"
    return at(
        "ACC102",
        switch or step,
        message,
        help=help,
        window=update.window,
        confidence=sureness(trace, update.backward, step, model, update.window.optimizer),
        guilty=(switch, update.reader, step) if switch is not None else (update.reader, step),
        place=(switch or step).in_loop,
    )


def _too_late(trace: Trace, update: Unsynced, switch: Event) -> bool:
    """Whether the flag was set between a forward and its backward."""
    if not update.model.wrapper.reads_flag_in_forward or "flag" not in switch.options:
        return False
    backward = next((event for event in trace.of(Kind.BACKWARD) if event.index > switch.index), None)
    return backward is not None and any(forward.index < switch.index for forward in forwards_of(trace, backward))


def _steps_in_hooks(trace: Trace) -> Iterator[Finding]:
    wrapped: dict[int, Actor] = {}
    for event in trace.events:
        if event.kind is Kind.FORWARD and event.model is not None and event.model.wrapper.reads_flag_in_forward and not event.bypass:
            wrapped[event.model.uid] = event.model
        elif event.kind is Kind.STEP and "hook" in event.options:
            model = next((model for model in wrapped.values() if all(trains(target, model) for target in event.targets)), None)
            if model is not None:
                yield at(
                    "ACC102",
                    event,
                    f"`{event.text}` runs in a gradient hook, before `{model.name}` has reduced that gradient: "
                    f"every rank steps on the gradients of its own data",
                    help="step after the backward, or let the wrapper's own communication hook do it",
                )
