"""A line a finding, as the linter writes them, then a line a check."""

from __future__ import annotations

from pathlib import Path

from accumlint.report.terminal import Line, Span, escape, paint
from accumlint.report.text import Rules, in_one_line
from accumlint.report.verify.sections import TONES, closing, in_order
from accumlint.verdict import Measurement, Verdict


def concise(measurement: Measurement, verdict: Verdict, rules: Rules, *, color: bool, root: Path) -> str:
    """Lines are never wrapped."""
    lines: list[Line] = [in_one_line(finding, rules, root) for finding in measurement.findings]
    for check in in_order(measurement.checks):
        codes = f"{', '.join(check.codes)}: " if check.codes else ""
        lines.append([Span(check.state.value, TONES[check.state]), Span(f": {check.topic.value}: {escape(codes + check.summary)}")])
    if verdict.reason:
        lines.append([Span(f"{verdict.status}: {escape(verdict.reason)}")])
    return paint([*lines, closing(measurement)], color=color) + "\n"
