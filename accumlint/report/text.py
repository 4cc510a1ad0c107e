"""The formats for people: `full`, a block a finding, and `concise`, a line a finding."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from accumlint.findings import Confidence, Finding, Severity
from accumlint.report.paths import position, relative
from accumlint.report.story import story
from accumlint.report.terminal import TAB, Line, Span, Tone, cells, clip, escape, paint, paragraph
from accumlint.report.timeline import draw
from accumlint.rule import Rule

Rules = Mapping[str, Rule]
Sources = Callable[[str], str]

TONES = {Severity.ERROR: Tone.ERROR, Severity.WARNING: Tone.WARNING, Severity.INFO: Tone.INFO}
MAX_TEXT = 110  # a paragraph wider than this is hard to read; a timeline is not


def concise(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    """A line a finding, never wrapped: editors and grep read it."""
    lines = [in_one_line(finding, rules, root) for finding in findings]
    return paint([*lines, _footer(findings, rules)], color=color) + "\n"


def full(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    """A block a finding: what is wrong, where, the window with the guilty event marked, what to write instead."""
    lines: list[Line] = []
    for finding in findings:
        lines += [*block(finding, rules, sources, width, root), []]
    return paint([*lines, _footer(findings, rules)], color=color) + "\n"


def severity(finding: Finding, rules: Rules) -> Severity:
    """The finding's own, or the rule's."""
    if finding.severity is not None:
        return finding.severity
    return rules[finding.code].severity if finding.code in rules else Severity.ERROR


def name(finding: Finding, rules: Rules) -> str:
    return rules[finding.code].name if finding.code in rules else ""


def in_one_line(finding: Finding, rules: Rules, root: Path) -> Line:
    """One finding as editors read it."""
    level = severity(finding, rules)
    place = finding.place
    return [
        Span(escape(relative(place.path, root)), Tone.STRONG),
        Span(f":{position(place)}: ", Tone.FRAME),
        Span(finding.code, TONES[level]),
        Span(f" {level} "),
        Span(escape(finding.message)),
    ]


def block(finding: Finding, rules: Rules, sources: Sources, width: int, root: Path) -> Iterable[Line]:
    """One finding in full."""
    tone = TONES[severity(finding, rules)]
    text = min(width, MAX_TEXT)
    yield _head(finding, rules)
    yield from paragraph(escape(finding.message), text)
    yield from _place(finding, sources, width, root, tone)
    parts = story(finding)
    if parts:
        yield []
        yield from _caption(finding)
        yield from (_indented(line) for line in draw(parts, finding.place.path, width - 2, guilty=finding.guilty, tone=tone))
        yield []
    for label, sentence in _remarks(finding):
        hang = f"  {label}: "
        first, *rest = paragraph(escape(sentence), text - len(hang))
        yield [Span(hang, Tone.INFO), *first]
        yield from ([Span(" " * len(hang)), *line] for line in rest)


def _head(finding: Finding, rules: Rules) -> Line:
    level = severity(finding, rules)
    line = [Span(finding.code, TONES[level]), Span(f" {name(finding, rules)}".rstrip(), Tone.STRONG), Span(f" ({level}", Tone.FRAME)]
    if finding.confidence is not Confidence.HIGH:
        line.append(Span(f", {finding.confidence} confidence", Tone.FRAME))
    return [*line, Span(")", Tone.FRAME)]


def _place(finding: Finding, sources: Sources, width: int, root: Path, tone: Tone) -> Iterable[Line]:
    """Where it is, and the source line with carets below it."""
    place = finding.place
    where = f"{escape(relative(place.path, root))}:{position(place)}"
    function = finding.trace.function if finding.trace else ""
    inside = f" in `{escape(function)}`" if function and not function.startswith("<") else ""
    gutter = max(len(str(place.row)), 2) + 1
    yield [Span("-" * (gutter - 1) + "> ", Tone.FRAME), Span(where), Span(inside, Tone.FRAME)]
    line = source_line(sources, place.path, place.line)
    if not line.strip():
        return
    start = place.column - 1
    end = place.end_column - 1 if place.end_line in {0, place.line} and place.end_column > place.column else len(line.rstrip())
    indent = len(line) - len(line.lstrip())
    cut = max(indent - len(TAB), 0)
    before, marked = escape(line[cut:start]), escape(line[start:end])
    room = width - gutter - 2
    yield [Span(" " * gutter + "|", Tone.FRAME)]
    yield [Span(f"{place.row:>{gutter - 1}} | ", Tone.FRAME), Span(clip(escape(line[cut:].rstrip()), room))]
    carets = "^" * max(min(cells(marked), room - cells(before)), 1)
    if cells(before) < room:
        yield [Span(" " * gutter + "| ", Tone.FRAME), Span(" " * cells(before)), Span(carets, tone)]


def source_line(sources: Sources, path: str, line: int) -> str:
    """A line of a file, "" where there is none."""
    lines = _lines(sources(path))
    return lines[line - 1] if 0 < line <= len(lines) else ""


@lru_cache(maxsize=4)
def _lines(text: str) -> list[str]:
    return re.split(r"\r\n|\r|\n", text.removeprefix("\ufeff"))


def _caption(finding: Finding) -> Iterable[Line]:
    accumulation = finding.trace.accumulation if finding.trace else None
    if finding.trace is not None and finding.trace.measured:
        ranks = sorted({event.rank for event in finding.events})
        yield [Span(f"  measured on rank {', '.join(map(str, ranks))}", Tone.DIM)]
    elif accumulation is not None and not accumulation.literal:
        yield [Span(f"  rehearsed with {escape(accumulation.text)} = {accumulation.value}", Tone.DIM)]


def _indented(line: Line) -> Line:
    return [Span("  "), *line] if line else line


def _remarks(finding: Finding) -> Iterable[tuple[str, str]]:
    if finding.settings:
        yield "when", " and ".join(f"`{setting}` is {value}" for setting, value in finding.settings)
    if finding.help:
        yield "help", finding.help
    if finding.fix is not None:
        yield "fix", finding.fix.message


def _footer(findings: Sequence[Finding], rules: Rules) -> Line:
    if not findings:
        return [Span("Nothing found.", Tone.LIVE)]
    levels = Counter(severity(finding, rules) for finding in findings)
    files = len({finding.place.path for finding in findings})
    counts = [_count(levels[level], str(level)) for level in sorted(Severity, reverse=True) if levels[level]]
    listed = counts[0] if len(counts) == 1 else ", ".join(counts[:-1]) + f" and {counts[-1]}"
    return [Span(f"Found {listed} in {_count(files, 'file')}.", Tone.STRONG)]


def _count(number: int, noun: str) -> str:
    if noun == "info":
        noun = "note"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
