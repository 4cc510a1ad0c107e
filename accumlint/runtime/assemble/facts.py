"""Evidence that a run gives: targets that vary in number, windows without any, several ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from accumlint.runtime.assemble.hints import Hints
from accumlint.runtime.assemble.loops import Loops
from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.weights import number
from accumlint.runtime.assemble.windows import Report, SharedWindow, stack_of
from accumlint.trace import Evidence, Place


def facts_of(report: Report, windows: Sequence[SharedWindow], hints: Hints, loops: Loops) -> Mapping[str, tuple[Evidence, ...]]:
    """Evidence by name, with what only the source can tell taken from there."""
    found = dict(hints.facts())
    for fact in report.get("facts", ()):
        stack = report["stacks"][fact["at"]]
        found.setdefault(fact["name"], (Evidence(place_of(stack[0]) if stack else Place(str(report["script"]), 1), fact["text"]),))
    if int(report["world"]) > 1:
        found["distributed"] = (Evidence(Place(str(report["script"]), 1), f"{report['world']} ranks"),)
    found.update(_targets(report, windows, loops))
    return found


def _targets(report: Report, windows: Sequence[SharedWindow], loops: Loops) -> Mapping[str, tuple[Evidence, ...]]:
    """Whether the number of valid targets varies: between micro-batches other than a pass's last, which may be ragged, or between ranks."""
    units: dict[tuple[str, int], list[float]] = defaultdict(list)
    ignored: set[tuple[str, int]] = set()
    empty = False
    where: dict[tuple[str, int], Place] = {}
    for window in windows:
        for rank in window.ranks:
            for row, loss in rank.losses:
                site = (loss["name"], int(loss.get("at", -1)))
                if loss["units"] is None:
                    continue
                if rank.rank == report["rank"] and (stack := stack_of(report, row)):
                    where.setdefault(site, place_of(stack[0]))
                empty = empty or loss["units"] == 0
                if (loss.get("elements") or 0) > loss["units"]:
                    ignored.add(site)
                if rank.rank != report["rank"] or not loops.ends_pass(row):
                    units[site].append(float(loss["units"]))
    found: dict[str, tuple[Evidence, ...]] = {}
    for site, counts in units.items():
        place = where.get(site, Place(str(report["script"]), 1))
        if len(set(counts)) > 1:
            found["varying-units"] = (Evidence(place, f"{number(min(counts))} to {number(max(counts))} in a micro-batch of this run"),)
        if site in ignored:
            found.setdefault("ignored-targets", (Evidence(place, "some targets of this run are ignored"),))
    if empty:
        found["may-lose-targets"] = (Evidence(next(iter(where.values())), "a micro-batch of this run has none"),)
    return found
