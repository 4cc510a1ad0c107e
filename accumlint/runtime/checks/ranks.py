"""Whether the ranks do the same: windows, updates, gradients and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from accumlint.runtime.assemble.windows import SharedWindow
from accumlint.runtime.checks.context import Run, confirmed, counted, unobserved, violated
from accumlint.trace import Wrapper
from accumlint.verdict import Check, Topic

CODES = ("ACC102", "ACC105", "ACC108", "ACC111")


@dataclass(frozen=True, slots=True)
class Difference:
    """Replicas that are not the same after an update. `what` is "gradients" or "parameters"."""

    window: SharedWindow
    what: str
    model: int | None


def ranks(run: Run) -> Check:
    """Equal window sizes and update counts, replicated gradients and parameters equal at every update."""
    topic = Topic.RANKS
    codes = run.guilty(*CODES)
    if run.world < 2:
        return unobserved(topic, "One process: there is nothing to compare.")
    if len(run.reports) < run.world:
        return unobserved(topic, f"{counted(len(run.reports), 'rank')} of {run.world} left a report.")
    sizes = [[each.size for each in window.ranks] for window in run.assembly.windows]
    if any(fact["name"] == "averages-parameters" for report in run.reports for fact in report.get("facts", ())):
        return unobserved(topic, "The ranks average their parameters now and then: between that they are meant to differ.")
    uneven = [number + 1 for number, window in enumerate(sizes) if len(set(window)) > 1]
    apart = list(differences(run))
    numbers = {"sizes": sizes, "differences": [[each.window.number + 1, each.what] for each in apart]}
    lines = [f"window {number}: {', '.join(map(str, sizes[number - 1]))} micro-batches on the ranks" for number in uneven[:6]]
    lines += [f"window {each.window.number + 1}: the {each.what} of the ranks differ" for each in apart[:6]]
    if codes:
        return violated(topic, codes, "The ranks do not do the same.", lines, numbers)
    if uneven or apart:
        return unobserved(topic, "The ranks differ, in what no wrapper is to keep equal.", lines, numbers)
    if not compared(run):
        return _unwrapped(run, lines, numbers)
    return confirmed(topic, f"Same windows, same gradients and same parameters on {run.world} ranks after every update.", lines, numbers)


def compared(run: Run) -> bool:
    """Whether checksums of parameters that a wrapper replicates were there to compare."""
    steps = [each.step for window in run.complete for each in window.ranks if each.step is not None]
    scopes = [scope for step in steps for scope in step["numbers"].get("checksum_scope") or ()]
    return any(scope["wrapper"] != Wrapper.NONE.value for scope in scopes)


def _unwrapped(run: Run, lines: list[str], numbers: Mapping[str, Any]) -> Check:
    """Ranks without a wrapper: equal all the same, or each on its own."""
    topic = Topic.RANKS
    if any(entry["wrapper"] != Wrapper.NONE.value for report in run.reports for entry in report["objects"]):
        return unobserved(topic, "Windows and updates are the same; shards are not compared.", lines, numbers)
    apart = [window.number + 1 for window in run.complete if not _alike(window)]
    if not apart and all(each.step is not None and each.step["numbers"].get("parameter_checksum") for each in run.complete[0].ranks):
        return confirmed(
            topic, f"Same windows and same parameters on {run.world} ranks after every update, without a wrapper.", lines, numbers
        )
    what = "No wrapper keeps the ranks equal, and nothing was seen that reduces their gradients: each trains on its own."
    return replace(unobserved(topic, what, lines, numbers), doubt=what)


def _alike(window: SharedWindow) -> bool:
    sums = [tuple(each.step["numbers"].get("parameter_checksum") or ()) for each in window.ranks if each.step is not None]
    return len(set(sums)) <= 1


def differences(run: Run) -> Iterator[Difference]:
    """Replicas of one wrapper with different checksums."""
    for window in run.complete:
        steps = [each.step for each in window.ranks if each.step is not None]
        if len(steps) != len(run.reports) or len(steps) < 2:
            continue
        scopes = [step["numbers"].get("checksum_scope") or [] for step in steps]
        if len({len(each) for each in scopes}) != 1:
            continue
        for at, scope in enumerate(scopes[0]):
            if scope["wrapper"] == Wrapper.NONE.value:
                continue
            for what, key in (("gradients", "grad_checksum"), ("parameters", "parameter_checksum")):
                if not _equal(steps, key, at, scope.get("ranks"), run):
                    yield Difference(window, what, scope.get("model"))
                    break


def _equal(steps: list[Mapping[str, Any]], key: str, at: int, group: list[int] | None, run: Run) -> bool:
    """Whether the ranks of a group have the same checksum; those of another group are compared with their own."""
    first = min(group) if group else 0
    seen: set[float] = set()
    for report, step in zip(run.reports, steps, strict=True):
        sums = step["numbers"].get(key)
        if not sums or (group and report["rank"] not in group):
            continue
        seen.add(sums[at])
    return len(seen) <= 1 or first < 0
