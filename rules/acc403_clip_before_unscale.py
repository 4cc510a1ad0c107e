"""The gradients are clipped while they still carry the loss scale.

## What it does
Reports a clip between a scaled backward and the unscale or the scaler's step that takes the scale out again.

## Why is this bad?
The threshold is meant for the gradient's own norm. A scaled gradient is up to 65536 times larger, so the clip
always acts: every update is cut to the same length, divided by a scale that changes over the run. The effect is a learning rate that falls
whenever the scale grows. Nothing fails, and the logged norm is the only trace.

## Example
```python
scaler.scale(loss).backward()
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
```
Use instead:
```python
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
scaler.update()
```

In Lightning's manual optimisation the scaler is the precision's, and `optimizer.step()` unscales: a clip before it comes too early, also
`self.clip_gradients(...)`. Clip in `on_before_optimizer_step`, which runs between the two. Fabric's `clip_gradients` unscales first.

## How it is measured
A clip sees gradients that were not unscaled since the last scaled backward, and a step through the scaler follows.

## When it is silent
A disabled scaler; a threshold multiplied by the scale; fused optimizers that take the scale as an argument.

## References
- https://docs.pytorch.org/docs/stable/notes/amp_examples.html (gradient clipping)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._amp import takes_scale_out
from accumlint.rules._order import events_of, same_choice, sureness, works
from accumlint.trace import Actor, Event, Kind, Trace

SCALE = re.compile(r"\b(get_scale|(loss_)?scale)\b")

APEX = "scale-loss"  # inside apex's own context, which unscales when it is left


@rule("ACC403", "clip-before-unscale", Severity.ERROR, every_loop=True, measured="a clip of gradients that are not unscaled yet")
def check(trace: Trace) -> Iterator[Finding]:
    for optimizer in trace.optimizers:
        if "takes-scale" in optimizer.options:
            continue
        for backward, clip, end in _clipped_scaled(trace, optimizer):
            confidence = sureness(trace, backward, clip, backward.scaler, optimizer)
            yield at(
                "ACC403",
                clip,
                f"`{clip.text}` sees gradients that still carry the loss scale: only {_end(clip, end)} takes it out",
                help=_help(optimizer, backward, clip),
                confidence=confidence if same_choice(clip, end) else Confidence.MEDIUM,
                guilty=(backward, clip, end) if end is not clip else (backward, clip),
            )


def _end(clip: Event, end: Event) -> str:
    return "the end of the `scale_loss` block" if APEX in clip.options else f"`{end.text}`"


def _help(optimizer: Actor, backward: Event, clip: Event) -> str:
    if APEX in clip.options:
        return "clip after the `scale_loss` block"
    return f"call `{backward.scaler.name if backward.scaler else 'scaler'}.unscale_({optimizer.name})` before the clip"


def _clipped_scaled(trace: Trace, optimizer: Actor) -> Iterator[tuple[Event, Event, Event]]:
    """The scaled backward, the clip, and the unscale or step that shows the gradients to have been scaled until then."""
    scaled: Event | None = None
    last: Event | None = None
    unscaled = False
    clips: list[tuple[Event, Event]] = []
    for event in events_of(trace, optimizer):
        if event.kind is Kind.BACKWARD:
            last = event
            # Scaled gradients on top of unscaled ones are ACC402's: the scaler's step will not divide them again.
            if event.scaled and not unscaled and (event.scaler is None or works(event.scaler)):
                scaled = event
        elif event.kind is Kind.CLIP and last is not None and APEX in event.options:
            yield last, event, event
        elif event.kind is Kind.CLIP and scaled is not None and _plain(trace, event):
            clips.append((scaled, event))
        elif event.kind is Kind.UNSCALE or (event.kind is Kind.STEP and works(event.scaler)):
            for backward, clip in clips:
                yield backward, clip, event
            scaled, clips, unscaled = None, [], event.kind is Kind.UNSCALE and event.scaler is not None
        elif event.kind in {Kind.STEP, Kind.ZERO} or (event.kind is Kind.NORMALIZE and takes_scale_out(event)):
            scaled, clips, unscaled = None, [], False


def _plain(trace: Trace, clip: Event) -> bool:
    """A clip of gradients that are known to be this optimizer's, against a threshold that does not carry the scale."""
    return not SCALE.search(clip.text) and (bool(clip.targets) or len(trace.optimizers) == 1)
