"""Under FSDP, no_sync keeps the gradients of the whole model on every rank.

## What it does
Notes a `no_sync` of a `FullyShardedDataParallel` model inside a window.

## Why is this bad?
The result is right. But without the reduce-scatter nothing is sharded: from the first micro-batch on each rank holds the gradients of
all parameters, W times what it holds otherwise, in the time when activations need the memory, too. Where FSDP was chosen because the
model does not fit, this is what brings the out-of-memory error back.

## Example
```python
with model.no_sync():
    criterion(model(x), y).backward()
```
Where memory is short, let every micro-batch synchronise: K reduce-scatters instead of one, and sharded gradients throughout.
Use instead:
```python
criterion(model(x), y).backward()
```

## How it is measured
`no_sync` of an FSDP model is entered inside a window.

## When it is silent
- DDP, whose gradients are whole anyway.
- FSDP2 and ZeRO.

## References
- https://docs.pytorch.org/docs/stable/fsdp.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.trace import Kind, Place, Trace, Wrapper


@rule("ACC106", "no-sync-keeps-full-gradients", Severity.INFO, measured="no_sync of an FSDP model inside a window")
def check(trace: Trace) -> Iterator[Finding]:
    seen: set[Place] = set()
    for window in trace.all_windows():
        for event in window.of(Kind.SYNC_OFF):
            if window.size >= 2 and event.model is not None and event.model.wrapper is Wrapper.FSDP1 and event.place not in seen:
                seen.add(event.place)
                yield at(
                    "ACC106",
                    event,
                    f"until the step every rank holds the gradients of the whole `{event.model.name}`, not of its shard.",
                    help="where memory is short, synchronise in every micro-batch",
                    window=window,
                )
