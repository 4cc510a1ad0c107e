"""A loss over the pairs of a batch is accumulated: the negatives are those of a micro-batch only.

## What it does
Notes a loss that tells each sample apart from the others of its batch, in a loop that accumulates: a cross entropy whose targets are
the positions in the batch (`arange(n)`), the diagonal of exponentiated similarities, a contrastive loss that is known by its name. One
that another file forms is noted where the loop computes it.

## Why is this bad?
Every sample is told apart from the others of its batch. K micro-batches of n give n - 1 negatives each, a batch of K * n gives K * n - 1:
another loss, not the same one in parts. No divisor makes them equal, and the gap grows with K.

## Example
```python
scores = queries @ documents.T
loss = F.cross_entropy(scores, torch.arange(len(queries)))
(loss / accum_steps).backward()
```
To have the negatives of the whole window, compute the features of all micro-batches without a graph first, the loss and its gradient on
them, and then replay each micro-batch with its part of that gradient (GradCache), or gather features of other ranks.
Use instead:
```python
with torch.no_grad():
    features = torch.cat([encode(batch) for batch in window]).requires_grad_()
contrastive_loss(features).backward()
for batch, gradient in zip(window, features.grad.split(batch_size)):
    encode(batch).backward(gradient)
```

## How it is measured
Not: a run does not tell what the targets of a loss mean.

## When it is silent
- Cached features are replayed.
- The loss is of another form; nothing else is looked for.

## References
- Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup": https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.rules._boundary import loss_of
from accumlint.trace import Place, Trace


@rule("ACC210", "batch-coupled-loss", Severity.INFO, exception="a run does not tell what the targets of a loss mean")
def check(trace: Trace) -> Iterator[Finding]:
    if trace.fact("replays-features") or not any(window.size >= 2 for window in trace.all_windows()):
        return
    for evidence in trace.facts.get("in-batch-negatives", ()):
        yield Finding(
            "ACC210",
            evidence.place if evidence.place.path == trace.path else _loss(trace),
            f"`{evidence.text}` compares the samples of one micro-batch with each other: accumulating gives no more negatives.",
            help="cache the features of the window and replay it, where its size matters",
        )


def _loss(trace: Trace) -> Place:
    """Where the file of the loop brings about a loss that another file forms."""
    window = next(window for window in trace.all_windows() if window.size >= 2)
    backward = window.backwards[0]
    terms = backward.weight.terms if backward.weight is not None else ()
    added = [term.place for term in terms if term.place is not None and term.place.path == trace.path]
    loss = loss_of(backward, window)
    return added[-1] if added else loss.place if loss.place.path == trace.path else backward.in_loop
