"""The formats for programs: `json`, one array, and `json-lines`, an object a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accumlint.findings import Edit, Finding, Fix
from accumlint.report.paths import absolute
from accumlint.report.text import Rules, Sources, name, severity
from accumlint.report.words import note
from accumlint.trace import Event, Place


def as_json(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    return json.dumps([item(finding, rules, root) for finding in findings], indent=2) + "\n"


def as_json_lines(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    return "".join(json.dumps(item(finding, rules, root)) + "\n" for finding in findings)


def item(finding: Finding, rules: Rules, root: Path) -> dict[str, Any]:
    """One finding, as JSON values."""
    return {
        "code": finding.code,
        "name": name(finding, rules),
        "severity": str(severity(finding, rules)),
        "confidence": str(finding.confidence),
        "message": finding.message,
        "filename": absolute(finding.place.path, root),
        "location": _start(finding.place),
        "end_location": _end(finding.place),
        "cell": finding.place.cell or None,
        "noqa_row": (finding.noqa_line or finding.place.line) - finding.place.above,
        "url": None,
        "fix": _fix(finding.fix) if finding.fix else None,
        "settings": dict(finding.settings),
        "trace": [_event(event, root) for event in finding.events],
    }


def _start(place: Place) -> dict[str, int]:
    return {"row": place.row, "column": place.column}


def _end(place: Place) -> dict[str, int]:
    return {"row": place.end_row, "column": place.end_column or place.column}


def _fix(fix: Fix) -> dict[str, Any]:
    return {"applicability": fix.applicability.value, "message": fix.message, "edits": [_edit(edit) for edit in fix.edits]}


def _edit(edit: Edit) -> dict[str, Any]:
    return {"content": edit.content, "location": _start(edit.place), "end_location": _end(edit.place)}


def _event(event: Event, root: Path) -> dict[str, Any]:
    return {
        "kind": event.kind.value,
        "micro_batch": event.micro_batch,
        "cell": event.place.cell or None,
        "row": event.place.row,
        "column": event.place.column,
        "filename": absolute(event.place.path, root),
        "note": note(event),
    }
