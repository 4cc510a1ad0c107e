"""K is worked out from a global batch size without the number of ranks.

## What it does
Reports `K = global_batch_size // micro_batch_size` in a distributed script where the number of ranks has no part in it, and
`K = global_batch_size // (micro_batch_size * gpus_per_node)` where the script speaks of several nodes and K does not.

## Why is this bad?
Every rank takes micro-batches of its own, so an update already holds W of them: the batch becomes W times the one that was asked for, the
updates W times fewer, and the learning rate no longer fits. The mistake grows with each GPU that is added.

## Example
```python
accum_steps = args.global_batch_size // args.micro_batch_size
model = DistributedDataParallel(model)
```
Use instead:
```python
accum_steps = args.global_batch_size // (args.micro_batch_size * dist.get_world_size())
model = DistributedDataParallel(model)
```

## How it is measured
Not: a run does not know the batch that was asked for.

## When it is silent
- The number of ranks, GPUs or replicas appears in K, in what it is made of, or in a later line that changes it; that of the GPUs of one
  node alone where nothing speaks of several nodes.
- Nothing says that the numerator is the batch of all ranks.
- The script is not distributed.

## References
- PyTorch, "Distributed data parallel": https://docs.pytorch.org/docs/stable/notes/ddp.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Trace

MISSING = {
    "k-without-ranks": ("rank", "W times", "ranks"),
    "k-without-nodes": ("node", "once for each node", "nodes"),
}


@rule("ACC321", "wrong-k-derivation", Severity.WARNING, exception="a run does not know the batch that was asked for")
def check(trace: Trace) -> Iterator[Finding]:
    if not trace.accumulates or trace.fact("distributed") is None:
        return
    for fact, (whose, times, by) in MISSING.items():
        for evidence in trace.facts.get(fact, ()):
            yield Finding(
                "ACC321",
                evidence.place,
                f"`{evidence.text}` is a global batch over that of one {whose}: an update takes the batch that was asked for {times}.",
                help=f"divide by the number of {by}, too",
            )
