"""How the ranks came to their end, with the stacks of those that hung or died."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accumlint.report.terminal import Line, Span, Tone, clip, escape, paragraph
from accumlint.report.verify import figures
from accumlint.report.verify.grouping import Grouping, label, named
from accumlint.report.verify.tables import Column, Table
from accumlint.verdict import RankEnd

ENDS = {
    "updates": "stopped as asked",
    "script": "the script ended",
    "watch": "the watch ended",
    "error": "the script raised",
    "stalled": "hung",
    "died": "died",
}
BAD = {"error", "stalled", "died"}
MAX_FRAMES = 24  # lines of a stack: its innermost


def endings(ranks: Sequence[RankEnd], grouping: Grouping, width: int) -> Iterator[Line | Table]:
    """One sentence where all ranks ended alike, else a table; then the stacks."""
    yield [Span("Ranks", Tone.STRONG)]
    if len({_alike(end) for end in ranks}) == 1:
        end = ranks[0]
        detail = f": {end.detail}" if end.detail else ""
        who = named([one.rank for one in ranks])
        yield from paragraph(
            escape(f"{who}: {_how(end)} after {figures.count(end.updates, 'update')}{detail}"), width, first="  ", rest="    "
        )
    else:
        yield _table(ranks, grouping)
    yield from _stacks(ranks, grouping, width)


def _alike(end: RankEnd) -> tuple[int, str, str]:
    return (end.updates, end.ended, end.detail)


def _how(end: RankEnd) -> str:
    return ENDS.get(end.ended, end.ended)


def _table(ranks: Sequence[RankEnd], grouping: Grouping) -> Table:
    columns = (Column("rank", right=True, key=True), Column("updates", right=True, key=True), Column("end", text=True))
    rows = []
    for group in grouping(sorted(ranks, key=lambda end: end.rank), _alike):
        updates = figures.span((end.updates for end in group), figures.number)
        sentences = list(dict.fromkeys(f"{_how(end)}: {end.detail}" if end.detail else _how(end) for end in group))
        more = f"; and {len(sentences) - 1} others" if len(sentences) > 1 else ""
        tone = Tone.ERROR if any(end.ended in BAD for end in group) else Tone.PLAIN
        rows.append((Span(label(end.rank for end in group)), Span(updates), Span(escape(sentences[0]) + more, tone)))
    return Table(columns, tuple(rows))


def _stacks(ranks: Sequence[RankEnd], grouping: Grouping, width: int) -> Iterator[Line]:
    """Each stack once, with the ranks that stood there; of many stacks the first."""
    owners: dict[str, list[RankEnd]] = {}
    for end in ranks:
        if end.stack.strip():
            owners.setdefault(end.stack, []).append(end)
    for group in grouping(list(owners), str):
        yield []
        if len(group) > 1:
            yield [Span(f"  {len(group)} further stacks with --ranks or in JSON", Tone.DIM)]
            continue
        there = owners[group[0]]
        yield [Span(f"  {named([end.rank for end in there])} {'raised this' if there[0].ended == 'error' else 'stood here'}", Tone.STRONG)]
        yield from _frames(group[0].rstrip().splitlines(), width)


def _frames(lines: Sequence[str], width: int) -> Iterator[Line]:
    if len(lines) > MAX_FRAMES:
        yield [Span(f"    … {figures.count(len(lines) - MAX_FRAMES, 'line')} before", Tone.DIM)]
    for line in lines[-MAX_FRAMES:]:
        yield [Span("    " + clip(escape(line.rstrip()), width - 4))]
