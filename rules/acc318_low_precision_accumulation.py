"""Gradients are summed in half precision over the micro-batches of a window.

## What it does
Notes a model whose parameters are float16 or bfloat16 themselves (not under autocast) in a loop that accumulates.

## Why is this bad?
`.grad` has the dtype of its parameter. bfloat16 keeps 8 bits: once the sum is 256 times as large as what is added, the addition is
lost. The more micro-batches, the less the last ones count.

## Example
```python
model = build().to(torch.bfloat16)
for batch in window:
    (model(batch) / accum_steps).backward()
```
Use instead:
```python
model = build()
for batch in window:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(batch) / accum_steps
    loss.backward()
```
or keep a float32 buffer of the gradients (`MixedPrecisionPolicy(reduce_dtype=torch.float32)`, main gradients of Megatron).

## How it is measured
The dtype of the parameters of the models that are trained.

## When it is silent
- Only modules are cast that this loop does not train.
- Autocast: the parameters, and so the gradients, are float32.

## References
- https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Kind, Trace


@rule("ACC318", "low-precision-accumulation", Severity.INFO, measured="parameters in float16 or bfloat16 inside a window")
def check(trace: Trace) -> Iterator[Finding]:
    if not any(window.size >= 2 for window in trace.all_windows()):
        return
    trained = {event.model.name.rsplit(".", 1)[-1] for event in trace.of(Kind.FORWARD) if event.model is not None and event.reaches}
    for evidence in trace.facts.get("low-precision-model", ()):
        if trace.measured or evidence.text in trained:
            yield Finding(
                "ACC318",
                evidence.place,
                f"`{evidence.text}` has parameters of half precision, and its gradients are summed in it.",
                help="keep the parameters in float32 and use autocast, or sum the gradients in float32",
            )
            return
