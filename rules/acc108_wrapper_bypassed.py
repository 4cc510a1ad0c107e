"""The training forward goes round the data-parallel wrapper, so its gradients are never reduced.

## What it does
Reports a forward through `.module`, an unwrapped alias or a sub-module of a DDP model when a backward follows from it;
also a wrapper whose own forward is never called, because what was wrapped is only a container of parameters.

## Why is this bad?
The reducer is armed by the wrapper's own forward. A backward from any other forward fills `.grad` with the gradients of
this rank and nothing more: each replica trains alone. The loss falls on every rank, so nothing looks wrong.

## Example
```python
model = DistributedDataParallel(net)
features = model.module.encode(x)
loss = criterion(features, y)
loss.backward()
```
Use instead:
```python
class Training(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net.encode(x)

model = DistributedDataParallel(Training(net))
loss = criterion(model(x), y)
loss.backward()
```

## How it is measured
Parameters have gradients but no bucket was reduced, and the ranks' parameters differ after the step.

## When it is silent
Evaluation and generation, or whatever no backward follows; attributes and losses read from the unwrapped model;
a forward through the wrapper whose backward comes in the same window, no earlier, and reduces the sum; gradients
that are reduced by hand; FSDP, which does its work in the hooks of its sub-modules.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.rules._order import family, forwards_of, sureness
from accumlint.rules._sync import in_order, own_forwards, reduced_by_hand, trains
from accumlint.trace import Actor, Event, Kind, Trace, Window, Wrapper


@rule("ACC108", "wrapper-bypassed", Severity.ERROR, every_loop=True, measured="gradients without a reduced bucket; ranks diverge")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.fact("manual-reduce"):
        return
    yield from _gone_round(trace)
    yield from _never_called(trace)


def _gone_round(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    for window in trace.all_windows():
        for backward in window.backwards:
            if not view.means(backward, window.optimizer):
                continue
            for forward in forwards_of(trace, backward):
                model = forward.model
                if model is None or not forward.bypass or not _arms_in_forward(model):
                    continue
                if not forward.reaches or not trains(window.optimizer, model):
                    continue  # a critic that is frozen, or whose gradients this step does not use
                if reduced_by_hand(window, backward) or _reduced_later(trace, window, backward, model):
                    continue
                yield at(
                    "ACC108",
                    forward,
                    f"`{forward.text}` goes round the wrapper of `{model.name}`, whose forward arms the reduction: "
                    f"`{backward.text}` leaves every rank with the gradients of its own data",
                    help="call the wrapper itself; put what the call needs into the wrapped module's forward",
                    window=window,
                    confidence=sureness(trace, backward, window.step or backward, model, window.optimizer),
                    guilty=(forward, backward),
                )


def _reduced_later(trace: Trace, window: Window, backward: Event, model: Actor) -> bool:
    """Whether the same or a later backward of the window comes from the wrapper's own forward and takes these gradients along."""
    for other in window.backwards:
        if other.index >= backward.index:
            for forwards in own_forwards(trace, other).values():
                if forwards[-1].model is not None and family(forwards[-1].model) == family(model) and forwards[-1].sync is not False:
                    return True
    return False


def _never_called(trace: Trace) -> Iterator[Finding]:
    called = {family(event.model) for event in trace.of(Kind.FORWARD) if event.model is not None}
    actors = {actor.uid: actor for event in trace.events for actor in (*event.targets, *((event.model,) if event.model else ()))}
    actors.update({actor.uid: actor for actor in trace.actors})
    wrappers = [actor for actor in actors.values() if actor.base is not None and actor.known and _arms_in_forward(actor)]
    for window in trace.all_windows():
        for model in wrappers:
            if window.optimizer is None or window.optimizer.base not in {model.uid, model.base} or family(model) in called:
                continue
            backward = next((one for one in in_order(window) if one.reaches & {model.uid, family(model)}), None)
            forwards = forwards_of(trace, backward) if backward else ()
            if backward is not None and forwards and not reduced_by_hand(window, backward):
                trained = [forward for forward in forwards if forward.reaches] or forwards
                yield at(
                    "ACC108",
                    trained[-1],
                    f"`{backward.text}` gives gradients to the parameters of `{model.name}`, whose own forward is never called: "
                    f"its wrapper does not reduce them",
                    help="wrap the module whose forward is called in training, with these parameters in it",
                    window=window,
                    guilty=(trained[-1], backward),
                )


def _arms_in_forward(model: Actor) -> bool:
    return model.wrapper.reads_flag_in_forward or (model.wrapper is Wrapper.UNKNOWN and "prepared" in model.options)
