"""From the ranks' reports to traces that the rules read. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accumlint.runtime.assemble.contributions import Contributions
from accumlint.runtime.assemble.hints import Hints, declared_size
from accumlint.runtime.assemble.traces import trace_of
from accumlint.runtime.assemble.windows import Report, SharedWindow, prepared, shared, steady_size
from accumlint.trace import Trace


@dataclass(frozen=True)
class Assembly:
    """What the reports of all ranks make together: a trace for each, and the windows that they share."""

    reports: Sequence[Report]
    windows: Sequence[SharedWindow]
    contributions: Contributions
    traces: Sequence[Trace]
    hints: Hints
    k: int
    world: int


def assemble(reports: Iterable[Report], rehearsed: Iterable[Trace] = ()) -> Assembly:
    """The traces of a run. `rehearsed` are those of its source files, which lend names, and silence where a thing is meant."""
    ordered = sorted((prepared(report) for report in reports if report["events"]), key=lambda report: int(report["rank"]))
    windows = shared(ordered)
    world = max((int(report["world"]) for report in ordered), default=1)
    hints = Hints(rehearsed)
    k = steady_size(windows)
    if k < 2:
        k = declared_size(ordered, windows, hints) or k
    contributions = Contributions(windows, k, world)
    traces = [trace_of(report, windows, contributions, hints) for report in ordered]
    return Assembly(ordered, windows, contributions, traces, hints, k, world)


__all__ = ["Assembly", "assemble"]
