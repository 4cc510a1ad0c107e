"""A table before it is drawn: columns, rows of spans, and how it is cut into bands where the width is too small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from accumlint.report.terminal import Line, Span, Tone, cells, clip, paragraph

GAP = 2
INDENT = 2
MIN_TEXT, MAX_TEXT = 24, 110  # columns that running text needs, and where it gets hard to read


@dataclass(frozen=True, slots=True)
class Column:
    """`key` columns are repeated in every band; `text` holds sentences, which may be wrapped, and stands last."""

    title: str
    right: bool = False
    key: bool = False
    text: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    columns: tuple[Column, ...]
    rows: tuple[tuple[Span, ...], ...]

    def width(self, at: int) -> int:
        return max([cells(self.columns[at].title), *(cells(row[at].text) for row in self.rows)])

    def only(self, kept: list[int]) -> Table:
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return Table(tuple(self.columns[at] for at in kept), rows)

    def bands(self, width: int) -> list[Table]:
        """The table as several, each no wider than `width` where a single column allows it."""
        keys = [at for at, column in enumerate(self.columns) if column.key]
        bands: list[list[int]] = []
        used = 0
        for at, column in enumerate(self.columns):
            if column.key:
                continue
            size = GAP + (min(self.width(at), MIN_TEXT) if column.text else self.width(at))
            if not bands or used + size > width:
                bands.append([*keys])
                used = INDENT + sum(self.width(key) + GAP for key in keys) - GAP
            bands[-1].append(at)
            used += size
        return [self.only(band) for band in bands]


def laid_out(table: Table, width: int) -> Iterator[Line]:
    """The table as aligned lines."""
    for number, band in enumerate(table.bands(width)):
        if number:
            yield []
        yield from _band(band, width)


def _band(table: Table, width: int) -> Iterator[Line]:
    widths = [table.width(at) for at in range(len(table.columns))]
    before = INDENT + sum(size + GAP for size in widths[:-1])
    sentences = table.columns[-1].text
    widths[-1] = max(min(width, MAX_TEXT) - before, MIN_TEXT) if sentences else min(widths[-1], max(width - before, 1))
    for row in (tuple(Span(column.title, Tone.DIM) for column in table.columns), *table.rows):
        if not sentences:
            yield _aligned(table.columns, row, widths)
            continue
        first, *rest = paragraph(row[-1].text, widths[-1], tone=row[-1].tone) or [Line()]
        yield [*_aligned(table.columns[:-1], row[:-1], widths[:-1]), Span(" " * GAP), *first]
        yield from ([Span(" " * before), *line] for line in rest)


def _aligned(columns: Sequence[Column], row: Sequence[Span], widths: Sequence[int]) -> Line:
    line = Line()
    for column, span, size in zip(columns, row, widths, strict=True):
        text = clip(span.text, size)
        room = " " * (size - cells(text))
        line += [Span(" " * (GAP if line else INDENT)), replace(span, text=room + text if column.right else text + room)]
    return line
