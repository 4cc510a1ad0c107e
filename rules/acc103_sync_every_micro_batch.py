"""DDP reduces the gradients on every micro-batch of a window.

## What it does
Reports an accumulation loop over a `DistributedDataParallel` model in which micro-batches that no step follows run
with synchronisation on.

## Why is this bad?
The gradients are right: reducing a sum that is already reduced changes nothing but rounding. But each window pays K
reductions of the whole model where one would do. On a slow interconnect that is most of the step's time.

## Example
```python
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / accumulation_steps
    loss.backward()
    if (i + 1) % accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
```
Use instead:
```python
for i, (x, y) in enumerate(loader):
    boundary = (i + 1) % accumulation_steps == 0
    with nullcontext() if boundary else model.no_sync():
        loss = criterion(model(x), y) / accumulation_steps
        loss.backward()
    if boundary:
        optimizer.step()
        optimizer.zero_grad()
```

## How it is measured
The number of reduced buckets in a window is K times the number of buckets of the model.

## When it is silent
FSDP and ZeRO, where deferring the reduction costs the memory of full gradients and is a choice; `static_graph=True`,
which does not go with `no_sync`; features cached first and replayed chunk by chunk; a wrapper whose construction is
not seen, or that something unfollowed was told of together with K or the micro-batch. Where a launcher or a setting decides whether the
model is wrapped at all, it is only an information. If ACC101, ACC108 or ACC109 explains the reductions, they say so alone.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (`no_sync`)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries
from accumlint.rules._order import family, forwards_of, sureness
from accumlint.rules._sync import in_order, is_frozen, off_boundary, own_forwards, times
from accumlint.trace import Actor, Event, Kind, Trace, Window, Wrapper

WRITTEN = "written"  # strategy and number of processes stand in the source
AT_RUN_TIME = frozenset({"prepared", "optional"})  # the wrapper is a launcher's or a setting's choice


@rule("ACC103", "sync-every-micro-batch", Severity.WARNING, measured="buckets reduced on micro-batches off the boundary")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.fact("replays-features"):
        return
    explained = _explained_elsewhere(trace)
    view = Boundaries.of(trace)
    for window in trace.all_windows():
        own = {backward.index for backward in view.own(window)}  # not those of another model's loss, as in a GAN
        if view.size(window) < 2 or _gates_another_size(trace, view, window):
            continue
        for backward in _paid_for(window):
            if backward.index not in own or _is_thrown_away(view, window, backward):
                continue
            for forwards in own_forwards(trace, backward).values():
                model = forwards[-1].model
                if model is None or not _judged(model) or family(model) in explained or forwards[-1].sync is not True:
                    continue
                if not (trace.measured and is_frozen(backward, model)):
                    yield _finding(trace, window, backward, model)


def _finding(trace: Trace, window: Window, backward: Event, model: Actor) -> Finding:
    first = in_order(window)[0]
    begins = next(iter(forwards_of(trace, first)), first)
    return at(
        "ACC103",
        backward,
        f"`{model.name}` reduces its gradients in every backward, {times(trace)} an update, where once is enough",
        help=f"run the forward and the backward of all but the window's last micro-batch in `{model.name}.no_sync()`",
        window=window,
        place=backward.in_loop,
        confidence=Confidence.MEDIUM if "comm-hook" in model.options else sureness(trace, begins, backward, model),
        severity=Severity.INFO if model.options & AT_RUN_TIME and WRITTEN not in model.options else None,
    )


def _gates_another_size(trace: Trace, view: Boundaries, window: Window) -> bool:
    """Whether synchronisation is off for all but the K-th micro-batch, and only the rehearsal takes the window for a longer one."""
    if trace.measured or trace.accumulation is None:
        return False
    k = trace.accumulation.value
    flags = [one.sync for one in view.own(window)]
    return len(flags) > k >= 2 and flags[:k] == [False] * (k - 1) + [True]


def _is_thrown_away(view: Boundaries, window: Window, backward: Event) -> bool:
    """Whether what a backward adds is always zeroed before any step: a trial run that fills the memory."""
    around = {(guard.place, guard.holds) for guard in backward.guards}
    return window.step is not None and any(
        backward.index < zero.index < window.step.index
        and view.acts_on(zero, window.optimizer)
        and all((guard.place, guard.holds) in around for guard in zero.guards)
        for zero in window.of(Kind.ZERO)
    )


def _judged(model: Actor) -> bool:
    return model.known and model.wrapper.reads_flag_in_forward and "static_graph" not in model.options


def _paid_for(window: Window) -> Iterator[Event]:
    """Backwards of the micro-batches before the boundary.

    Left out are those in `no_sync` (its effect is another rule's) and the last turn of a loop: a code that synchronises
    there means to flush.
    """
    for backward in off_boundary(window):
        if backward.sync is not False and "replay" not in backward.options and not any(turn.last for turn in backward.turns[-1:]):
            yield backward


def _explained_elsewhere(trace: Trace) -> set[int]:
    """Families whose reductions other rules explain: gone round (ACC108), or no_sync asked of the wrong object (ACC109)."""
    forwards = trace.of(Kind.FORWARD)
    families = {family(event.model) for event in forwards if event.model is not None}
    bypassed = {family(event.model) for event in forwards if event.model is not None and event.bypass}
    models = [event.model for event in trace.of(Kind.SYNC_OFF)]
    asked = {None if model is None else family(model) for model in models if model is None or model.wrapper is not Wrapper.NONE}
    if models and not asked:
        return families  # it was asked of raw modules
    return bypassed | (families - {one for one in asked if one is not None} if asked else set())
