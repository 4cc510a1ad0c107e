"""From the ranks' reports to traces that the rules read. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from accumlint.runtime.assemble.contributions import Contributions
from accumlint.runtime.assemble.facts import together
from accumlint.runtime.assemble.hints import Hints, declared_size
from accumlint.runtime.assemble.traces import trace_of
from accumlint.runtime.assemble.windows import Report, SharedWindow, is_steady, prepared, shared, steady_size
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
    every = list(reports)
    world = max((int(report["world"]) for report in every), default=1)
    ordered = [prepared(report) for report in one_a_rank(report for report in every if report["events"])]
    windows = shared(ordered)
    hints = Hints(rehearsed)
    k = steady_size(windows)
    if k < 2 or not is_steady(windows, k):
        k = declared_size(ordered, windows, hints) or k
    contributions = Contributions(windows, k, world)
    common = together(ordered, windows)
    traces = [trace_of(report, windows, contributions, hints, common) for report in ordered]
    return Assembly(ordered, windows, contributions, traces, hints, k, world)


def one_a_rank(reports: Iterable[Report]) -> list[Report]:
    """In order of the ranks. Processes without a group are all rank 0: the one that got furthest stands for them."""
    best: dict[int, Report] = {}
    for report in reports:
        held = best.get(int(report["rank"]))
        if held is None or (int(report["updates"]), len(report["events"])) > (int(held["updates"]), len(held["events"])):
            best[int(report["rank"])] = report
    return [best[rank] for rank in sorted(best)]


__all__ = ["Assembly", "assemble"]
