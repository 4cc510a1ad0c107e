"""`static_graph=True` and a first micro-batch inside `no_sync`: torch stops with an internal assert.

## What it does
Reports a DDP model built with `static_graph=True` whose very first training forward runs in `no_sync`.

## Why is this bad?
With a static graph the reducer learns the order of the gradients in its first synchronised iteration. If the first
iteration of training is not synchronised it has nothing to learn from, and the backward fails with
`expect_autograd_hooks_ INTERNAL ASSERT FAILED`, which says nothing about the cause.

## Example
```python
model = DistributedDataParallel(net, static_graph=True)
for i, (x, y) in enumerate(loader):
    with nullcontext() if (i + 1) % accumulation_steps == 0 else model.no_sync():
        loss = criterion(model(x), y) / accumulation_steps
        loss.backward()
```
Use instead:
```python
model = DistributedDataParallel(net)
```
or synchronise the whole first window.

## How it is measured
The run ends with that error; the report gives this explanation.

## When it is silent
The first micro-batch of training is synchronised: `no_sync` in later windows works.

## References
- https://github.com/pytorch/pytorch/issues/143580
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._sync import own_forwards, switch_before
from accumlint.trace import Kind, Trace


@rule("ACC110", "static-graph-no-sync", Severity.ERROR, measured="the internal assert of the first backward")
def check(trace: Trace) -> Iterator[Finding]:
    seen: set[int] = set()
    for backward in trace.of(Kind.BACKWARD):
        for uid, forwards in own_forwards(trace, backward).items():
            model = forwards[0].model
            if uid in seen or model is None:
                continue
            seen.add(uid)
            if "static_graph" in model.options and model.wrapper.reads_flag_in_forward and forwards[0].sync is False:
                switch = switch_before(trace, model, forwards[0])
                yield at(
                    "ACC110",
                    switch or forwards[0],
                    f"`{model.name}` has static_graph=True and its first micro-batch runs in no_sync: "
                    f"`{backward.text}` fails with an internal assert",
                    help="leave static_graph out, or synchronise every micro-batch of the first window",
                    guilty=(switch, forwards[0], backward) if switch is not None else (forwards[0], backward),
                )
