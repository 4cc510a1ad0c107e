"""What a run has shown, in the formats that people and machines read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from accumlint.report import render as render_findings
from accumlint.report.verify.grouping import Grouping, every_rank, folded
from accumlint.rule import Rule
from accumlint.verdict import Measurement, Verdict, judged

__all__ = ["FORMATS", "every_rank", "folded", "render"]

FORMATS = ("full", "concise", "json", "json-lines", "sarif", "github")


def render(
    measurement: Measurement,
    rules: Mapping[str, Rule],
    sources: Callable[[str], str],
    *,
    output_format: str,
    width: int,
    color: bool,
    root: Path,
    interactive: bool,
    ranks: Grouping = folded,
    verdict: Verdict | None = None,
) -> str:
    """The report as one string, `width` columns wide.

    `interactive` says that a person reads it in a terminal. `ranks` is `folded`, where ranks that agree share a row once
    there are many, or `every_rank`. `verdict` is what the report opens with; left out, nothing further is required of the
    run. The formats json-lines, sarif and github hold the findings alone.
    """
    verdict = judged(measurement) if verdict is None else verdict
    if output_format == "json":
        from accumlint.report.verify.structured import as_json

        return as_json(measurement, verdict, rules, root)
    if output_format == "concise":
        from accumlint.report.verify.concise import concise

        return concise(measurement, verdict, rules, color=color, root=root)
    if output_format != "full":
        return render_findings(output_format, measurement.findings, rules, sources, width=width, color=color, root=root)
    from accumlint.report.verify.sections import sections

    blocks = sections(measurement, verdict, rules, sources, width=width, root=root, ranks=ranks)
    if interactive and find_spec("rich") is not None:
        from accumlint.report.verify.terminal import drawn

        return drawn(blocks, width=width, color=color)
    from accumlint.report.verify.plain import written

    return written(blocks, width=width, color=color)
