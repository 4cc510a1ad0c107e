"""Evidence that a run gives: targets that vary in number, windows without any, several ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from accumlint.runtime.assemble.contributions import calls_by_site
from accumlint.runtime.assemble.hints import Hints
from accumlint.runtime.assemble.loops import Loops
from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.weights import number
from accumlint.runtime.assemble.windows import RankWindow, Report, SharedWindow, stack_of
from accumlint.trace import Evidence, Kind, Place


@dataclass(frozen=True)
class Together:
    """What all ranks show together: evidence on the targets, seen from the first of them, and the usual step of the loop's counter."""

    targets: Mapping[str, tuple[Evidence, ...]]
    step: int


def together(reports: Sequence[Report], windows: Sequence[SharedWindow]) -> Together:
    """Asked for once, for it goes through the windows of all ranks."""
    targets = _targets(reports[0], windows, Loops(reports[0])) if reports else {}
    return Together(targets, usual_step(windows))


def facts_of(report: Report, windows: Sequence[SharedWindow], hints: Hints, shared: Together) -> Mapping[str, tuple[Evidence, ...]]:
    """Evidence by name, with what only the source can tell taken from there."""
    found = dict(hints.facts())
    for fact in report.get("facts", ()):
        stack = report["stacks"][fact["at"]]
        found.setdefault(fact["name"], (Evidence(place_of(stack[0]) if stack else Place(str(report["script"]), 1), fact["text"]),))
    if int(report["world"]) > 1:
        found["distributed"] = (Evidence(Place(str(report["script"]), 1), f"{report['world']} ranks"),)
    found.update(shared.targets)
    own = ((window, each) for window in windows for each in window.ranks if each.rank == report["rank"])
    left_out = next((window for window, each in own if leaves_out(each, shared.step)), None)
    if left_out is not None:
        found["leaves-out"] = (Evidence(Place(str(report["script"]), 1), f"a micro-batch of window {left_out.number + 1} has no backward"),)
    return found


def leaves_out(window: RankWindow, step: int) -> bool:
    """Whether a micro-batch inside the window was left out: it has a forward and no backward, its batch was taken in vain, or the loop's
    counter jumped by more than its usual step."""
    if not window.backwards:
        return False
    kinds = [row["kind"] for row in window.rows]
    forwards = {row["micro_batch"] for row in window.rows if row["kind"] == Kind.FORWARD.value}
    trained = {row["micro_batch"] for row in window.backwards}
    in_vain = kinds.count(Kind.DATA.value) > window.size and len(forwards) <= window.size
    return bool(forwards - trained) or in_vain or any(jump > step for jump in _jumps(window))


def usual_step(windows: Sequence[SharedWindow]) -> int:
    """By how much the counter of the micro-batches' loop goes on."""
    return min((jump for window in windows for rank in window.ranks for jump in _jumps(rank) if jump > 0), default=1)


def _jumps(window: RankWindow) -> list[int]:
    """Of the counter between the backwards of one pass."""
    at = [(row["turns"][-1][2], row["turns"][-1][4]) for row in window.backwards if row["turns"]]
    return [later[1] - earlier[1] for earlier, later in pairwise(at) if earlier[0] == later[0] and earlier[1] >= 0]


def _targets(report: Report, windows: Sequence[SharedWindow], loops: Loops) -> Mapping[str, tuple[Evidence, ...]]:
    """Whether the number of valid targets varies inside of some window: between micro-batches other than a pass's last, which may be
    ragged, or between ranks."""
    units: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    last: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))  # in the last turn of a pass, which may be ragged
    weighted: set[str] = set()
    positions: dict[str, set[float]] = defaultdict(set)
    ignored: set[str] = set()
    empty = False
    where: dict[str, Place] = {}
    for at, window in enumerate(windows):
        for site, calls in calls_by_site(window).items():
            for row, loss, rank in calls:
                if loss["units"] is None:
                    continue
                if rank.rank == report["rank"] and (stack := stack_of(report, row)):
                    where.setdefault(site, place_of(stack[0]))
                empty = empty or loss["units"] == 0
                if (loss.get("elements") or 0) > loss["units"]:
                    ignored.add(site)
                positions[site].add(float(loss.get("elements") or 0))
                if loss["units"] != round(loss["units"], 3) or loss["units"] > (loss.get("elements") or math.inf):
                    weighted.add(site)
                ragged = rank.rank == report["rank"] and loops.ends_pass(row)
                (last if ragged else units)[site][at].append(float(loss["units"]))
    found: dict[str, tuple[Evidence, ...]] = {}
    for site, by_window in units.items():
        for at, full in by_window.items():
            full += [each for each in last[site][at] if each > max(full)]
        place = where.get(site, Place(str(report["script"]), 1))
        counts = [count for of_window in by_window.values() if len(set(of_window)) > 1 for count in of_window]
        if site in weighted and len(positions[site]) == 1:
            continue  # as many targets everywhere: class weights alone move what a mean divides by
        if counts:
            what = "class weights that add up to " if site in weighted else ""
            text = f"{what}{number(min(counts))} to {number(max(counts))} in a micro-batch of this run"
            found["varying-units"] = (Evidence(place, text),)
        if site in ignored:
            found.setdefault("ignored-targets", (Evidence(place, "some targets of this run are ignored"),))
    if empty:
        found["may-lose-targets"] = (
            Evidence(next(iter(where.values()), Place(str(report["script"]), 1)), "a micro-batch of this run has none"),
        )
    return found
