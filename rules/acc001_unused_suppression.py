"""A suppression that suppresses nothing.

## What it does
Reports a code in `# noqa: ACC…`, `# accumlint: ignore[…]` or `# accumlint: file-ignore[…]` under which nothing is found at
that place, that is no rule, or that is missing altogether.

## Why is this bad?
The comment says that a mistake was looked at and accepted. Once the mistake is gone, or where the code is misspelled, it
says something untrue, and it hides the next mistake on that line.

## Example
```python
loss = model(batch).mean() / accum
loss.backward()  # noqa: ACC202
```
Use instead:
```python
loss = model(batch).mean() / accum
loss.backward()
```

## How it is measured
It is not: comments do not run.

## When it is silent
Where the rule that the code names is off, where the training loop could not be followed to its end, and for a `# noqa`
without codes, which may be meant for another tool.

## References
- [Ruff: unused-noqa](https://docs.astral.sh/ruff/rules/unused-noqa/)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Trace


@rule("ACC001", "unused-suppression", Severity.WARNING, exception="about a comment, not about a trace: whoever reads the file reports it")
def check(trace: Trace) -> Iterator[Finding]:
    yield from ()
