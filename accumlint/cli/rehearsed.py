"""The rehearsed traces of the files that a run came through: they name what was measured."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumlint.config import ConfigError, Settings, nearest
from accumlint.judge import K
from accumlint.trace import Kind, Trace

TELLING = frozenset({Kind.FORWARD.value, Kind.BACKWARD.value, Kind.STEP.value})
MAX_FILES = 8


def rehearsed(reports: Sequence[Mapping[str, Any]]) -> list[Trace]:
    """Those of the script, with what it reaches in other files, and of further files with a forward, a backward or a step.

    A file that cannot be rehearsed gives none.
    """
    found: list[Trace] = []
    told: set[str] = set()
    for path in list(_files(reports))[:MAX_FILES]:
        if path not in told:
            found += _traces(path)
            told = {event.place.path for trace in found for event in trace.events if event.kind is Kind.BACKWARD}
    return found


def _files(reports: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """The script first, for from there the others are reached as they ran."""
    found: dict[str, None] = {}
    for report in reports:
        events = [event for event in report["events"] if event["kind"] in TELLING and event["at"] >= 0 and report["stacks"][event["at"]]]
        if events:
            found.setdefault(os.path.abspath(str(report["script"])))
        for event in events:
            found.setdefault(str(report["stacks"][event["at"]][0][0]))
    return found


def _settings(folder: str) -> Settings:
    """Those of the script's project; what is wrong with them a check says, and a run that was made is not lost for it."""
    try:
        return nearest(folder)
    except ConfigError:
        return Settings()


def _traces(path: str) -> Iterator[Trace]:
    from accumlint.linter import library_for
    from accumlint.source.reading.parse import Source, parse
    from accumlint.source.reading.program import program_of
    from accumlint.source.rehearsal.rehearse import Options, rehearsals

    settings = _settings(os.path.dirname(path))
    try:
        source = parse(Path(path).read_bytes(), path)
    except OSError:
        return
    if not isinstance(source, Source):
        return
    try:
        for rehearsal in rehearsals(program_of(source, library_for(settings)), Options.of(settings)):
            yield from rehearsal.worlds(K)
    except RecursionError:
        return
