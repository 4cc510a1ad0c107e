"""A backward leaves gradients in the parameters of another optimizer, which then steps on them.

## What it does
With two or more optimizers, finds a backward that leads up to one optimizer's step but also writes gradients into the parameters of
another, where nothing clears them before that other optimizer's own backward and step.

## Why is this bad?
The typical case is a generator's loss, which flows through the discriminator: its gradients stay in the discriminator, with the sign that
helps the generator, and the discriminator's next step follows them. Without accumulation the usual `zero_grad()` right before the
discriminator's backward hides this. With accumulation that zero is only at the window's end, and every micro-batch leaks.

## Example
```python
for batch in micro_batches:
    fake = G(batch)
    (-D(fake).mean() / accum).backward()
    ((D(fake.detach()).mean() - D(batch).mean()) / accum).backward()
opt_g.step()
opt_d.step()
```
Use instead:
```python
for batch in micro_batches:
    fake = G(batch)
    D.requires_grad_(False)
    (-D(fake).mean() / accum).backward()
    D.requires_grad_(True)
    ((D(fake.detach()).mean() - D(batch).mean()) / accum).backward()
opt_g.step()
opt_d.step()
```

## How it is measured
Parameters of one optimizer receive gradients in a backward of the other, and they are still there at the step.

## When it is silent
- The other optimizer's gradients are zeroed before its own backward, also where a gate decides when.
- The path is cut: `detach()`, `requires_grad_(False)`, or a backward with `inputs=`.
- A joint loss for which all its optimizers step together, unless one of them is named as the adversary.

## References
- https://docs.pytorch.org/docs/stable/generated/torch.Tensor.requires_grad_.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from accumlint.findings import Confidence, Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import Boundaries, passes
from accumlint.trace import Actor, Event, Kind, Place, Role, Trace, Window

ADVERSARY = re.compile(r"discriminator|critic|adversar|(?:^|[_.])discs?(?:$|[_.\d])|(?:^|[a-z_.])D$", re.ASCII)
SHORT = (
    re.compile(r"(?:^|[_.])(?:net)?d$|(?:^|[_.])(?:opt(?:im(?:izer)?)?_?d|d_opt(?:im(?:izer)?)?)$", re.IGNORECASE),
    re.compile(r"gen|(?:^|[_.])(?:net)?g$|(?:^|[_.])(?:opt(?:im(?:izer)?)?_?g|g_opt(?:im(?:izer)?)?)$", re.IGNORECASE),
)
INPUTS = re.compile(r"\binputs\s*=")
FREEZES = "freezes"  # the code switches requires_grad, where it was not followed
HELP = "switch off `requires_grad` of the other model around this backward, or zero its gradients before its own backward"


@rule("ACC314", "cross-optimizer-leak", Severity.WARNING, measured="an optimizer steps on gradients that another optimizer's backward left")
def check(trace: Trace) -> Iterator[Finding]:
    if len(trace.optimizers) < 2:
        return
    boundaries = Boundaries.of(trace)
    sure = Confidence.MEDIUM if trace.fact(FREEZES) else Confidence.HIGH
    for optimizer in trace.optimizers:
        windows = trace.windows(optimizer)
        cleared: set[Place] = set()
        findings: list[tuple[Event, Finding]] = []
        for window in windows:
            own, foreign = _divided(trace, boundaries, window)
            for leak in foreign:
                zero = _zeroed(boundaries, window, leak, own)
                if INPUTS.search(leak.text) or (zero is not None and passes(leak) <= passes(zero)):
                    cleared.add(leak.place)
                elif own and zero is None:
                    findings.append((leak, _finding(boundaries, window, leak, sure)))
        yield from (finding for leak, finding in findings if leak.place not in cleared)
        if windows:
            yield from _later_optimizer(trace, boundaries, windows[0])


def _divided(trace: Trace, boundaries: Boundaries, window: Window) -> tuple[list[Event], list[Event]]:
    """The window's backwards for its own optimizer, and those of others that reach it."""
    own, foreign = list(boundaries.own(window)), list(boundaries.leaks(window))
    if foreign or window.optimizer is None or not _is_adversary(trace, window.optimizer):
        return own, foreign
    others = [one for one in trace.optimizers if one.uid != window.optimizer.uid and one.base != window.optimizer.base]
    joint = [one for one in own if any(boundaries.reaches(one, other) for other in others)]
    alone = [one for one in own if one not in joint]
    return (alone, joint) if alone else (own, [])


def _is_adversary(trace: Trace, optimizer: Actor) -> bool:
    names = _names(trace, optimizer)
    if any(ADVERSARY.search(name) for name in names):
        return True
    adversary, generator = SHORT  # one letter says little without the other one
    others = (name for one in trace.optimizers if one.uid != optimizer.uid for name in _names(trace, one))
    return any(map(adversary.search, names)) and any(map(generator.search, others))


def _names(trace: Trace, optimizer: Actor) -> tuple[str, ...]:
    """What an optimizer and its model are called."""
    models = (event.model for event in trace.of(Kind.FORWARD))
    return (optimizer.name, *{model.name for model in models if model is not None and optimizer.base in {model.uid, model.base}})


def _zeroed(boundaries: Boundaries, window: Window, leak: Event, own: Iterable[Event]) -> Event | None:
    """What clears the leaked gradients before the optimizer's own next backward, or before its step where none follows."""
    step = window.step.index if window.step is not None else leak.index
    end = min((one.index for one in own if one.index > leak.index), default=step)
    zeros = (zero for zero in window.of(Kind.ZERO) if leak.index < zero.index < end)
    return next((zero for zero in zeros if boundaries.acts_on(zero, window.optimizer)), None)


def _finding(boundaries: Boundaries, window: Window, leak: Event, sure: Confidence) -> Finding:
    name = window.optimizer.name if window.optimizer else "the optimizer"
    step = window.step or leak
    message = f"`{leak.text}` also leaves gradients in the parameters of `{name}`, which `{step.text}` in {step.place.spoken} follows"
    confidence = min(sure, boundaries.confidence(window.optimizer, leak.index, step.index))
    return at("ACC314", leak, message, help=HELP, window=window, guilty=(leak, step), confidence=confidence)


def _later_optimizer(trace: Trace, boundaries: Boundaries, first: Window) -> Iterator[Finding]:
    """An optimizer whose first step comes after others have finished finds in its parameters what their backwards left there.

    Whether those parameters were frozen until then is not always seen, hence the lower confidence.
    """
    optimizer, step = first.optimizer, first.step
    if optimizer is None or step is None:
        return
    others = [one for one in trace.of(Kind.STEP) if one.index < step.index and not one.concerns(optimizer)]
    finished = {target.uid for one in others for target in one.targets if target.role is Role.OPTIMIZER and target.base != optimizer.base}
    if not finished or any(one.index > step.index and finished & {target.uid for target in one.targets} for one in trace.of(Kind.STEP)):
        return
    handover = others[-1].index
    early = [one for one in trace.of(Kind.BACKWARD) if one.index < handover and boundaries.reaches(one, optimizer)]
    later = [one for one in first.backwards if one.index > handover]
    if not early or not later:
        return
    if not any(early[-1].index < zero.index < later[0].index and boundaries.acts_on(zero, optimizer) for zero in trace.of(Kind.ZERO)):
        yield _finding(boundaries, first, early[0], Confidence.MEDIUM)
