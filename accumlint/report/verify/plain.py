"""The report as plain lines, for pipes and logs."""

from __future__ import annotations

from collections.abc import Iterable

from accumlint.report.terminal import Line, paint
from accumlint.report.verify.tables import Table, laid_out


def written(blocks: Iterable[Line | Table], *, width: int, color: bool) -> str:
    lines: list[Line] = []
    for block in blocks:
        lines += laid_out(block, width) if isinstance(block, Table) else [block]
    return paint(lines, color=color) + "\n"
