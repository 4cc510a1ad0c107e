"""How many buckets every backward has reduced."""

from __future__ import annotations

from collections.abc import Sequence

from accumlint.runtime.assemble.windows import RankWindow
from accumlint.runtime.checks.context import Run, confirmed, counted, listed, unobserved, violated
from accumlint.trace import Wrapper
from accumlint.verdict import Check, Topic

CODES = ("ACC101", "ACC102", "ACC103", "ACC104", "ACC108", "ACC110", "ACC111")


def hooks(run: Run) -> Check:
    """All buckets once, at the boundary; or none off it."""
    topic = Topic.HOOKS
    codes = run.guilty(*CODES)
    wrappers = [entry for report in run.reports[:1] for entry in report["objects"] if entry["wrapper"] != Wrapper.NONE.value]
    counts = [buckets_of(run, window.ranks[0]) for window in run.complete]
    lines = [f"{run.name_of(window)}: {listed(each)} buckets a micro-batch" for window, each in zip(run.complete, counts, strict=True)][:6]
    if codes:
        return violated(topic, codes, _summary(counts), lines, {"buckets": counts})
    if run.world < 2:
        return unobserved(topic, "One process: there is nothing to reduce.")
    if not wrappers:
        return unobserved(topic, "No data-parallel wrapper was seen in this run.")
    if not any(any(each) for each in counts):
        return unobserved(topic, "No reduction was seen: gradients may be reduced by other means.", lines, {"buckets": counts})
    return confirmed(topic, _summary(counts), lines, {"buckets": counts})


def buckets_of(run: Run, window: RankWindow) -> list[int]:
    """The buckets that were reduced in each micro-batch of a window, all wrappers together."""
    found: dict[int, int] = {}
    for row in window.backwards:
        found[row["micro_batch"]] = found.get(row["micro_batch"], 0) + run.reduced.get((window.rank, row["index"]), 0)
    return list(found.values())


def _summary(counts: Sequence[Sequence[int]]) -> str:
    patterns = {tuple(number > 0 for number in window) for window in counts}
    if not counts:
        return "No complete window was seen."
    if patterns <= {(*(False for _ in range(len(window) - 1)), True) for window in counts}:
        return f"Gradients are reduced once a window, in its last micro-batch ({counted(len(counts), 'window')})."
    if all(all(window) for window in counts):
        return "Gradients are reduced in every micro-batch."
    if not any(any(window) for window in counts):
        return "Gradients are never reduced."
    return f"Buckets reduced in the micro-batches of the first window: {listed(counts[0])}."
