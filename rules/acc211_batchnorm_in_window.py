"""Batch normalisation sees micro-batches, not the batch that the window stands for.

## What it does
Notes a BatchNorm (SyncBatchNorm, too) in a model that is trained with accumulation.

## Why is this bad?
Mean and variance are taken over one micro-batch: the outputs, and so the gradients, are not those of the large batch, whatever the loss
is divided by. The running statistics move K times an update. SyncBatchNorm widens the batch to the micro-batches of all ranks, not to
the window.

## Example
```python
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
```
Where micro-batches are small, take a normalisation that does not look at the batch.
Use instead:
```python
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU())
```
or freeze the statistics, or keep micro-batches of 16 and more.

## How it is measured
BatchNorm modules in training mode in the forward of a window's micro-batches.

## When it is silent
- The module switches its BatchNorms to evaluation.
- The window has one micro-batch.

## References
- Wu and He, "Group Normalization": https://arxiv.org/abs/1803.08494
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Trace


@rule("ACC211", "batchnorm-in-window", Severity.INFO, measured="BatchNorm modules in training mode inside a window")
def check(trace: Trace) -> Iterator[Finding]:
    evidence = trace.fact("batchnorm")
    if evidence is not None and any(window.size >= 2 for window in trace.all_windows()):
        yield Finding(
            "ACC211",
            evidence.place,
            f"`{evidence.text}` normalises over each micro-batch alone, so that the window is not one large batch.",
            help="use a normalisation that does not look at the batch, or keep micro-batches large",
        )
