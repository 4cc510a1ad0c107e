"""A file that cannot be read as Python.

## What it does
Reports a file that does not parse: a syntax error, Python 2, bytes that are not text in the declared encoding, null
bytes, nesting too deep to follow, or a file whose linting had to be ended.

## Why is this bad?
Nothing else can be said of the file. A clean report that passed over it would promise more than was checked.

## Example
```python
for step, batch in enumerate(loader)
    loss = model(batch).mean()
```
Use instead:
```python
for step, batch in enumerate(loader):
    loss = model(batch).mean()
```

## How it is measured
It is not: a script that does not parse does not run.

## When it is silent
In a folder only files that hold the words of a training loop are parsed; of the others, those that are not text are
reported and syntax errors are left to the tools that parse everything. A file named on the command line is always parsed.

## References
- [Python: encoding declarations](https://docs.python.org/3/reference/lexical_analysis.html#encoding-declarations)
"""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.findings import Finding, Severity
from accumlint.rule import rule
from accumlint.trace import Trace


@rule("ACC000", "unreadable-file", Severity.ERROR, exception="about the file, not about a trace: whoever reads the file reports it")
def check(trace: Trace) -> Iterator[Finding]:
    yield from ()
