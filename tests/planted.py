"""Files with planted mistakes, for tests of everything round the rehearsal."""

from __future__ import annotations

import re
from collections.abc import Iterator

from accumlint.findings import Confidence, Finding
from accumlint.linter import Job
from accumlint.looking import Look
from accumlint.source.reading.parse import Source
from accumlint.trace import Place

LOOP = """\
for step, batch in enumerate(loader):
    loss = model(batch).mean() / accum
    loss.backward(){end}
    if (step + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
PLANTED = re.compile(r"plant: (ACC\d+)(?: (low|medium))?(?: (gave up))?")


def planted(source: Source) -> Iterator[Finding]:
    """A finding wherever a comment asks for one: `# plant: ACC202 medium`."""
    for line, text in enumerate(source.lines, 1):
        for match in PLANTED.finditer(text):
            column = len(text) - len(text.lstrip()) + 1
            place = Place(source.path, line, column, line, len(text.split("#")[0].rstrip()) + 1)
            yield Finding(match[1], place, f"planted {match[1]}", confidence=Confidence[(match[2] or "high").upper()])


def look(kept: Look, source: Source, job: Job) -> None:
    """Stands in for the linter's look at a file that parses."""
    from dataclasses import replace

    from accumlint.rule import catalogue

    rules = catalogue()
    kept.findings.extend(replace(finding, severity=rules[finding.code].severity) for finding in planted(source))
    if "raise: death" in source.text:
        import os

        os.kill(os.getpid(), 9)
    if "raise: time" in source.text:
        while True:
            pass
    kept.gave_up = "gave up" in source.text
