"""Events laid out as a grid: which column, which row, and what a cell says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from accumlint.report.terminal import Tone, clip, escape
from accumlint.report.words import LABELS, at_backward, reductions, state
from accumlint.trace import Event, Kind, MicroBatch, Window

MARK, CROSS, EMPTY = "●", "✗", "·"
MAX_ROWS = 16
MAX_NAME = 24

# Shown only where a finding marks one of them: the state they set or the value they form is seen at the other events.
UNSHOWN = frozenset({Kind.DATA, Kind.LOSS, Kind.COUNT, Kind.SYNC_OFF, Kind.SYNC_ON, Kind.OPAQUE})

Key = tuple[str, str, int]  # kind or name of a derived row, path, line


@dataclass(frozen=True, slots=True)
class Cell:
    """What one micro-batch did of one kind."""

    mark: str = EMPTY
    state: str = ""
    tone: Tone = Tone.FRAME
    guilty: bool = False

    @property
    def text(self) -> str:
        return f"{self.mark} {self.state}".strip()


@dataclass(frozen=True, slots=True)
class Column:
    """A micro-batch, or the update of a window. Columns of one group stand together."""

    title: str
    group: int
    title_of_group: str = ""
    is_update: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """An event kind at one line of the source; a derived row says what follows from the events."""

    key: Key
    label: str
    place: str = ""
    source: str = ""
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    content: dict[tuple[Key, Column], Cell] = field(repr=False)

    def cell(self, row: Row, column: Column) -> Cell:
        return self.content.get((row.key, column), Cell() if not row.derived else Cell(""))

    def folded(self, keep: int = 1) -> Grid:
        """Runs of more than `keep` alike micro-batches as the first, an ellipsis, and the last."""
        columns: list[Column] = []
        content = dict(self.content)
        for run in self._runs():
            if len(run) <= max(keep, 3):
                columns += run
                continue
            gap = replace(run[1], title="…")
            columns += [run[0], gap, run[-1]]
            for row in self.rows:
                content[row.key, gap] = replace(
                    self.cell(row, run[1]), mark="…" if self.cell(row, run[1]).mark not in {EMPTY, ""} else "", state=""
                )
        return replace(self, columns=tuple(columns), content=content)

    def _runs(self) -> list[list[Column]]:
        runs: list[list[Column]] = []
        for column in self.columns:
            if runs and self._alike(runs[-1][-1], column):
                runs[-1].append(column)
            else:
                runs.append([column])
        return runs

    def _alike(self, one: Column, other: Column) -> bool:
        same_kind = one.group == other.group and not one.is_update and not other.is_update
        return same_kind and all(self.cell(row, one) == self.cell(row, other) for row in self.rows)

    def shortened(self) -> Grid:
        """The states in fewer letters."""
        shorter = {"sync on": "on", "sync off": "off", "continue": "cont."}
        content = {at: replace(cell, state=shorter.get(cell.state, cell.state)) for at, cell in self.content.items()}
        columns = {column: replace(column, title="upd." if column.is_update else column.title) for column in self.columns}
        return replace(
            self, columns=tuple(columns.values()), content={(key, columns.get(at, at)): cell for (key, at), cell in content.items()}
        )

    def bare(self) -> Grid:
        """The marks alone."""
        return replace(self, content={at: replace(cell, state="") if cell.mark else cell for at, cell in self.content.items()})


def grid_of(windows: Sequence[tuple[Window, str]], path: str, guilty: frozenset[int]) -> Grid:
    columns = _columns(windows)
    hidden = UNSHOWN - {event.kind for _, events in columns for event in events if event.index in guilty}
    coarse = len({_key(event, False) for _, events in columns for event in events if event.kind not in hidden}) > MAX_ROWS
    content: dict[tuple[Key, Column], Cell] = {}
    order: list[Key] = []
    samples: dict[Key, list[Event]] = {}
    reduced = reductions([event for _, events in columns for event in events])
    at = 0
    for column, events in columns:
        at = at if column.is_update else 0
        for event in events:
            if event.kind in hidden:
                continue
            for key, cell in _entries(event, coarse, guilty, reduced):
                at = _place_after(order, key, at)
                samples.setdefault(key, []).append(event)
                content[key, column] = _merged(content.get((key, column)), cell)
    _source_of_weight(samples, [event for _, events in columns for event in events])
    rows = tuple(_row(key, samples[key], path, _ambiguous(samples)) for key in order)
    return Grid(tuple(column for column, _ in columns), rows, content)


def _columns(windows: Sequence[tuple[Window, str]]) -> list[tuple[Column, tuple[Event, ...]]]:
    columns: list[tuple[Column, tuple[Event, ...]]] = []
    group = -1
    for window, title in windows:
        group, before = group + 1, dict[int, int]()
        for micro_batch in window.micro_batches:
            passes = _passes(micro_batch)
            if any(before.get(line, entry) != entry for line, entry in passes.items()):
                group, title = group + 1, "next epoch"
            before = passes
            busy = any(event.kind in {Kind.DATA, Kind.FORWARD, Kind.BACKWARD} for event in micro_batch.events)
            name = str(micro_batch.number + 1) if busy else "before"
            if busy or any(event.kind not in UNSHOWN for event in micro_batch.events):
                columns.append((Column(name, group, title), micro_batch.events))
        if window.update or window.step:
            name = "update" if window.step or not window.micro_batches else "after"
            columns.append((Column(name, group, title, is_update=True), window.update))
    return columns


def _passes(micro_batch: MicroBatch) -> dict[int, int]:
    """Which pass of each loop around it a micro-batch belongs to."""
    turns = next((event.turns for event in micro_batch.events if event.kind in {Kind.DATA, Kind.FORWARD, Kind.BACKWARD}), ())
    return {turn.line: turn.entry for turn in turns}


def _key(event: Event, coarse: bool) -> Key:
    return (event.kind.value, "", 0) if coarse else (event.kind.value, event.place.path, event.place.line)


def _place_after(order: list[Key], key: Key, at: int) -> int:
    """Where the key stands in the order, after it was put behind the one before it; returns the place behind it."""
    if key not in order:
        order.insert(at, key)
        return at + 1
    return max(at, order.index(key) + 1)


def _entries(event: Event, coarse: bool, guilty: frozenset[int], reduced: dict[int, bool]) -> Iterable[tuple[Key, Cell]]:
    key = _key(event, coarse)
    is_guilty = event.index in guilty
    if event.kind is Kind.BACKWARD:
        weight = at_backward(event)
        if weight:
            yield ("weight", *key[1:]), Cell("", weight, Tone.DIM)
    yield key, Cell(CROSS if is_guilty else MARK, state(event), _tone(event), is_guilty)
    if event.index in reduced:
        yes = reduced[event.index]
        yield ("reduced", *key[1:]), Cell("", "yes" if yes else "no", Tone.LIVE if yes else Tone.QUIET)


def _tone(event: Event) -> Tone:
    if event.sync is not None:
        return Tone.LIVE if event.sync else Tone.QUIET
    return Tone.UPDATE if event.kind is Kind.STEP else Tone.PLAIN


def _merged(old: Cell | None, new: Cell) -> Cell:
    """The cell of several events of one kind and line in one column."""
    if old is None:
        return new
    if not new.mark:
        return old if old.state == new.state else replace(old, state=f"{old.state}, {new.state}")
    times = int(old.state.rpartition("×")[2]) + 1 if "×" in old.state else 2
    guilty = old.guilty or new.guilty
    return replace(new, mark=CROSS if guilty else MARK, state=f"×{times}", guilty=guilty)


def _ambiguous(samples: dict[Key, list[Event]]) -> frozenset[str]:
    """The kinds that stand in several rows and act on different objects: their rows are told apart by the object's name."""
    actors: dict[str, set[str]] = {}
    for key, events in samples.items():
        actors.setdefault(key[0], set()).update(_actor(event) for event in events)
    return frozenset(kind for kind, names in actors.items() if len(names) > 1)


def _actor(event: Event) -> str:
    if event.kind in {Kind.FORWARD, Kind.BACKWARD}:
        return event.model.name if event.model else ""
    return ", ".join(actor.name for actor in event.targets)


def _source_of_weight(samples: dict[Key, list[Event]], events: list[Event]) -> None:
    """The row of the weight shows the line that forms the loss, where that is not the backward's own."""
    losses = {event.micro_batch: event for event in events if event.kind is Kind.LOSS}
    for key, sample in samples.items():
        if key[0] == "weight" and sample[0].micro_batch in losses:
            sample[0] = losses[sample[0].micro_batch]


def _row(key: Key, events: list[Event], path: str, ambiguous: frozenset[str]) -> Row:
    first = events[0]
    where = "" if first.place.path == path else clip(escape(os.path.basename(first.place.path)), MAX_NAME) + ":"
    lines = sorted({(event.place.cell, event.place.row) for event in events})
    cell, row = lines[0]
    place = f"{where}{f'{cell}:{row}' if cell else row}" + ("…" if len(lines) > 1 and key[0] not in {"weight", "reduced"} else "")
    if key[0] == "reduced":
        return Row(key, "reduced", derived=True)
    if key[0] == "weight":
        formed = first.kind is Kind.LOSS
        return Row(key, "weight", place if formed else "", first.text if formed else "", derived=True)
    label = LABELS[first.kind]
    if key[0] in ambiguous and len({_actor(event) for event in events}) == 1 and _actor(first):
        label = clip(escape(f"{label} {_actor(first)}"), MAX_NAME)
    return Row(key, label, place, first.text)
