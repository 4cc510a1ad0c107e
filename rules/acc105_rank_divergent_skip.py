"""A condition that can differ between ranks skips a forward, a backward or a step.

## What it does
In a distributed loop, reports a `continue`, a guard around the backward, or a handler that swallows an exception, when
what decides is known to one rank only: its data, its loss, its clock, its memory, its number.

## Why is this bad?
Collectives are matched by order. A rank that leaves out a synchronised forward or backward is one reduction behind the
others: they wait for it until the time-out, or, if it goes on with its next batch, ranks reduce gradients of
different micro-batches with each other from then on. A skipped step leaves the replicas with different parameters.

## Example
```python
loss = criterion(model(x), y)
if not torch.isfinite(loss):
    continue
loss.backward()
```
Use instead:
```python
loss = criterion(model(x), y)
bad = (~torch.isfinite(loss)).float()
dist.all_reduce(bad, op=dist.ReduceOp.MAX)
if bad.item():
    continue
loss.backward()
```

## How it is measured
The ranks differ in the forwards, backwards or batches of an update, or in the number of updates; after a time-out the
report names the ranks that are behind and what they wait in.

## When it is silent
The value was all-reduced or broadcast before; the other branch runs the backward too, with the loss multiplied by 0 (a fresh
`torch.zeros((), requires_grad=True)` has no graph and is reported); the branch raises or exits; only the step is
skipped, on a gradient norm or an overflow, which are the same on all ranks once the gradients are reduced; each rank takes its
share of the batches by their numbers (`i % world_size == rank`); the skip can fall only on micro-batches that are not
synchronised, in a run of one process that makes no wrapper, or only on backwards of a model that no wrapper synchronises, whose
gradients are reduced by hand before the step; one rank updates something of its own (a multiplier) and broadcasts it right after;
the condition is the answer of a function that could not be followed and was given the data or the loss, for it may ask the other
ranks.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Event, Kind, Trace, Wrapper

CAUSES = {
    "data": "depends on the data of this rank",
    "rank": "depends on the rank",
    "clock": "depends on the clock of this rank",
    "memory": "depends on the memory of this rank",
    "exception": "is an exception of this rank alone",
}
WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.STEP: "step"}
AGREED = frozenset({"agreed", "zero-loss"})
OF_GRADIENTS = re.compile(r"norm|grad|overflow|found_inf", re.IGNORECASE)


@rule("ACC105", "rank-divergent-skip", Severity.ERROR, every_loop=True, measured="ranks differ in the number of backwards or steps")
def check(trace: Trace) -> Iterator[Finding]:
    if not _distributed(trace) or not trace.of(Kind.STEP):  # without a step gradients are looked at, and nothing is trained
        return
    for skip in trace.of(Kind.SKIP):
        guard = skip.guard
        if guard is None or guard.cause not in CAUSES or not _diverges(trace, skip):
            continue
        words = " and ".join(f"its {word}" for kind, word in WORDS.items() if kind in skip.skipped)
        yield at(
            "ACC105",
            skip,
            f"`{guard.text}` {CAUSES[guard.cause]}, and a rank that takes this way leaves out {words} and goes on: "
            f"the others wait for it, or reduce with the wrong micro-batch",
            help="agree on the decision over all ranks (all_reduce it), or run the backward everywhere with the loss multiplied by 0",
            place=guard.place,
        )


def _distributed(trace: Trace) -> bool:
    models = (event.model for event in trace.of(Kind.FORWARD))
    wrapped = any(model is not None and model.wrapper not in {Wrapper.NONE, Wrapper.UNKNOWN} for model in models)
    alone = trace.fact("makes-wrapper") is not None  # it is made elsewhere than in this world: a world of one process
    return wrapped or (trace.fact("distributed") is not None and not alone)


def _diverges(trace: Trace, skip: Event) -> bool:
    if skip.options & AGREED or skip.leaves == "raise":
        return False
    if not skip.skipped & WORDS.keys():
        return False
    if "told-to-all" in skip.options and skip.guard is not None and skip.guard.cause == "rank" and Kind.FORWARD not in skip.skipped:
        return False
    if not skip.skipped & {Kind.FORWARD, Kind.BACKWARD} and skip.guard is not None and _on_gradients(skip.guard.text):
        return False
    return not (_unsynchronised(trace, skip) or _reduced_once(trace, skip))


def _reduced_once(trace: Trace, skip: Event) -> bool:
    """Whether no wrapper reduces anything, and the reduction by hand comes at the step, which every rank reaches."""
    models = (event.model for event in trace.of(Kind.FORWARD))
    by_hand = trace.fact("manual-reduce") is not None or trace.fact("reduces-by-hand") is not None
    return by_hand and Kind.STEP not in skip.skipped and all(model is None or model.wrapper is Wrapper.NONE for model in models)


def _on_gradients(text: str) -> bool:
    """Gradients are the same on all ranks once they are reduced, and so is what is computed from them."""
    return OF_GRADIENTS.search(text) is not None


def _unsynchronised(trace: Trace, skip: Event) -> bool:
    """Whether the micro-batch that is left out would not have been reduced anyway."""
    forwards = [event for event in trace.of(Kind.FORWARD) if event.micro_batch == skip.micro_batch]
    return bool(forwards) and all(forward.sync is False for forward in forwards) and Kind.STEP not in skip.skipped
