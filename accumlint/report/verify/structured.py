"""The format for programs: one object with everything that was measured."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from accumlint.report.paths import absolute
from accumlint.report.structured import item
from accumlint.report.text import Rules
from accumlint.report.verify.sections import in_order
from accumlint.verdict import Check, Measurement, RankEnd, Update, Verdict

VERSION = 1


def as_json(measurement: Measurement, verdict: Verdict, rules: Rules, root: Path) -> str:
    """Numbers that JSON lacks are the strings "nan", "inf" and "-inf"; what was not observed is null."""
    report = {
        "version": VERSION,
        "status": verdict.status.value,
        "verdict": str(verdict.status),
        "reason": verdict.reason,
        "wanted": measurement.wanted,
        "problem": measurement.problem,
        "failed": measurement.failed,
        "environment": value(measurement.environment),
        "checks": [_check(check) for check in in_order(measurement.checks)],
        "findings": [item(finding, rules, root) for finding in measurement.findings],
        "updates": [_update(update, root) for update in measurement.updates],
        "ranks": [_plain(end) for end in measurement.ranks],
        "limits": list(measurement.limits),
    }
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def _check(check: Check) -> dict[str, Any]:
    return _plain(check) | {"topic": check.topic.name.lower().replace("_", "-"), "title": check.topic.value}


def _update(update: Update, root: Path) -> dict[str, Any]:
    found = _plain(update)
    path, row = found.pop("path"), found.pop("line")
    return found | {"filename": absolute(path, root) if path else None, "row": row or None}


def _plain(record: Check | Update | RankEnd) -> dict[str, Any]:
    return {field.name: value(getattr(record, field.name)) for field in fields(record)}


def value(of: Any) -> Any:
    """Measured data as JSON values."""
    if isinstance(of, enum.Enum):
        return of.value
    if of is None or isinstance(of, (bool, int, str)):
        return of
    if isinstance(of, (float, Fraction)):
        number = float(of)
        return number if math.isfinite(number) else str(number)
    if isinstance(of, Mapping):
        return {str(key): value(each) for key, each in of.items()}
    if isinstance(of, (list, tuple)):
        return [value(each) for each in of]
    if isinstance(of, (set, frozenset)):
        return sorted((value(each) for each in of), key=str)
    return str(of)
