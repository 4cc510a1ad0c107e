"""Terms of one loss are normalised differently: one over the window, one not at all.

## What it does
Reports a term that is added to a loss which is divided by the targets of the whole window, when the term itself is not
divided: by the targets of the window, by K, by anything.

## Why is this bad?
The main loss is 1/N of a sum, so that the K backwards of a window add up to one mean. The other term enters with each of
them: K times. A regulariser or an auxiliary loss is then K times as strong as its coefficient says, and stronger still
when K is raised.

## Example
```python
for batch in window:
    loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum") / targets
    loss = loss + 0.01 * model.router_loss()
    loss.backward()
```
Use instead:
```python
for batch in window:
    loss = F.cross_entropy(model(batch.x), batch.y, reduction="sum") / targets
    loss = loss + 0.01 * model.router_loss() / len(window)
    loss.backward()
```
The same holds for a term that is added to what `super().compute_loss(…)` of a Transformers `Trainer` returns: that loss is
divided by `num_items_in_batch` already. Divide the term by `self.current_gradient_accumulation_steps`.

## How it is measured
The loss calls of one micro-batch have inconsistent coefficients: one is 1/N, the other 1/n or 1.

## When it is silent
The main loss is a mean that is divided by K after the terms were added; the term was given the count of the window, or is
divided by something; the term's formula holds a division that could not be followed.

## References
- <https://huggingface.co/blog/gradient_accumulation>
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity, at
from accumlint.rule import rule
from accumlint.rules._division import Normalised, accumulating, normalised, setting, without_term_weights
from accumlint.trace import Trace
from accumlint.weight import Quantity, Term, Weight

DIVISORS = (Quantity.ACCUMULATION, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS, Quantity.UNKNOWN, Quantity.INPUTS)
OVER_THE_WINDOW = (Normalised.LOCAL_WINDOW, Normalised.GLOBAL_WINDOW)


@rule(
    "ACC213",
    "auxiliary-term-scale",
    Severity.WARNING,
    measured="loss calls of one micro-batch with inconsistent coefficients",
    exception="a term that is no call of a loss function leaves no coefficient in a run",
)
def check(trace: Trace) -> Iterator[Finding]:
    k = setting(trace)
    for window, contributions in accumulating(trace):
        for each in contributions:
            terms = each.weight.terms
            main = next((term for term in terms if _spans_the_window(term.weight)), None)
            if main is None or any(term.weight.of(Quantity.ACCUMULATION) for term in terms):
                continue
            for term in terms:
                if term is not main and _is_raw(term, trace):
                    yield at(
                        "ACC213",
                        each.backward,
                        f"`{term.text}` is added to a loss that is divided by the targets of the whole window, and enters once for each "
                        f"micro-batch: it is `{k}` times as strong as it says",
                        help=f"divide the term by `{k}`",
                        window=window,
                        place=term.place,
                    )


def _spans_the_window(weight: Weight) -> bool:
    return normalised(without_term_weights(weight)) in OVER_THE_WINDOW


def _is_raw(term: Term, trace: Trace) -> bool:
    """Whether nothing divides a term but its own mean. A run sees the mean only: it takes any other number for a coefficient."""
    weight = without_term_weights(term.weight)
    if weight.of(*DIVISORS):
        return False
    if trace.measured:
        return weight.power(Quantity.UNITS) == -1
    return not any(factor.power < 0 for factor in weight.of(Quantity.CONSTANT))
