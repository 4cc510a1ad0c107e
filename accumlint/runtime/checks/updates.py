"""The numbers of every update on every rank."""

from __future__ import annotations

from collections.abc import Iterator

from accumlint.runtime.assemble.contributions import calls_by_site, scale_of
from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.weights import uniform
from accumlint.runtime.assemble.windows import RankWindow, Report, SharedWindow, stack_of
from accumlint.runtime.checks.context import Run
from accumlint.runtime.checks.gradient import reference_of
from accumlint.runtime.checks.hooks import buckets_of
from accumlint.runtime.checks.weights import window_sum
from accumlint.trace import Kind
from accumlint.verdict import Update


def updates_of(run: Run) -> Iterator[Update]:
    """By window, then by rank."""
    by_rank = {report["rank"]: report for report in run.reports}
    names = {entry["uid"]: entry["name"] for entry in run.reports[0]["objects"]} if run.reports else {}
    for window in run.complete:
        everywhere = [_targets(each) for each in window.ranks]
        known = [each for each in everywhere if each is not None]
        together = sum(known) if len(known) == len(everywhere) == run.world else None
        added = window_sum(run, window)
        for rank in window.ranks:
            yield _update(run, window, rank, by_rank[rank.rank], names.get(window.optimizer, ""), together, added)


def _update(
    run: Run, window: SharedWindow, rank: RankWindow, report: Report, name: str, together: float | None, added: float | None
) -> Update:
    step = rank.step
    stack = stack_of(report, step) if step is not None else []
    place = place_of(stack[0]) if stack else None
    last = rank.backwards[-1]["index"] if rank.backwards else -1
    clip = next((row for row in reversed(rank.rows) if row["kind"] == Kind.CLIP.value and row["index"] > last), None)
    before = clip["numbers"].get("norm") if clip is not None else None
    limit = clip["numbers"].get("limit") if clip is not None else None
    reference = reference_of(step) or {}
    scales = [scale for row in rank.backwards if (scale := scale_of(row)) is not None]
    return Update(
        rank=rank.rank,
        number=window.number + 1,
        optimizer=name,
        optimizer_step=sum(1 for each in run.assembly.windows if each.optimizer == window.optimizer and each.number <= window.number),
        micro_steps=rank.size,
        updated=rank.updated,
        path=place.path if place else "",
        line=place.line if place else 0,
        targets_local=_targets(rank),
        targets_global=together,
        elements=_elements(rank),
        norm_before=before,
        norm_after=min(before, limit) if before is not None and limit is not None else before,
        clip_limit=limit,
        scale=scales[-1] if scales else None,
        buckets=tuple(buckets_of(run, rank)),
        coefficients=tuple(
            None if (coefficient := uniform(loss)) is None else coefficient / (scale_of(row) or 1.0) for row, loss in rank.losses
        ),
        weight_sum=added,
        gradient_error=reference.get("relative") if len(calls_by_site(window)) < 2 else None,  # several terms have no one mean
    )


def _targets(rank: RankWindow) -> float | None:
    """Valid targets of the window; of several terms those of the one that counts most, for they count the same data."""
    return _most(rank, "units")


def _elements(rank: RankWindow) -> float | None:
    return _most(rank, "elements")


def _most(rank: RankWindow, key: str) -> float | None:
    sums: dict[str, float] = {}
    for _, loss in rank.losses:
        if loss.get(key) is not None:
            site = str(loss["site"])
            sums[site] = sums.get(site, 0.0) + float(loss[key])
    return max(sums.values(), default=None)
