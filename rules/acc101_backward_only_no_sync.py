"""Only the backward runs inside `no_sync`, so DDP reduces on every micro-batch all the same.

## What it does
Reports a backward that runs inside `no_sync` (or with `require_backward_grad_sync` off) while the forward behind it ran
before the context was entered. The same holds for a backward inside `accelerator.accumulate` whose forward is outside.

## Why is this bad?
`DistributedDataParallel` reads its flag when the forward ends, not in the backward: a forward with the flag on arms the
reducer, and the backward then reduces every bucket whatever the flag says by that time. The code reads as if K - 1
of K reductions were saved; none is. The gradients are right, the traffic is K times what it should be.

## Example
```python
loss = criterion(model(x), y) / accumulation_steps
with model.no_sync() if not boundary else nullcontext():
    loss.backward()
```
Use instead:
```python
with model.no_sync() if not boundary else nullcontext():
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
```

## How it is measured
A communication hook counts the buckets that are reduced in each micro-batch. Buckets on a micro-batch that is not the
window's last, although its backward ran in `no_sync`, are this mistake.

## When it is silent
FSDP, FSDP2 and ZeRO read the flag in the backward: there a context around the backward alone works. It is silent as
well where the flag set this late reaches the next forward and leaves the window's last micro-batch unsynchronised:
that is ACC102, and it is worse. A frozen model reduces nothing, and a wrapper of unknown make may decide in the backward.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (`no_sync`: the forward
  pass has to be inside the context)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._order import family
from accumlint.rules._sync import in_order, is_frozen, own_forwards, unsynced_updates
from accumlint.trace import Actor, Event, Kind, Trace


@rule(
    "ACC101",
    "backward-only-no-sync",
    Severity.ERROR,
    measured="buckets reduced on a micro-batch off the boundary, though its backward was in no_sync",
)
def check(trace: Trace) -> Iterator[Finding]:
    said = {family(update.model) for update in unsynced_updates(trace)}
    asked = {None if event.model is None else family(event.model) for event in trace.of(Kind.SYNC_OFF)}
    for window in trace.all_windows():
        for backward in in_order(window)[:-1]:
            if backward.sync is not False:
                continue
            for forwards in own_forwards(trace, backward).values():
                model = forwards[-1].model
                if (
                    model is None
                    or family(model) in said
                    or not _decides_in_forward(model)
                    or not asked & {None, family(model)}
                    or is_frozen(backward, model)
                ):
                    continue
                if all(forward.sync is True for forward in forwards):
                    yield at(
                        "ACC101",
                        backward,
                        f"`{backward.text}` runs with synchronisation off, but `{model.name}` reads the flag in its forward, "
                        f"and `{_text(forwards[-1])}` ran with it on: the gradients are reduced on this micro-batch all the same",
                        help="enter the context before the forward, so that it holds the forward and the backward",
                        window=window,
                        guilty=(forwards[-1], backward),
                        place=backward.in_loop,
                    )


def _decides_in_forward(model: Actor) -> bool:
    # A prepared model's wrapper is chosen at launch; its framework asks for the forward inside the context in any case.
    return model.wrapper.reads_flag_in_forward or (not model.wrapper.reads_flag_in_backward and "prepared" in model.options)


def _text(forward: Event) -> str:
    return forward.text or "the forward"
