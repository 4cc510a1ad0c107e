"""The rehearsed traces of the files that a run came through: they name what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accumlint.judge import K
from accumlint.trace import Kind, Trace

TELLING = frozenset({Kind.FORWARD.value, Kind.BACKWARD.value, Kind.STEP.value})
MAX_FILES = 8


def rehearsed(reports: Sequence[Mapping[str, Any]]) -> list[Trace]:
    """Those of the files with a forward, a backward or a step; a file that cannot be rehearsed gives none."""
    return [trace for path in list(_files(reports))[:MAX_FILES] for trace in _traces(path)]


def _files(reports: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    found: dict[str, None] = {}
    for report in reports:
        for event in report["events"]:
            if event["kind"] in TELLING and event["at"] >= 0 and report["stacks"][event["at"]]:
                found.setdefault(str(report["stacks"][event["at"]][0][0]))
    return found


def _traces(path: str) -> Iterator[Trace]:
    from accumlint.source.reading.parse import Source, parse
    from accumlint.source.rehearsal.rehearse import rehearsals

    try:
        source = parse(Path(path).read_bytes(), path)
    except OSError:
        return
    if not isinstance(source, Source):
        return
    try:
        for rehearsal in rehearsals(source):
            yield from rehearsal.worlds(K)
    except RecursionError:
        return
