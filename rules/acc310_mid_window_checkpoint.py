"""A checkpoint to resume from is written inside a window, while gradients wait for their step.

## What it does
Reports a save that includes the optimizer's state and happens after some micro-batches of a window have run their backward, but before the
step that uses them.

## Why is this bad?
Checkpoints hold parameters and the optimizer's state, not `.grad`. A run that is resumed from the middle of a window has lost the
micro-batches before the save: their data counts as seen, its gradients are gone. The next update then rests on a shortened window whose
losses are still divided by K. The resumed run is another run, and nothing says so. Where the counter that numbers checkpoints counts
updates, the same checkpoint is also written once for every micro-batch until the counter moves on.

## Example
```python
for step, batch in enumerate(loader, start=1):
    (model(batch) / accum_steps).backward()
    if step % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
    if step % save_every == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path)
```
Use instead:
```python
for step, batch in enumerate(loader, start=1):
    (model(batch) / accum_steps).backward()
    if step % accum_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
        updates += 1
        if updates % save_every == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "updates": updates}, path)
```
With Accelerate, save under `if accelerator.sync_gradients:`.

## How it is measured
A save call that includes an optimizer's state dict between two backwards of one window.

## When it is silent
- Only weights are saved: an export is as good between two micro-batches as after the step, for the parameters are the same.
- The save follows the last batch, or the end of a pass over the data (what is left over there is ACC307's).
- The save is conjoined with the boundary, or its period is a multiple of the window.
- The save waits for an answer that could not be followed (`if should_save(i):`).
- It stands in the handler of an exception or an interrupt: losing a part of a window is then the smaller loss.
- `save_every` is in place and divisible by a K in place.

## References
- PyTorch, "Saving and Loading a General Checkpoint": https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html
- Accelerate, "Checkpointing": https://huggingface.co/docs/accelerate/usage_guides/checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries, passes
from accumlint.trace import Event, Kind, Place, Trace, Window

CODE = "ACC310"
OPTIMIZER_STATE = "optimizer-state"
UNPLANNED = frozenset({"exception"})


@rule(CODE, "mid-window-checkpoint", Severity.WARNING, measured="a save with an optimizer's state between two backwards of a window")
def check(trace: Trace) -> Iterator[Finding]:
    view = Boundaries.of(trace)
    seen: set[Place] = set()
    for window in trace.all_windows():
        own = view.own(window)
        if not own or window.step is None:
            continue
        for save in window.of(Kind.SAVE):
            if save.place in seen or OPTIMIZER_STATE not in save.options or any(one.cause in UNPLANNED for one in save.guards):
                continue
            if _inside(view, own, save) or _before_flush(own, save, window.step):
                seen.add(save.place)
                yield _finding(view, window, own, save, window.step)


def _inside(view: Boundaries, own: tuple[Event, ...], save: Event) -> bool:
    """Whether the save comes between two micro-batches of the window, in the very loop that runs them."""
    before = [one for one in own if one.index < save.index]
    return view.between_micro_batches(own, save) and passes(before[-1]) <= passes(save)


def _before_flush(own: tuple[Event, ...], save: Event, step: Event) -> bool:
    """Whether the loop over the batches has ended, and the step for what it left comes only after the save."""
    last = own[-1]
    return last.index < save.index < step.index and not passes(last) <= passes(save) and not passes(last) <= passes(step)


def _finding(view: Boundaries, window: Window, own: tuple[Event, ...], save: Event, step: Event) -> Finding:
    waiting = len({one.micro_batch for one in own if one.index < save.index})
    what = "a micro-batch" if waiting == 1 else f"{waiting} micro-batches"
    return at(
        CODE,
        save,
        f"`{save.text}` writes a checkpoint while the gradients of {what} wait for `{step.text}`: no checkpoint holds them.",
        help=f"save right after `{step.text}`, under the condition of the boundary, and count updates",
        window=window,
        confidence=view.stands_still(window.optimizer, own[0].index, save.index),
    )
