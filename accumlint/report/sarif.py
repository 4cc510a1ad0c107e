"""SARIF 2.1.0, as GitHub code scanning and other viewers read it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from accumlint import __version__
from accumlint.findings import Applicability, Confidence, Edit, Finding, Severity
from accumlint.report.paths import position, relative
from accumlint.report.text import Rules, Sources, name, severity, source_line
from accumlint.report.words import note
from accumlint.rule import Rule
from accumlint.trace import Event, Place

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
BASE = "%SRCROOT%"
MAX_DESCRIPTION = 1024  # what GitHub accepts
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
PROBLEMS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "recommendation"}


def as_sarif(findings: Sequence[Finding], rules: Rules, sources: Sources, *, width: int, color: bool, root: Path) -> str:
    listed = list(rules)
    surest = _least_confidence(findings)
    prints = _fingerprints(findings, sources, root)
    run = {
        "tool": {
            "driver": {
                "name": "accumlint",
                "semanticVersion": __version__,
                "rules": [_rule(rules[code], surest.get(code, Confidence.HIGH)) for code in listed],
            }
        },
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {BASE: {"uri": root.absolute().as_uri().rstrip("/") + "/"}},
        "invocations": [{"executionSuccessful": True}],
        "results": [_result(finding, rules, listed, mark, root) for finding, mark in zip(findings, prints, strict=True)],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _least_confidence(findings: Sequence[Finding]) -> dict[str, Confidence]:
    least: dict[str, Confidence] = {}
    for finding in findings:
        least[finding.code] = min(finding.confidence, least.get(finding.code, finding.confidence))
    return least


def _rule(rule: Rule, confidence: Confidence) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": _short(_unmarked(rule.summary))},
        "fullDescription": {"text": _short(_unmarked(_first_section(rule.page)) or rule.summary)},
        "help": {"text": rule.page, "markdown": rule.page},
        "defaultConfiguration": {"level": LEVELS[rule.severity]},
        "properties": {
            "precision": str(confidence),
            "problem.severity": PROBLEMS[rule.severity],
            "tags": ["correctness", "pytorch", "gradient-accumulation"],
        },
    }


def _first_section(page: str) -> str:
    """What stands under the page's first heading."""
    match = re.search(r"^## [^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return " ".join(match[1].split()) if match else ""


def _unmarked(text: str) -> str:
    return text.replace("`", "")


def _short(text: str) -> str:
    return text if len(text) <= MAX_DESCRIPTION else text[: MAX_DESCRIPTION - 1].rstrip() + "…"


def _result(finding: Finding, rules: Rules, listed: list[str], fingerprint: str, root: Path) -> dict[str, Any]:
    result: dict[str, Any] = {"ruleId": finding.code}
    if finding.code in rules:
        result["ruleIndex"] = listed.index(finding.code)
    result |= {
        "level": LEVELS[severity(finding, rules)],
        "message": {"text": _message(finding)},
        "locations": [_location(finding.place, root)],
        "partialFingerprints": {"primaryLocationLineHash": fingerprint},
        "properties": {"name": name(finding, rules), "confidence": str(finding.confidence), "settings": dict(finding.settings)},
    }
    if finding.events:
        result["codeFlows"] = [_flow(finding, root)]
    if finding.fix is not None and finding.fix.applicability is not Applicability.DISPLAY:
        result["fixes"] = [{"description": {"text": finding.fix.message}, "artifactChanges": list(_changes(finding.fix.edits, root))}]
    return result


def _message(finding: Finding) -> str:
    where = f"{position(finding.place)}: " if finding.place.cell else ""
    return f"{where}{finding.message}\n{finding.help}" if finding.help else f"{where}{finding.message}"


def _flow(finding: Finding, root: Path) -> dict[str, Any]:
    """The window, event by event."""
    steps = [_step(event, order, event.index in finding.guilty, root) for order, event in enumerate(finding.events, 1)]
    how = "measured" if finding.trace is not None and finding.trace.measured else "rehearsed"
    return {"message": {"text": f"The window, as {how}."}, "threadFlows": [{"locations": steps}]}


def _step(event: Event, order: int, is_guilty: bool, root: Path) -> dict[str, Any]:
    where = f"micro-batch {event.micro_batch + 1}: " if event.micro_batch >= 0 else ""
    location = _location(event.place, root) | {"message": {"text": where + note(event)}}
    return {"location": location, "executionOrder": order, "importance": "essential" if is_guilty else "important"}


def _changes(edits: Iterable[Edit], root: Path) -> Iterable[dict[str, Any]]:
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.place.path, []).append(edit)
    for path, group in by_file.items():
        changes = [{"deletedRegion": _region(edit.place), "insertedContent": {"text": edit.content}} for edit in group]
        yield {"artifactLocation": _artifact(path, root), "replacements": changes}


def _location(place: Place, root: Path) -> dict[str, Any]:
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": _artifact(place.path, root), "region": _region(place)}}
    if place.cell:
        location["logicalLocations"] = [{"fullyQualifiedName": position(place), "kind": "cell"}]
    return location


def _artifact(path: str, root: Path) -> dict[str, str]:
    known = relative(path, root)
    if os.path.isabs(known):
        return {"uri": Path(known).as_uri()}
    return {"uri": quote(known.replace(os.sep, "/"), errors="surrogateescape"), "uriBaseId": BASE}


def _region(place: Place) -> dict[str, int]:
    if place.cell:  # its lines are none of the notebook's JSON
        return {"startLine": 1, "startColumn": 1}
    region = {"startLine": max(place.line, 1), "startColumn": max(place.column, 1)}
    if place.end_line:
        region["endLine"] = place.end_line
    if place.end_column and (place.end_column > place.column or place.end_line > place.line):
        region["endColumn"] = place.end_column
    return region


def _fingerprints(findings: Sequence[Finding], sources: Sources, root: Path) -> list[str]:
    """One a finding, from its rule, file, function and the text of its line, not from the line's number."""
    seen: Counter[str] = Counter()
    prints = []
    for finding in findings:
        place = finding.place
        function = finding.trace.function if finding.trace else ""
        line = " ".join(source_line(sources, place.path, place.line).split())
        known = "\0".join((finding.code, relative(place.path, root).replace(os.sep, "/"), function, line))
        digest = hashlib.sha256(known.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        seen[digest] += 1
        prints.append(f"{digest}:{seen[digest]}")
    return prints
