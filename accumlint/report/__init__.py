"""Findings and traces in the formats that people and machines read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accumlint.findings import Finding
from accumlint.rule import Rule

# Format: module and function. A module is imported only when its format is asked for.
_FORMATS = {
    "full": ("text", "full"),
    "concise": ("text", "concise"),
    "json": ("structured", "as_json"),
    "json-lines": ("structured", "as_json_lines"),
    "sarif": ("sarif", "as_sarif"),
    "github": ("github", "as_commands"),
}

FORMATS = tuple(_FORMATS)


def render(
    format_name: str,
    findings: Sequence[Finding],
    rules: Mapping[str, Rule],
    sources: Callable[[str], str],
    *,
    width: int,
    color: bool,
    root: Path,
) -> str:
    """The report as one string. `sources` gives the text of a file, "" where there is none; names are shown from `root`."""
    module, function = _FORMATS[format_name]
    renderer = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    text: str = renderer(findings, rules, sources, width=width, color=color, root=root)
    return text
