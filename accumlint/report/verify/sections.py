"""The report for people, in order: the verdict, the checks, the findings, the updates, how the ranks ended, the limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumlint.report.terminal import Line, Span, Tone, escape, paragraph
from accumlint.report.text import MAX_TEXT, Rules, Sources, block
from accumlint.report.verify import figures
from accumlint.report.verify.endings import endings
from accumlint.report.verify.grouping import Grouping
from accumlint.report.verify.tables import Column, Table
from accumlint.report.verify.updates import updates_section
from accumlint.verdict import Check, Measurement, State, Status, Topic, Verdict

TONES = {State.CONFIRMED: Tone.LIVE, State.VIOLATED: Tone.ERROR, State.NOT_OBSERVED: Tone.WARNING}
STATUS_TONES = {Status.CONFIRMED: Tone.LIVE, Status.VIOLATED: Tone.ERROR, Status.FAILED: Tone.ERROR, Status.UNPROVED: Tone.WARNING}
WIDE = 90  # from here on the checks stand in columns
ORDER = {topic: at for at, topic in enumerate(Topic)}


def sections(
    measurement: Measurement, verdict: Verdict, rules: Rules, sources: Sources, *, width: int, root: Path, ranks: Grouping
) -> Iterator[Line | Table]:
    """Everything, as lines and tables."""
    text = min(width, MAX_TEXT)
    yield from head(measurement, verdict, text)
    yield []
    if measurement.checks:
        yield from _checks(in_order(measurement.checks), width)
        yield []
    for finding in measurement.findings:
        yield from block(finding, rules, sources, width, root)
        yield []
    if measurement.updates:
        yield from updates_section(measurement.updates, ranks, text, root)
        yield []
    if measurement.ranks:
        yield from endings(measurement.ranks, ranks, width)
        yield []
    if measurement.limits:
        yield [Span("Limits", Tone.STRONG)]
        for limit in measurement.limits:
            yield from paragraph(escape(limit), text, first="  - ", rest="    ")
        yield []
    yield closing(measurement)


def in_order(checks: Sequence[Check]) -> list[Check]:
    return sorted(checks, key=lambda check: ORDER[check.topic])


def head(measurement: Measurement, verdict: Verdict, width: int) -> Iterator[Line]:
    """What the run comes to, how far it got, and what it ran on."""
    yield [Span(str(verdict.status).upper(), STATUS_TONES[verdict.status]), Span(f": {_progress(measurement)}")]
    failed = "" if measurement.failed is None else f"The script failed by itself with exit status {measurement.failed}."
    for sentence in dict.fromkeys((verdict.reason, measurement.problem, failed)):
        yield from paragraph(escape(sentence), width, first="  ", rest="  ")
    environment = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in _scalars(measurement.environment))
    yield from paragraph(escape(environment), width, first="  ", rest="  ", tone=Tone.DIM)


def closing(measurement: Measurement) -> Line:
    """The counts, in one sentence."""
    counts = Counter(check.state for check in measurement.checks)
    return [Span(", ".join(f"{counts[state]} {state.value}" for state in State) + ".", Tone.STRONG)]


def _progress(measurement: Measurement) -> str:
    if not measurement.ranks:
        return "no rank reported"
    made = figures.span((end.updates for end in measurement.ranks), figures.number)
    wanted = f"{made} of {measurement.wanted}" if measurement.wanted else made
    return f"{wanted} {'update' if wanted in {'1', '1 of 1'} else 'updates'} on {figures.count(len(measurement.ranks), 'rank')}"


def _scalars(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What of measured data fits a line."""
    for key, value in numbers.items():
        if isinstance(value, float):
            yield str(key), figures.number(value)
        elif isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
            if value:
                yield str(key), " ".join(value)
        elif isinstance(value, (bool, int, str)) and value != "":
            yield str(key), str(value)


def _checks(checks: Sequence[Check], width: int) -> Iterator[Line | Table]:
    if width < WIDE:
        for check in checks:
            yield [Span(f"{check.state.value:<14}", TONES[check.state]), Span(check.topic.value, Tone.STRONG)]
            for sentence, tone in _told(check):
                yield from paragraph(sentence, width, first="  ", rest="  ", tone=tone)
        return
    columns = (Column("check", key=True), Column("result", key=True), Column("", text=True))
    rows = []
    for check in checks:
        (summary, tone), *more = _told(check)
        rows.append((Span(check.topic.value, Tone.STRONG), Span(check.state.value, TONES[check.state]), Span(summary, tone)))
        rows += [(Span(""), Span(""), Span(sentence, tone)) for sentence, tone in more]
    yield Table(columns, tuple(rows))


def _told(check: Check) -> list[tuple[str, Tone]]:
    """The sentences on one check: the codes, and for a violation the numbers, stand in them."""
    codes = f"{', '.join(check.codes)}: " if check.codes else ""
    told = [(escape(codes + check.summary), Tone.PLAIN), *((escape(line), Tone.DIM) for line in check.lines)]
    if check.state is State.VIOLATED:
        numbers = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in _scalars(check.numbers))
        told += [(escape(f"measured: {numbers}"), Tone.DIM)] if numbers else []
    return told
