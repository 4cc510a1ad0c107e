"""Draws windows as a timeline: a column a micro-batch, a row an event kind, the update at the end, the tail.

                  window 1                         ╎ tail
    micro-batch   1        2        3       update ╎ 4
    forward       ●        ●        ●       ·      ╎ ●        12  loss = F.cross_entropy(model(x), y) / K
    weight        1/(3n)   1/(3n)   1/(3n)         ╎ 1/(3n)
    backward      ●        ●        ●       ·      ╎ ✗        13  loss.backward()
    step          ·        ·        ·       ●      ╎ ·        15  optimizer.step()

Time runs down a column, then on to the next. A mark is a cross where the finding is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from accumlint.report.grid import Column, Grid, Row, grid_of
from accumlint.report.terminal import Line, Span, Tone, cells, clip, escape, pad
from accumlint.trace import Window

TITLE = "micro-batch"
MIN_SOURCE, GOOD_SOURCE = 16, 30  # columns for the source text: fewer are not worth it; for so many the grid moves together
BORDER = "╎ "


@dataclass(frozen=True, slots=True)
class Part:
    """A window of a drawing, and how it is titled."""

    window: Window
    title: str = ""


def draw(parts: Sequence[Part], path: str, width: int, *, guilty: Collection[int] = (), tone: Tone = Tone.ERROR) -> list[Line]:
    """The windows side by side, or one below the other where `width` is too small; places in `path` are shown by their line alone."""
    grid = grid_of([(part.window, part.title) for part in parts], path, frozenset(guilty))
    layout = _fitting(grid, width)
    if layout.width > width and len(parts) > 1:
        middle = (len(parts) + 1) // 2
        first = draw(parts[:middle], path, width, guilty=guilty, tone=tone)
        return [*first, [], *draw(parts[middle:], path, width, guilty=guilty, tone=tone)]
    for narrower in (Grid.shortened, Grid.bare):
        if layout.width > width:
            layout = Layout(narrower(layout.grid), 2)
    return [_clipped(line, width) for line in layout.lines(width, tone)]


@dataclass(frozen=True)
class Layout:
    """A grid and the space between its columns."""

    grid: Grid
    gap: int = 3

    @cached_property
    def width(self) -> int:
        """Of everything but the source text."""
        return self.label_width + self.gap + sum(self.rooms) + self.place_width

    @cached_property
    def label_width(self) -> int:
        return max([len(TITLE), *(cells(row.label) for row in self.grid.rows)])

    @cached_property
    def place_width(self) -> int:
        return max((cells(row.place) for row in self.grid.rows), default=0)

    @cached_property
    def groups(self) -> list[list[Column]]:
        groups: list[list[Column]] = []
        for column in self.grid.columns:
            if not groups or column.group != groups[-1][0].group:
                groups.append([])
            groups[-1].append(column)
        return groups

    @cached_property
    def column_widths(self) -> dict[Column, int]:
        grid = self.grid
        return {column: max([cells(column.title), *(cells(grid.cell(row, column).text) for row in grid.rows)]) for column in grid.columns}

    @cached_property
    def rooms(self) -> list[int]:
        """What each group takes, with the border before it and the space behind it."""
        found: list[int] = []
        for at, group in enumerate(self.groups):
            columns = sum(self.column_widths[column] for column in group) + self.gap * (len(group) - 1)
            inner = max(columns, cells(group[0].title_of_group))
            found.append((len(BORDER) if at else 0) + inner + (self.gap if at == len(self.groups) - 1 else 1))
        return found

    def lines(self, width: int, tone: Tone) -> Iterator[Line]:
        if any(group[0].title_of_group for group in self.groups):
            yield self._titles()
        yield self._across(Span(TITLE, Tone.DIM), {column: _heading(column) for column in self.grid.columns})
        for row in self.grid.rows:
            yield self._row(row, width - self.width - 2, tone)

    def _titles(self) -> Line:
        return self._across(Span(""), {group[0]: Span(group[0].title_of_group, Tone.DIM) for group in self.groups})

    def _row(self, row: Row, room: int, tone: Tone) -> Line:
        found = {column: self.grid.cell(row, column) for column in self.grid.columns}
        marked = any(cell.guilty for cell in found.values())
        label = tone if marked else Tone.DIM if row.derived else Tone.PLAIN
        spans = {column: Span(cell.text, tone if cell.guilty else cell.tone) for column, cell in found.items()}
        line = [*self._across(Span(row.label, label), spans), Span(row.place.rjust(self.place_width), tone if marked else Tone.FRAME)]
        if row.source and room >= MIN_SOURCE:
            line.append(Span("  " + clip(escape(row.source), room), Tone.PLAIN if marked else Tone.DIM))
        return line

    def _across(self, label: Span, spans: dict[Column, Span]) -> Line:
        """One line of the drawing: the label, then a span a column; a group with one span gives it all its room."""
        line = [replace(label, text=pad(label.text, self.label_width + self.gap))]
        for at, group in enumerate(self.groups):
            line += [Span(BORDER, Tone.FRAME)] if at else []
            left = self.rooms[at] - (len(BORDER) if at else 0)
            shown = [column for column in group if column in spans]
            for column in shown:
                size = left if column is shown[-1] else self.column_widths[column] + self.gap
                line.append(replace(spans[column], text=pad(spans[column].text, size)))
                left -= size
        return line


def _heading(column: Column) -> Span:
    return Span(column.title, Tone.UPDATE if column.is_update else Tone.STRONG)


def _fitting(grid: Grid, width: int) -> Layout:
    """The roomiest layout that fits: then columns move together, and alike ones are folded."""
    grid = grid.folded(keep=8)
    tight = grid.folded()
    candidates = (Layout(grid), Layout(grid, 2), Layout(tight, 2))
    for room in (GOOD_SOURCE, MIN_SOURCE):
        for layout in candidates[: 2 if room == GOOD_SOURCE else 3]:
            if layout.width + room + 2 <= width:
                return layout
    return next((layout for layout in candidates if layout.width <= width), candidates[-1])


def _clipped(line: Line, width: int) -> Line:
    left, kept = width, Line()
    for span in line:
        size = cells(span.text)
        if size <= left:
            kept.append(span)
        elif left > 0 and span.text.strip():
            kept.append(replace(span, text=clip(span.text, left)))
        left -= size
    return kept
