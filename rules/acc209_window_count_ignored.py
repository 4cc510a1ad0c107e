"""The framework counts the targets of the window and leaves the normalisation to a loss that ignores the count.

## What it does
Reports a loss that is the mean over its own micro-batch where the framework hands over the number of targets of the whole
window and does not divide by K: a `compute_loss` or `training_step` of a Transformers `Trainer` that drops
`num_items_in_batch`, a `compute_loss_func` that does not use it, or the forward of a model of the source that takes `**kwargs` and does
nothing with them; also where only one branch does (label smoothing).

## Why is this bad?
From Transformers 4.46 on a `Trainer` takes the loss of a model whose forward takes keywords as a sum divided by
`num_items_in_batch`, and adds up the K losses without dividing them. A mean in their place makes the gradient K times too
large, and a target counts more in a micro-batch that has few. A Trainer of 4.57 or newer also multiplies the loss of
`compute_loss_func` by the number of ranks.

## Example
```python
class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=self.weights)
        return (loss, outputs) if return_outputs else loss
```
Use instead:
```python
class WeightedTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), weight=self.weights, reduction="sum")
        loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss
```
Where a mean of means is meant, say so: `self.model_accepts_loss_kwargs = False` after `super().__init__(…)`, and the
Trainer divides by K.

## How it is measured
The Trainer's backward is that of a loss which it takes as it is, and the coefficients of the window sum to K instead of 1.

## When it is silent
K is never above 1. The Trainer divides: `model_accepts_loss_kwargs` or `loss_is_scaled_for_ga` is set to False, the model's
forward takes no keywords, the batches hold no labels. What the model or a base class of another file does is not seen. The
loss is divided by K or by the count, or its formula could not be followed. An override that cannot be handed the count
was written for releases below 4.46, which divide by themselves.

## References
- <https://huggingface.co/blog/gradient_accumulation>
- <https://huggingface.co/docs/transformers/main_classes/trainer>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._boundary import loss_of
from accumlint.rules._division import (
    TRUSTED,
    Contribution,
    Normalised,
    accumulating,
    normalised,
    setting,
    without_multipliers,
    without_term_weights,
)
from accumlint.trace import Trace
from accumlint.weight import Quantity, Weight


@rule(
    "ACC209",
    "window-count-ignored",
    Severity.ERROR,
    measured="coefficients of the window sum to K where the framework divides by nothing",
    exception="a mean that is no call of a loss function leaves no coefficient in a run",
)
def check(trace: Trace) -> Iterator[Finding]:
    for window, contributions in accumulating(trace):
        for each in contributions:
            if not _ignores_the_count(each):
                continue
            loss = loss_of(each.backward, window)
            term = next((term for term in each.weight.terms if each.weight.mixed and _is_mean(term.weight) and term.place), None)
            place, text = (term.place, term.text) if term is not None else (loss.place, loss.text)
            since = f" ({each.backward.note})" if each.backward.note else ""
            yield at(
                "ACC209",
                each.backward,
                f"`{text or 'the loss'}` is the mean of its own micro-batch and ignores the number of targets of the window: "
                f"the framework{since} does not divide it by `{setting(trace)}`, so the gradient is that many times too large",
                help="sum the loss and divide it by the count that is handed over, times the ranks, or tell the framework to divide",
                window=window,
                place=place,
            )


def _is_mean(weight: Weight) -> bool:
    return normalised(without_multipliers(weight)) is Normalised.MICRO_BATCH


def _ignores_the_count(contribution: Contribution) -> bool:
    """A mean that nothing divides, or a sum of which one term is such a mean and none is divided by K or by the window's count."""
    weight = contribution.weight
    if TRUSTED not in contribution.backward.options or weight.of(Quantity.ACCUMULATION):
        return False
    if not weight.mixed:
        return normalised(without_term_weights(weight)) is Normalised.MICRO_BATCH
    terms = [normalised(without_multipliers(term.weight)) for term in weight.terms]
    return Normalised.MICRO_BATCH in terms and all(each in {Normalised.MICRO_BATCH, Normalised.NOT} for each in terms)
