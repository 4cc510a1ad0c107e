"""Judges an observed run and writes its report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accumlint.cli.output import coloured, warn, width, write
from accumlint.config import Configuration, Settings
from accumlint.findings import Confidence, Finding, Severity

if TYPE_CHECKING:
    from accumlint.cli.verify import Options
    from accumlint.runtime.supervise import Outcome
    from accumlint.verdict import Measurement, Verdict

FINDINGS_ONLY = frozenset({"json-lines", "sarif", "github"})


def shown(outcome: Outcome, options: Options) -> int:
    """The exit status of a run, whose report is written."""
    from accumlint.verdict import judged

    measured = judge_run(outcome, options)
    verdict = judged(measured, max_warnings=options.max_warnings, require=options.require)
    _write(_rendered(measured, verdict, options), options)
    if options.output_format in FINDINGS_ONLY and verdict.reason:
        warn(verdict.reason)
    return verdict.status.value


def judge_run(outcome: Outcome, options: Options) -> Measurement:
    """What the run has shown, with the rules that are on here."""
    from accumlint.cli.rehearsed import rehearsed
    from accumlint.rule import catalogue
    from accumlint.runtime.endings import problem, rank_ends
    from accumlint.runtime.measure import Question, measurement
    from accumlint.runtime.supervise import Ending

    question = Question(options.steps, tuple(catalogue().values()), options.expect_k, options.tolerance, keep=selected)
    failed = (outcome.code or 1) if outcome.ending is Ending.ERROR else None
    return measurement(
        outcome.reports,
        question,
        rehearsed=rehearsed(outcome.reports),
        ends=rank_ends(outcome),
        problem=problem(outcome, options.steps),
        failed=failed,
    )


def selected(findings: list[Finding]) -> list[Finding]:
    """Those whose rules are on, with the configured severities, without the ones that a comment in the source silences."""
    from accumlint.linter import Examined
    from accumlint.selection import Thresholds, report

    if not findings:
        return []
    configuration = Configuration()
    first = findings[0].place.path
    settings: Settings = configuration.of(os.path.dirname(first) or os.getcwd())
    examined = Examined(path=first, settings=settings, findings=findings, suppressions=[], gave_up=True)
    # A file is entered anew for each finding's own path, with the suppressions that it holds.
    return report([examined._replace(path="")], configuration, Thresholds(Severity.INFO, Confidence.HIGH)).findings


def _rendered(measured: Measurement, verdict: Verdict, options: Options) -> str:
    from accumlint.report.verify import every_rank, folded, render
    from accumlint.rule import catalogue

    interactive = options.output_file is None and sys.stdout.isatty()
    return render(
        measured,
        catalogue(),
        source(),
        output_format=options.output_format,
        width=width(),
        color=coloured(options.color) and options.output_file is None,
        root=Path.cwd(),
        interactive=interactive,
        ranks=every_rank if options.ranks else folded,
        verdict=verdict,
    )


def source() -> Callable[[str], str]:
    """Gives the report the text of a file, "" where there is none."""

    def text_of(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    return text_of


def _write(text: str, options: Options) -> None:
    if options.output_file is None:
        write(text)
        return
    try:
        with open(options.output_file, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
    except OSError as error:
        raise click.UsageError(f"{options.output_file} cannot be written: {error.strerror}.") from None
