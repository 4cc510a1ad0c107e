"""A resumed run skips as many micro-batches as it had made updates.

## What it does
Reports the number of batches that a resumed loop skips (`if step < resume_step: continue`, `skip_first_batches(loader, n)`) when it goes
back to a counter of updates that nothing multiplies by K, or that is multiplied by K twice.

## Why is this bad?
An update takes K micro-batches. A run that stops after 1000 updates with K = 8 has seen 8000 batches; resumed so, it skips 1000 of them and
trains on the other 7000 again, while the end of the pass comes K times too late for the schedule. With K twice it leaves data out.

## Example
```python
if step < updates_done:
    continue
...
if (step + 1) % accum_steps == 0:
    optimizer.step()
    updates_done += 1
```
Use instead:
```python
batches_done = updates_done * accum_steps
...
if step < batches_done:
    continue
```

## How it is measured
Not: a run does not know what it should have skipped.

## When it is silent
- The counter counts micro-batches, or what it is cannot be told.
- It is multiplied by K on the way.
- Offsets of progress bars and of logs.

## References
- Accelerate, "Checkpointing": https://huggingface.co/docs/accelerate/usage_guides/checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Evidence, Kind, Trace

NEAR = 200  # lines
WRONG = {
    "skips-in-updates": ("was counted in updates: each of them took K micro-batches", "multiply the number of updates by K"),
    "skips-k-twice": ("has K in it twice: a number of updates times K is the number of micro-batches", "multiply by K once"),
}


@rule("ACC317", "resume-unit-mismatch", Severity.WARNING, exception="a run does not know what it should have skipped")
def check(trace: Trace) -> Iterator[Finding]:
    if not any(window.size >= 2 for window in trace.all_windows()):
        return
    for name, (what, help_) in WRONG.items():
        for evidence in trace.facts.get(name, ()):
            if _concerns(trace, evidence):
                yield Finding("ACC317", evidence.place, f"`{evidence.text}` micro-batches are skipped, but it {what}.", help=help_)


def _concerns(trace: Trace, evidence: Evidence) -> bool:
    """Whether the skip stands in one of the loops of this trace, or before them in the same function."""
    loops = [turn.line for event in trace.of(Kind.BACKWARD)[:1] for turn in event.turns]
    last = max((event.place.line for event in trace.events), default=0)
    return bool(loops) and evidence.place.line <= last and abs(evidence.place.line - loops[-1]) < NEAR
