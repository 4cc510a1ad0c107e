"""`accumlint show`: draws every training loop of a file as it was rehearsed, clean or not."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from accumlint.cli.output import COLOR, coloured, width, write
from accumlint.report.paths import position
from accumlint.report.terminal import escape
from accumlint.trace import Place

if TYPE_CHECKING:
    from accumlint.source.reading.library import Library
    from accumlint.source.reading.parse import Source
    from accumlint.source.reading.program import Program
    from accumlint.source.rehearsal.rehearse import Options, Rehearsal
    from accumlint.source.rehearsal.through import Through
    from accumlint.trace import Trace

K = 3  # the number of micro-batches that is drawn where the source leaves it open


@click.command("show")
@click.argument("target", metavar="FILE[:FUNCTION]")
@COLOR
def show(target: str, color: str) -> int:
    """Draw every training loop of FILE, or those of one FUNCTION, as it is rehearsed.

    A column is a micro-batch, a row an event kind; the update stands at the end, then the tail. Below stand the weight of
    a target as a formula, what could not be followed, and which files were read. The exit status is 0 also where a loop has mistakes:
    `accumlint check` judges.
    """
    from accumlint.config import nearest
    from accumlint.linter import library_for
    from accumlint.report.show import followed, used_by
    from accumlint.report.show import show as drawn
    from accumlint.source.reading.program import program_of
    from accumlint.source.rehearsal.rehearse import Options, rehearsals

    path, function = _split(target)
    settings = nearest(os.path.dirname(os.path.abspath(path)))
    options = Options.of(settings)
    library = library_for(settings)
    program = program_of(_read(path), library)
    rehearsed = list(rehearsals(program, options))
    loops, limits = _loops(rehearsed)
    caller = _caller(program.path, rehearsed, library, options)
    if caller is not None:
        program = caller.program
        used = [(rehearsal.function, rehearsal.traces(K)) for rehearsal in caller.rehearsals if caller.comes_through(rehearsal)]
        places = {trace.place for _, traces in used for trace in traces}
        loops = [*used, *(loop for loop in loops if not places.issuperset(trace.place for trace in loop[1]))]
    chosen = _chosen(program, loops, function) if function else [traces for _, traces in loops]
    if function and not chosen:
        known = {_holder(program, trace) for _, traces in loops for trace in traces}
        raise click.UsageError(_no_such(function, path, sorted(known)))
    texts = [drawn(traces, width=width(), color=coloured(color), root=Path.cwd()) for traces in chosen]
    nothing = [f"no training loop found in {escape(path)}", *(f"  {escape(limit)}" for limit in limits)]
    trail = used_by(program.path, width=width(), color=coloured(color), root=Path.cwd()) if caller is not None else ""
    trail += followed(tuple(program.kept), program.ends, width=width(), color=coloured(color), root=Path.cwd())
    write(("\n".join(texts) or "\n".join(nothing) + "\n") + trail)
    return 0


def _split(target: str) -> tuple[str, str]:
    """The file and the function; a colon that belongs to the file's name, as in `C:\\train.py`, stays there."""
    path, colon, function = target.rpartition(":")
    if not colon or os.path.exists(target) or not os.path.basename(path):
        return target, ""
    return path, function


def _read(path: str) -> Source:
    from accumlint.source.reading.parse import Problem, parse

    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe would be waited for
            raise click.ClickException(escape(f"{path}: not a file"))
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise click.ClickException(escape(f"{path}: cannot be read: {why}")) from None
    source = parse(data, os.path.abspath(path))
    if isinstance(source, Problem):
        place = Place(path, source.line, source.column, 0, 0, *source.cell)
        raise click.ClickException(escape(f"{path}:{position(place)}: {source.message}"))
    return source


def _caller(path: str, rehearsed: Sequence[Rehearsal], library: Library, options: Options) -> Through | None:
    """The file that uses one whose model is not made there, and the loops as they run from it."""
    from accumlint.source.rehearsal.through import asked_method, through_callers, through_meetings

    asks = [name for each in rehearsed if (name := each.asks_callers)]
    methods = [method for each in rehearsed if (method := asked_method(each)) is not None]
    found = through_callers(path, library.callers.of(path, asks).starts if asks else (), library, options, [])
    met = (through for method in methods for through in through_meetings(method, library, options, []))
    return next((each for each in chain(found, met) if each.reaches), None)


def _loops(rehearsed: Iterable[Rehearsal]) -> tuple[list[tuple[str, Sequence[Trace]]], list[str]]:
    """The function and the traces of every loop that holds a backward; where there are none, why."""
    loops: list[tuple[str, Sequence[Trace]]] = []
    limits: list[str] = []
    for rehearsal in rehearsed:
        traces = [trace for trace in rehearsal.traces(K) if trace.events or trace.limits]
        if traces:
            loops.append((rehearsal.function, traces))
        else:
            limits += (limit for limit in rehearsal.limits if limit not in limits)
    return loops, limits


def _chosen(program: Program, loops: Sequence[tuple[str, Sequence[Trace]]], function: str) -> list[Sequence[Trace]]:
    """The loops that were entered by a function, or that stand in it."""
    chosen: list[Sequence[Trace]] = []
    for entry, traces in loops:
        inside = traces if _is(entry, function) else [trace for trace in traces if _is(_holder(program, trace), function)]
        if inside:
            chosen.append(inside)
    return chosen


def _is(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def _holder(program: Program, trace: Trace) -> str:
    """The name of the innermost function around a loop, after those of the classes and functions around it."""
    from accumlint.trace import FILE_LINES

    names: list[str] = []
    pending: list[ast.AST] = [ast.Module(program.statements_of(trace.path), [])]
    while pending:
        for child in ast.iter_child_nodes(pending.pop()):
            line, end = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if line is None or end is None or not line % FILE_LINES <= trace.place.line <= end % FILE_LINES:
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.append(child.name)
            pending.append(child)
    return ".".join(names) or "<module>"


def _no_such(function: str, path: str, known: Sequence[str]) -> str:
    listed = f"; there are some in {', '.join(f'`{name}`' for name in known)}" if known else ""
    return escape(f"{path}: no training loop in `{function}`{listed}.")
