"""GitHub's workflow commands: annotations on the lines of a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from accumlint.findings import Finding, Severity
from accumlint.report.paths import position, relative
from accumlint.report.terminal import escape
from accumlint.report.text import Rules, Sources, name, severity
from accumlint.trace import Place

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_commands(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    return "".join(_command(finding, rules, root) + "\n" for finding in findings)


def _command(finding: Finding, rules: Rules, root: Path) -> str:
    place = finding.place
    path = relative(place.path, root).replace("\\", "/")
    properties = {
        "title": f"accumlint ({finding.code} {name(finding, rules)})",
        "file": path,
        **_lines(place),
    }
    text = f"{path}:{position(place)}: {finding.code} {finding.message}"
    if finding.help:
        text += f"\n  help: {finding.help}"
    listed = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
    return f"::{COMMANDS[severity(finding, rules)]} {listed}::{_data(text)}"


def _lines(place: Place) -> dict[str, str]:
    """The lines of the file that are annotated: those of a notebook's cells are none of its JSON, so its first is."""
    if place.cell:
        return dict.fromkeys(("line", "col", "endLine", "endColumn"), "1")
    return {
        "line": str(place.line),
        "col": str(place.column),
        "endLine": str(place.end_line or place.line),
        "endColumn": str(place.end_column or place.column),
    }


def _data(text: str) -> str:
    lines = [escape(line) for line in text.replace("%", "%25").split("\n")]
    return "%0A".join(lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
