"""Means over different numbers of targets are averaged as if they were equal.

## What it does
Reports a loss that is a mean over the targets of its own micro-batch and is then divided by K, where the source shows
that the number of targets varies: padding, masked or ignored targets, sequences of different length.

## Why is this bad?
A target of a micro-batch with n valid targets gets the weight 1/(nK). Targets in short micro-batches count more than those
in long ones, so another objective is trained than the mean over all targets. Loss curves look healthy and all ranks agree:
nothing shows the difference but the gradient.

## Example
```python
for batch in window:
    logits = model(batch.ids)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100) / K
    loss.backward()
```
Use instead:
```python
targets = sum((batch.labels != -100).sum() for batch in window)
for batch in window:
    logits = model(batch.ids)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum")
    (loss / targets).backward()
```
With several ranks sum `targets` over them, and multiply the loss by the number of ranks, over which the gradients are
averaged.

## How it is measured
The coefficient of a target, read from the upstream gradient of the loss call, differs between micro-batches in the ratio
of 1/n.

## When it is silent
Nothing in the source lets the number of targets vary; only the ragged last batch differs; nothing produces the
`ignore_index`; each sequence has its own mean on purpose. Where a framework divides by K and offers no count of the
targets (Accelerate, DeepSpeed, Lightning's automatic optimisation, Composer below 0.24) the finding is an info; so it is for a
LightningModule or a Megatron loss function of which only the part that forms the loss is seen, and not that it accumulates.

## References
- <https://huggingface.co/blog/gradient_accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import loss_of
from accumlint.rules._division import (
    Contribution,
    Normalised,
    accumulating,
    normalised,
    setting,
    varies,
    without_term_weights,
)
from accumlint.trace import Event, Evidence, Kind, Place, Trace, Window
from accumlint.weight import Quantity, Weight


@rule("ACC201", "mean-of-means", Severity.ERROR, measured="coefficients differ between micro-batches or ranks in the ratio of 1/n")
def check(trace: Trace) -> Iterator[Finding]:
    windows = [(window, [(each, _uneven_means(trace, each)) for each in found]) for window, found in accumulating(trace)]
    otherwise = {each.backward.place for _, found in windows for each, means in found if not means}  # a mean in some micro-batches only
    for window, found in windows:
        averaged = [(each, means) for each, means in found if means and each.backward.place not in otherwise]
        if len({each.weight.share for each, _ in averaged}) != 1:
            continue
        for each, means in averaged:
            by_choice = trace.fact("may-count") is not None or any(not factor.implicit for factor in each.divisions)
            for mean, evidence in means:
                guilty, text = _division(each, mean, window)
                yield at(
                    "ACC201",
                    each.backward,
                    f"`{text or setting(trace)}` gives every micro-batch the same weight, but the number of targets varies "
                    f"({evidence.text or 'see the data'}): a target counts more in a micro-batch that has few",
                    help="sum the losses and divide by the number of valid targets of the whole window, over all ranks",
                    window=window,
                    place=guilty,
                    severity=None if by_choice else Severity.INFO,
                )


def _uneven_means(trace: Trace, contribution: Contribution) -> list[tuple[Weight, Evidence]]:
    """The means that are divided by K once, with what says that their n differs: those of a sum's terms, else the loss as a whole."""
    own = contribution.backward.weight or Weight(known=False)
    terms = [(term.weight, scaled.weight) for term, scaled in zip(own.terms, contribution.weight.terms, strict=False)]
    return _uneven(trace, terms) or _uneven(trace, [(own, contribution.weight)])


def _uneven(trace: Trace, pairs: list[tuple[Weight, Weight]]) -> list[tuple[Weight, Evidence]]:
    found = [(scaled, varies(trace, scaled)) for one, scaled in pairs if _mean_over_k(one, scaled)]
    return [(scaled, evidence) for scaled, evidence in found if evidence is not None]


def _mean_over_k(own: Weight, scaled: Weight) -> bool:
    """A mean divided by K once: undivided means are another mistake, and so are twice divided ones."""
    return scaled.power(Quantity.ACCUMULATION) == -1 and normalised(without_term_weights(own)) is Normalised.MICRO_BATCH


def _division(contribution: Contribution, mean: Weight, window: Window) -> tuple[Place, str]:
    """The division by K; where a framework divides the loss, and the backward where a model forms that itself."""
    for factor in reversed(contribution.divisions):
        if not factor.implicit and factor.place is not None:
            return factor.place, f"/ {factor.text}" if factor.text else ""
    backward = contribution.backward
    taken = next((factor for factor in mean.of(Quantity.UNITS) if factor.power < 0), None)
    loss = _behind(taken.place, backward, window) if taken is not None and taken.place is not None else loss_of(backward, window)
    if taken is not None and not taken.implicit and taken.place is not None and not _above(taken.place, backward, window):
        return taken.place, f"/ {taken.text}"
    if taken is None or taken.root == "model" or loss.place.path != backward.place.path:
        return backward.place, backward.text
    return loss.place, loss.text


def _behind(division: Place, backward: Event, window: Window) -> Event:
    """The loss that a division takes the mean of: the last one above it, where several are added up."""
    return max(_above(division, backward, window), key=lambda event: event.place.line, default=loss_of(backward, window))


def _above(division: Place, backward: Event, window: Window) -> list[Event]:
    own = [event for event in window.of(Kind.LOSS) if event.micro_batch == backward.micro_batch and event.index < backward.index]
    return [event for event in own if event.place.path == division.path == backward.place.path and event.place.line <= division.line]
