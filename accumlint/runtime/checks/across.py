"""Findings that no single rank's trace can show: ranks that differ, and micro-batches or steps that were left out in this run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accumlint.findings import Finding, Severity
from accumlint.runtime.assemble import Assembly
from accumlint.runtime.assemble.facts import leaves_out, usual_step
from accumlint.runtime.assemble.sources import place_of, text_of
from accumlint.runtime.assemble.weights import uniform
from accumlint.runtime.assemble.windows import RankWindow, Row, stack_of
from accumlint.runtime.checks.context import Run, counted, listed
from accumlint.runtime.checks.ranks import differences
from accumlint.trace import Event, Guard, Kind, Place, Wrapper
from accumlint.weight import Quantity

DECIDED_BY_RANK = {"data", "rank", "clock", "memory", "exception"}
UNANSWERED = re.compile(r"gloo|nccl|\bmpi\b|process ?group|connection (closed|reset)|broken pipe|socket|monitoredBarrier", re.IGNORECASE)
NO_CHECKS = "No inf checks were recorded prior to update"
MARKS = {kind.value for kind in (Kind.BACKWARD, Kind.STEP, Kind.UNSCALE, Kind.SCALER_UPDATE)}
# Findings after which it is no wonder that replicas differ.
EXPLAINED = {"ACC101", "ACC102", "ACC105", "ACC108", "ACC110", "ACC111", "ACC204"}


def findings_across(assembly: Assembly, found: Sequence[Finding]) -> list[Finding]:
    """What the ranks show together, beside the findings on each rank's trace."""
    if not assembly.reports:
        return []
    run = Run(assembly, found)
    more = [*_uneven(run)]
    if not EXPLAINED & {finding.code for finding in (*found, *more)}:
        more += _apart(run)
    more += _kept(run)
    more += _raised(run)
    more += _never_stepped(run)
    more += _shrunk(run)
    return more


def _uneven(run: Run) -> Iterator[Finding]:
    """Ranks that differ in the number of backwards of a window, or of updates."""
    if run.world < 2 or len(run.reports) < run.world or not _synchronised(run) or _has_fact(run, "join"):
        return
    cut = _fails_by_itself(run)
    for window in run.assembly.windows:
        sizes = [each.size for each in window.ranks]
        steps = [each.step is not None for each in window.ranks]
        work = {each.work for each in window.ranks}
        if cut and (len(sizes) < run.world or not all(steps)):
            return  # a rank that raises has done less than the others, and trains no further
        if len(sizes) == run.world and len(work) == 1 and len(set(steps)) == 1:
            continue
        if len(sizes) < run.world and not any(report["ended"] == "script" for report in run.reports):
            return  # the run was stopped in the middle
        guard = _left_by(run, window.ranks[0], {Kind.BACKWARD, Kind.FORWARD, Kind.STEP})
        row = window.ranks[0].backwards[0] if window.ranks[0].backwards else None
        place = guard.place if guard else _place(run, row)
        what = f"`{guard.text}`" if guard else "this loop"
        counts = listed([f"{counted(size, 'backward')} on rank {each.rank}" for size, each in zip(sizes, window.ranks, strict=True)])
        if len(set(sizes)) == 1:
            counts = listed(
                [f"{counted(each.work[1], 'forward')} and {counted(each.size, 'backward')} on rank {each.rank}" for each in window.ranks]
            )
        missing = "" if len(sizes) == run.world else f"; {counted(run.world - len(sizes), 'rank')} without such a window"
        yield _finding(
            "ACC105",
            place,
            f"{what} did not go the same way on all ranks: window {window.number + 1} had {counts}{missing}",
            "agree on the decision over all ranks (all_reduce it), or run the backward everywhere with the loss multiplied by 0",
            Severity.ERROR,
        )
        return


def _fails_by_itself(run: Run) -> bool:
    """Whether the first error of the run is the script's own, and no rank's complaint that the others do not answer it."""
    errors = [report["error"] for report in run.reports if report.get("error")]
    first = min(errors, key=lambda error: float(error.get("time", 0.0)), default=None)
    return first is not None and not _of_collectives(first)


def _of_collectives(error: Mapping[str, Any]) -> bool:
    return str(error.get("type", "")).startswith("Dist") or UNANSWERED.search(str(error.get("message", ""))) is not None


def _apart(run: Run) -> Iterator[Finding]:
    """Replicas that differ after an update, without another finding that explains it."""
    if _has_fact(run, "averages-parameters"):
        return
    for difference in differences(run):
        step = difference.window.ranks[0].step
        yield _finding(
            "ACC102",
            _place(run, step),
            f"after `{_text(run, step)}` of window {difference.window.number + 1} the {difference.what} of the ranks differ, "
            f"though a wrapper is to keep them equal",
            "synchronise the window's last micro-batch on every rank, and change gradients in the same way on all of them",
            Severity.ERROR,
        )
        return


def _kept(run: Run) -> Iterator[Finding]:
    """A window whose step was left out and whose gradients went on into the next one."""
    if {finding.code for finding in run.findings} & {"ACC303", "ACC306", "ACC307"}:
        return
    k = run.assembly.k
    for window in run.assembly.windows:
        own = window.ranks[0]
        if k < 2 or own.size <= k or own.size % k:
            continue
        guard = _left_by(run, own, {Kind.STEP})
        if guard is None:
            continue
        yield _finding(
            "ACC313",
            guard.place,
            f"`{guard.text}` left out the step after {k} micro-batches and nothing cleared their gradients: "
            f"window {window.number + 1} of this run has {own.size}",
            "zero the gradients on the skipping path as well",
            Severity.ERROR,
        )
        return


def _raised(run: Run) -> Iterator[Finding]:
    """What torch has raised where no step was seen that a rule could begin with."""
    for report in run.reports:
        error = report.get("error") or {}
        last = next((row for row in reversed(report["events"]) if row["kind"] in MARKS), None)
        if NO_CHECKS in str(error.get("message", "")) and last is not None and last["kind"] == Kind.SCALER_UPDATE.value:
            yield _finding(
                "ACC404",
                _place(run, last),
                f"`{_text(run, last)}` comes before any step of the window: torch raises, for nothing was unscaled since the last update",
                "update the scaler once a window, after every optimizer's step",
                Severity.ERROR,
            )
            return


def _never_stepped(run: Run) -> Iterator[Finding]:
    """A whole run without a step, whose every pass was cleared before its boundary came."""
    report = run.reports[0]
    kinds = [row["kind"] for row in report["events"]]
    backwards = [row for row in report["events"] if row["kind"] == Kind.BACKWARD.value and row["numbers"].get("optimizers")]
    cleared = any(row["kind"] == Kind.ZERO.value and backwards and row["index"] > backwards[0]["index"] for row in report["events"])
    if Kind.STEP.value in kinds or report["ended"] != "script" or len(backwards) < 2 or not cleared:
        return
    path = _place(run, backwards[0]).path
    gate = next((guard for event in run.assembly.hints.of(Kind.STEP, path) for guard in event.guards if guard.cause == "gate"), None)
    if gate is not None:
        yield _finding(
            "ACC307",
            gate.place,
            f"`{gate.text}` never held in {len(backwards)} backwards of this run: each pass ended before, and its gradients were cleared",
            "step on the last batch of a pass too, and divide that window by its own size",
            Severity.WARNING,
        )


def _shrunk(run: Run) -> Iterator[Finding]:
    """A window with fewer backwards than its divisor, for a micro-batch was left out inside it, or with more, for that was the boundary."""
    k, step = run.assembly.k, usual_step(run.assembly.windows)
    for window in run.complete:
        own = window.ranks[0]
        lost = k < own.size < 2 * k
        if k < 2 or not (own.size < k or lost) or not (_divided_by(run, own, k) or _counts_more(own)) or not leaves_out(own, step):
            continue
        guard = _left_by(run, own, {Kind.BACKWARD, Kind.STEP} if lost else {Kind.BACKWARD})
        if guard is None or (lost and not _loses_step(run, guard)):
            continue
        left = k - own.size
        yield _finding(
            "ACC319",
            guard.place,
            f"`{guard.text}` left the micro-batch out whose step ends a window: window {window.number + 1} has {own.size} of {k}"
            if lost
            else f"`{guard.text}` left {left} of {k} micro-batches out of window {window.number + 1}, "
            f"but the divisor of the others still counts {'it' if left == 1 else 'them'}",
            "divide by the number of micro-batches that were used, and keep the boundary test outside the skip",
            Severity.WARNING,
        )
        return


def _loses_step(run: Run, guard: Guard) -> bool:
    """Whether the source says that what the condition leaves out includes the step."""
    skips = run.assembly.hints.of(Kind.SKIP, guard.place.path)
    return any(event.guard is not None and event.guard.place == guard.place and Kind.STEP in event.skipped for event in skips)


def _divided_by(run: Run, window: RankWindow, k: int) -> bool:
    weights = [run.contributions.weights.get((window.rank, row["index"])) for row in window.backwards]
    return all(
        weight is not None and any(factor.power < 0 and factor.value == k for factor in weight.of(Quantity.ACCUMULATION))
        for weight in weights
    )


def _counts_more(window: RankWindow) -> bool:
    """Whether the losses are sums over one count that is more than the targets of those that were used."""
    divisors = {round(1 / coefficient, 3) for _, loss in window.losses if loss["reduction"] != "mean" and (coefficient := uniform(loss))}
    used = sum(float(loss["units"] or 0) for _, loss in window.losses)
    return len(divisors) == 1 and used > 0 and divisors.pop() > 1.001 * used


def _left_by(run: Run, window: RankWindow, kinds: set[Kind]) -> Guard | None:
    """The condition in the same file that the source says leaves these events out."""
    stacks = [stack_of(run.reports[0], row) for row in (*window.backwards, window.step) if row is not None]
    paths = {str(stack[0][0]) for stack in stacks if stack}
    skips = [event for path in paths for event in run.assembly.hints.of(Kind.SKIP, path)]
    found = [event for event in skips if event.guard is not None and event.skipped & kinds and event.guard.cause in DECIDED_BY_RANK]
    best = max(found, key=lambda event: len(event.skipped & kinds), default=None)
    return best.guard if best is not None else None


def _synchronised(run: Run) -> bool:
    wrapped = any(entry["wrapper"] != Wrapper.NONE.value for report in run.reports for entry in report["objects"])
    return wrapped or _has_fact(run, "manual-reduce")


def _has_fact(run: Run, name: str) -> bool:
    return any(fact["name"] == name for report in run.reports for fact in report.get("facts", ()))


def _place(run: Run, row: Row | None) -> Place:
    stack: list[Any] = stack_of(run.reports[0], row) if row is not None else []
    return place_of(stack[0]) if stack else Place(str(run.reports[0]["script"]), 1)


def _text(run: Run, row: Row | None) -> str:
    stack: list[Any] = stack_of(run.reports[0], row) if row is not None else []
    return text_of(stack[0]) if stack else "the step"


def _finding(code: str, place: Place, message: str, help: str, severity: Severity, events: tuple[Event, ...] = ()) -> Finding:
    return Finding(code, place, message, help, events=events, severity=severity)
