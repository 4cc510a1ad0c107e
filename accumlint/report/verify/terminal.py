"""The report for a terminal, its tables drawn by rich."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from accumlint.report.terminal import Line, Span, Tone, paint
from accumlint.report.verify.tables import INDENT, MAX_TEXT, Table

_STYLES = {
    Tone.DIM: "dim",
    Tone.FRAME: "dim",
    Tone.STRONG: "bold",
    Tone.ERROR: "bold red",
    Tone.WARNING: "bold yellow",
    Tone.INFO: "bold cyan",
    Tone.QUIET: "magenta",
    Tone.LIVE: "green",
    Tone.UPDATE: "bold blue",
}


def drawn(blocks: Iterable[Line | Table], *, width: int, color: bool) -> str:
    """The report; what the environment says of colours and widths is the caller's affair."""
    parts: list[str] = []
    for block in blocks:
        if isinstance(block, Table):
            parts.append("\n".join(_drawn(band, width, color) for band in block.bands(width)))
        else:
            parts.append(paint([block], color=color) + "\n")
    return "".join(parts)


def _drawn(table: Table, width: int, color: bool) -> str:
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        color_system="standard" if color else None,
        no_color=not color,
        force_terminal=color,
        legacy_windows=False,
        highlight=False,
        emoji=False,
        markup=False,
        _environ={},
    )
    text = table.columns[-1].text
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold", border_style="dim")
    for column in table.columns:
        grid.add_column(
            column.title,
            justify="right" if column.right else "left",
            no_wrap=not column.text,
            overflow="fold" if column.text else "ellipsis",
        )
    for row in table.rows:
        grid.add_row(*(_text(span) for span in row))
    console.print(Padding(grid, (0, 0, 0, INDENT)), width=min(width, MAX_TEXT) if text else width)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").split("\n")) + "\n"


def _text(span: Span) -> Text:
    return Text(span.text, style=_STYLES.get(span.tone, ""))
