"""What of all findings is reported: the rules that are on, severities as configured, suppressions, and unused suppressions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from accumlint.config import Configuration, Settings, known_rules
from accumlint.findings import Confidence, Finding, Severity
from accumlint.source.editing.ignores import UNUSED, Suppression, Unused, suppressing, suppressions, unused
from accumlint.source.reading.files import patterns
from accumlint.source.reading.notebook import cell_at
from accumlint.trace import Place

if TYPE_CHECKING:
    from accumlint.linter import Examined


class Thresholds(NamedTuple):
    """What the command line asks for on top of the settings."""

    severity: Severity = Severity.INFO
    confidence: Confidence = Confidence.HIGH
    honours_suppressions: bool = True


class Reported(NamedTuple):
    """The findings to report, in order, and how many a suppression silenced."""

    findings: list[Finding]
    suppressed: int


def report(examined: Iterable[Examined], configuration: Configuration, thresholds: Thresholds) -> Reported:
    """Selects and suppresses, file by file; a finding belongs to the file that it stands in, whichever file led there."""
    files = _by_file(examined, configuration)
    kept: list[Finding] = []
    silenced = 0
    for one in files:
        levels = one.settings.severities()
        findings = [_with_severity(finding, levels) for finding in one.findings]
        visible = [finding for finding in findings if _visible(finding, one.settings, thresholds)]
        if thresholds.honours_suppressions:
            visible += _unused(one, findings, levels, thresholds)
            loud = [finding for finding in visible if not suppressing(finding, one.suppressions, known_rules())]
            silenced += len(visible) - len(loud)
            visible = loud
        kept += visible
    return Reported(sorted(kept, key=lambda each: (each.place.path, each.place.line, each.place.column, each.code)), silenced)


def _by_file(examined: Iterable[Examined], configuration: Configuration) -> list[Examined]:
    """What was found, under the file that it stands in, each finding once."""
    files = {each.path: each._replace(findings=[]) for each in examined}
    seen: set[tuple[str, str, int, int]] = set()
    for each in examined:
        for finding in each.findings:
            path = finding.place.path
            if finding.key in seen:
                continue
            seen.add(finding.key)
            if path not in files:
                files[path] = each._replace(
                    path=path, settings=configuration.of(os.path.dirname(path)), findings=[], suppressions=_read(path)
                )
            files[path].findings.append(finding)
    return list(files.values())


def _read(path: str) -> list[Suppression]:
    """The suppressions of a file that was only followed into."""
    from accumlint.source.reading.text import Problem, decode

    try:
        with open(path, "rb") as file:
            text = decode(file.read(), path)
    except OSError:
        return []
    return [] if isinstance(text, Problem) else suppressions(text)


def _with_severity(finding: Finding, levels: dict[str, str]) -> Finding:
    level = levels.get(finding.code)
    return finding if level is None else replace(finding, severity=Severity[level.upper()])


def _visible(finding: Finding, settings: Settings, thresholds: Thresholds) -> bool:
    severity = Severity.ERROR if finding.severity is None else finding.severity
    return (
        severity >= thresholds.severity
        and finding.confidence >= thresholds.confidence
        and settings.selection.enabled(finding.code, by_default=severity > Severity.INFO)
        and not _ignored_here(finding, settings)
    )


def _ignored_here(finding: Finding, settings: Settings) -> bool:
    """Whether `per-file-ignores` leave out this code in this file; a pattern with `!` before it means all other files."""
    for pattern, codes in settings.per_file_ignores:
        matches = patterns((pattern.removeprefix("!"),), settings.root)(finding.place.path)
        if matches is not pattern.startswith("!") and any(_means(each, finding.code) for each in codes):
            return True
    return False


def _means(selector: str, code: str) -> bool:
    return selector == "ALL" or code.startswith(selector) or known_rules().get(code) == selector


def _unused(one: Examined, findings: list[Finding], levels: dict[str, str], thresholds: Thresholds) -> Iterator[Finding]:
    """ACC001 for suppressions that suppress nothing, unless some loop of the file could not be followed."""
    if one.gave_up:
        return
    selection = one.settings.selection
    severity = Severity[levels.get(UNUSED, "warning").upper()]
    for each in unused(
        one.suppressions, findings, known_rules(), lambda code: selection.enabled(code, by_default=_on_by_default(code, levels))
    ):
        finding = _finding(one, each, severity)
        if _visible(finding, one.settings, thresholds):
            yield finding


def _on_by_default(code: str, levels: dict[str, str]) -> bool:
    from accumlint.rule import catalogue

    rule = catalogue().get(code)
    return rule is not None and (code in levels or rule.severity > Severity.INFO)


def _finding(one: Examined, each: Unused, severity: Severity) -> Finding:
    held = each.suppression
    cell = cell_at(one.cells, held.line)
    place = Place(one.path, held.line, held.column, held.line, held.end_column, *cell)
    what = f"`{each.code}` in this suppression" if each.code else f"`{held.text}`"
    codes = ", ".join(dict.fromkeys(re.findall(r"ACC\d+", held.text, re.IGNORECASE))) or "ACC101"
    kind = "file-ignore" if "file-ignore" in held.text else "ignore"
    help = "take it out" if each.code else f"name the rules in brackets: `# accumlint: {kind}[{codes}]`"
    return Finding(UNUSED, place, f"{what} {each.why}", help, severity=severity)
