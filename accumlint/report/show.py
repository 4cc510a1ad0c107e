"""Draws a training loop as it was rehearsed, whether or not anything is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from accumlint.report.paths import relative
from accumlint.report.story import sequences, titled
from accumlint.report.terminal import Line, Span, Tone, escape, paint, paragraph
from accumlint.report.timeline import Part, draw
from accumlint.report.words import factor_line
from accumlint.trace import Kind, Trace, Window
from accumlint.weight import Weight

MAX_TEXT = 110


def show(traces: Sequence[Trace], *, width: int, color: bool, root: Path) -> str:
    """The rehearsals of one loop: the first in full, of the others what differs from all before them."""
    lines: list[Line] = []
    drawn: set[object] = set()
    for trace in traces:
        shape = tuple(_shape(window) for windows in sequences(trace) for window in windows)
        if shape in drawn:
            continue
        if not drawn:
            lines += _heading(trace, min(width, MAX_TEXT), root)
        lines += [*_assumed(trace, min(width, MAX_TEXT)), *_windows(trace, width), []]
        formulas = _formulas(trace)
        if tuple(formulas) not in drawn:
            lines += _weights(formulas, min(width, MAX_TEXT))
        drawn |= {shape, tuple(formulas)}
    lines += _limits(traces, min(width, MAX_TEXT))
    return paint(lines, color=color) + "\n"


def followed(files: Sequence[str], ends: Sequence[str], *, width: int, color: bool, root: Path) -> str:
    """Which other files the loops were followed into, and where the trail ended; "" where there is neither."""
    lines: list[Line] = []
    wide = min(width, MAX_TEXT)
    if files:
        listed = ", ".join(escape(relative(path, root)) for path in files)
        lines += paragraph(f"followed into {listed}", wide, first="  ", rest="    ")
    for end in ends:
        lines += paragraph(escape(end), wide, first="  ", rest="    ")
    return paint([*lines, []], color=color) + "\n" if lines else ""


def used_by(path: str, *, width: int, color: bool, root: Path) -> str:
    """Which file the loops were entered from, where they are given their models by others."""
    line = f"as {escape(relative(path, root))} runs it, where the model is made"
    return paint([*paragraph(line, min(width, MAX_TEXT), first="  ", rest="    ")], color=color) + "\n"


def _heading(trace: Trace, width: int, root: Path) -> Iterator[Line]:
    cell = f"cell {trace.place.cell}:" if trace.place.cell else ""
    where = f"{escape(relative(trace.path, root))}:{cell}{trace.place.row}"
    inside = "" if not trace.function or trace.function.startswith("<") else f" in `{escape(trace.function)}`"
    yield [Span(where, Tone.STRONG), Span(inside)]
    accumulation = trace.accumulation
    if accumulation is None:
        counted = "no accumulation seen"
    elif accumulation.literal:
        counted = f"K is {accumulation.value}, as it stands in the source"
    else:
        counted = f"K is `{escape(accumulation.text)}`, rehearsed with {accumulation.value}"
    yield from paragraph(counted, width, first="  ", rest="  ")
    if trace.frameworks:
        yield from paragraph(f"framework: {escape(', '.join(trace.frameworks))}", width, first="  ", rest="    ")
    for package, assumed in trace.versions:
        yield from paragraph(f"{escape(package)} is {escape(assumed)}", width, first="  ", rest="    ")


def _assumed(trace: Trace, width: int) -> Iterator[Line]:
    if trace.settings:
        listed = ", ".join(f"`{escape(setting)}` is {escape(value)}" for setting, value in trace.settings)
        yield from paragraph(f"where {listed}", width, first="  ", rest="    ")


def _windows(trace: Trace, width: int) -> Iterator[Line]:
    several = len(trace.optimizers) > 1
    for optimizer, windows in zip(trace.optimizers or (None,), sequences(trace), strict=True):
        yield []
        if several and optimizer is not None:
            yield [Span("  windows of "), Span(f"`{escape(optimizer.name)}`", Tone.STRONG)]
        for line in draw(_parts(windows), trace.path, width - 2):
            yield [Span("  "), *line] if line else line


def _parts(windows: Sequence[Window]) -> list[Part]:
    """The windows, with runs of alike ones drawn once."""
    parts: list[Part] = []
    run = 1
    for at, part in enumerate(titled(windows, 0)):
        if parts and part.window.step and _shape(part.window) == _shape(windows[at - 1]):
            run += 1
            parts[-1] = Part(parts[-1].window, f"windows {at - run + 2} {'and' if run == 2 else 'to'} {at + 1}, alike")
        else:
            run = 1
            parts.append(part)
    return parts


def _shape(window: Window) -> tuple[object, ...]:
    """What makes two windows look the same."""
    first = window.events[0].micro_batch if window.events else 0
    ignored = {Kind.DATA, Kind.OPAQUE}
    return tuple(
        (event.kind, event.place, event.micro_batch - first, event.sync, event.bypass, str(event.weight), event.leaves)
        for event in window.events
        if event.kind not in ignored
    )


def _formulas(trace: Trace) -> dict[str, Weight]:
    """The weights that the backwards of the loop give a target, by formula."""
    seen: dict[str, Weight] = {}
    for event in trace.of(Kind.BACKWARD):
        if event.weight is not None and (event.weight.factors or not event.weight.known):
            seen.setdefault(str(event.weight), event.weight)
    return seen


def _weights(formulas: dict[str, Weight], width: int) -> Iterator[Line]:
    for formula, weight in formulas.items():
        yield [Span("  weight of a target at the backward: "), Span(formula, Tone.STRONG)]
        for factor in weight.factors:
            sign, meaning = factor_line(factor)
            line = f" ({factor.place.spoken})" if factor.place else ""
            yield from paragraph(escape(meaning) + line, width, first=f"    {sign:<6} ", rest=" " * 11)
        if weight.mixed:
            yield [Span("    + …    terms of another weight were added")]
        if not weight.known:
            yield [Span("    ?      the loss comes from a function that was not followed")]
        yield []


def _limits(traces: Sequence[Trace], width: int) -> Iterator[Line]:
    limits = list(dict.fromkeys(limit for trace in traces for limit in trace.limits))
    if limits:
        yield [Span("  not followed", Tone.WARNING)]
        for limit in limits:
            yield from paragraph(escape(limit), width, first="    ", rest="      ")
        yield []
