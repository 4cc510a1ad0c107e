"""The table of updates: a row an update and rank, or an update and those ranks that agree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accumlint.report.paths import relative
from accumlint.report.terminal import Line, Span, Tone, clip, escape, paragraph
from accumlint.report.verify import figures
from accumlint.report.verify.figures import Spell
from accumlint.report.verify.grouping import Grouping, label
from accumlint.report.verify.tables import Column, Table
from accumlint.verdict import Update

MAX_NAME = 20


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a column shows of an update: one number, or one a micro-batch."""

    title: str
    values: Callable[[Update], Sequence[float | None]]
    spell: Spell
    agrees: bool = False  # ranks in which it differs do not share a row


def _one(name: str) -> Callable[[Update], Sequence[float | None]]:
    return lambda update: (getattr(update, name),)


QUANTITIES = (
    Quantity("micro-steps", _one("micro_steps"), figures.number, agrees=True),
    Quantity("step", _one("optimizer_step"), figures.number, agrees=True),
    Quantity("targets", _one("targets_local"), figures.number),
    Quantity("of all ranks", _one("targets_global"), figures.number, agrees=True),
    Quantity("elements", _one("elements"), figures.number),
    Quantity("norm", _one("norm_before"), figures.digits, agrees=True),
    Quantity("clipped", _one("norm_after"), figures.digits, agrees=True),
    Quantity("limit", _one("clip_limit"), figures.number, agrees=True),
    Quantity("scale", _one("scale"), figures.number, agrees=True),
    Quantity("buckets", lambda update: update.buckets, figures.number, agrees=True),
    Quantity("target's weight", lambda update: update.coefficients, figures.coefficient),
    Quantity("sum", _one("weight_sum"), figures.coefficient, agrees=True),
    Quantity("error", _one("gradient_error"), figures.scientific),
)


def updates_section(updates: Sequence[Update], ranks: Grouping, width: int, root: Path) -> Iterator[Line | Table]:
    """A title, the table, and where the steps are."""
    yield [Span("Updates", Tone.STRONG)]
    yield _table(updates, ranks)
    places = list(dict.fromkeys(f"{escape(relative(each.path, root))}:{each.line}" for each in updates if each.path))
    if places:
        yield from paragraph(f"stepped at {', '.join(places)}", width, first="  ", rest="    ", tone=Tone.DIM)


def _table(updates: Sequence[Update], ranks: Grouping) -> Table:
    shown = [one for one in QUANTITIES if any(value is not None for update in updates for value in one.values(update))]
    several = len({update.optimizer for update in updates}) > 1
    skips = not all(update.updated for update in updates)
    columns = [Column("update", right=True, key=True), Column("rank", right=True, key=True)]
    columns += [Column("optimizer", key=True)] * several
    columns += [Column("updated")] * skips
    columns += [Column(one.title, right=True) for one in shown]
    rows = []
    for (number, optimizer), members in _by_update(updates).items():
        for group in ranks(members, partial(_alike, shown)):
            row = [Span(str(number)), Span(label(update.rank for update in group))]
            row += [Span(clip(escape(optimizer), MAX_NAME))] * several
            row += [_updated(group)] * skips
            rows.append((*row, *(Span(_cell(one, group)) for one in shown)))
    return Table(tuple(columns), tuple(rows))


def _by_update(updates: Sequence[Update]) -> dict[tuple[int, str], list[Update]]:
    found: dict[tuple[int, str], list[Update]] = {}
    for update in sorted(updates, key=lambda update: (update.number, update.optimizer, update.rank)):
        found.setdefault((update.number, update.optimizer), []).append(update)
    return found


def _alike(shown: Sequence[Quantity], update: Update) -> Hashable:
    return (update.updated, *(_cell(one, [update]) for one in shown if one.agrees))


def _updated(group: Sequence[Update]) -> Span:
    answers = {update.updated for update in group}
    if len(answers) > 1:
        return Span("some", Tone.WARNING)
    return Span("yes") if answers == {True} else Span("no", Tone.WARNING)


def _cell(quantity: Quantity, group: Sequence[Update]) -> str:
    first: Any = quantity.values(group[0])
    if all(quantity.values(update) == first for update in group):
        return figures.run(first, quantity.spell) if any(value is not None for value in first) else "-"
    return figures.span((value for update in group for value in quantity.values(update)), quantity.spell) or "-"
