"""How a run ended, in words: one sentence for the run, one entry for each rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from typing import Any

from accumlint.runtime.places import USER, belongs_to
from accumlint.runtime.ranks import Rank
from accumlint.runtime.supervise import Ending, Outcome
from accumlint.verdict import RankEnd


def problem(outcome: Outcome, steps: int) -> str:
    """Why the run is not what was asked for, "" where it is. `steps` is the number of updates asked for."""
    absent = sorted({rank for report in outcome.reports for rank in report.get("absent") or ()})
    if outcome.ending is Ending.UPDATES:
        return f"{_named(absent)} did not come to the end of update {steps}." if absent else ""
    if outcome.ending is Ending.SCRIPT:
        return f"The script ended after {_updates(_least(outcome))}; {steps} were asked for."
    if outcome.ending is Ending.ERROR:
        return _error(outcome)
    if outcome.ending is Ending.DIED:
        return f"{_ranks(outcome.missing)} vanished{_how(outcome.missing)} {_where(outcome.missing)}."
    if outcome.ending is Ending.STALLED:
        return _stalled(outcome)
    if outcome.ending is Ending.LAUNCHER:
        return f"The program was ended from outside{by_signal(outcome.signal)}; its ranks were ended with it."
    if outcome.ending is Ending.INTERRUPTED:
        return f"The run was interrupted{by_signal(outcome.interrupted_by)}."
    return (
        "No backward was seen: the script ran none and started no process that does,"
        " or Python ran isolated (-I, -E, -S) or with another PYTHONPATH."
    )


def rank_ends(outcome: Outcome) -> tuple[RankEnd, ...]:
    """How each rank that was seen ended, in order."""
    missing = {rank.pid: rank for rank in outcome.missing}
    kind = "died" if outcome.ending is Ending.DIED else "stalled"
    first = first_error(outcome)
    ends = [_end(report, missing.pop(report.get("pid", 0), None), kind, first) for report in outcome.reports]
    ends += [RankEnd(rank.rank, rank.updates, kind, _how([rank]).strip(), rank.stack) for rank in missing.values()]
    return tuple(sorted(ends, key=lambda end: end.rank))


def first_error(outcome: Outcome) -> dict[str, Any] | None:
    """The error of the script that came first: those of other ranks follow from it."""
    errors = [report["error"] for report in outcome.reports if report.get("error")]
    return min(errors, key=lambda error: error.get("time", 0.0), default=None)


def by_signal(number: int | None) -> str:
    """The signal's name, as the end of a clause."""
    if number is None:
        return ""
    try:
        return f" by {signal.Signals(number).name}"
    except ValueError:
        return f" by signal {number}"


def _end(report: dict[str, Any], missing: Rank | None, kind: str, first: dict[str, Any] | None) -> RankEnd:
    rank, updates = int(report.get("rank", 0)), int(report.get("updates", 0))
    if missing is not None:
        return RankEnd(
            rank,
            max(updates, missing.updates),
            kind,
            _how([missing]).strip() if kind == "died" else "",
            missing.stack or report.get("stack", ""),
        )
    error = report.get("error") or {}
    detail = _headline(error) if error else ""
    leads = first is not None and first is report.get("error")
    stack = str(error.get("text") or "") if leads else ""  # the errors of other ranks follow from the first
    return RankEnd(rank, updates, str(report.get("ended", "")), detail, stack or report.get("stack", ""))


def _error(outcome: Outcome) -> str:
    error = first_error(outcome)
    if error is not None:
        place = f" ({error['file']}:{error['line']})" if error.get("file") else ""
        return f"The script failed with {_headline(error)}{place}."
    if outcome.signal is not None:
        return f"The script was ended{by_signal(outcome.signal)}."
    return f"The script failed with exit status {outcome.code}."


def _headline(error: dict[str, Any]) -> str:
    """The type of an error and the first line of its message."""
    first = next(iter(str(error["message"]).strip().splitlines()), "")
    return f"{error['type']}: {first}" if first else str(error["type"])


def _stalled(outcome: Outcome) -> str:
    if not outcome.missing:
        return "There was no progress within the time-out, and no rank that could say why."
    furthest = max((rank.updates, rank.events) for rank in outcome.missing)
    behind = [rank for rank in outcome.missing if (rank.updates, rank.events) < furthest] or outcome.missing
    what = "hung" if behind is outcome.missing else "fell behind"
    return f"There was no progress within the time-out: {_ranks(behind).lower()} {what} {_where(behind)}{_line(behind[0].stack)}."


def _line(stack: str) -> str:
    """The innermost line of the user's code in a dump of stacks; the main thread comes last."""
    main = stack.rpartition("hread 0x")[2]
    for path, line in re.findall(r'File "(.*)", line (\d+) in ', main):
        if belongs_to(path) == USER:
            return f", at {path}:{line}"
    return ""


def _where(ranks: Sequence[Rank]) -> str:
    """How far they had come."""
    if not ranks:
        return "before the first update"
    least = min(ranks, key=lambda rank: (rank.updates, rank.micro_batches))
    return f"in update {least.updates + 1}" + (f", after {least.last}" if least.last else "")


def _how(ranks: Sequence[Rank]) -> str:
    status = next((rank.status for rank in ranks if rank.status is not None), None)
    if status is None:
        return ""
    return by_signal(-status) if status < 0 else f" with exit status {status}"


def _ranks(ranks: Sequence[Rank]) -> str:
    return _named(sorted({rank.rank for rank in ranks}))


def _named(ranks: Sequence[int]) -> str:
    if not ranks:
        return "A rank"
    return ("Rank " if len(ranks) == 1 else "Ranks ") + ", ".join(map(str, ranks))


def _least(outcome: Outcome) -> int:
    return min((int(report.get("updates", 0)) for report in outcome.reports), default=0)


def _updates(number: int) -> str:
    return f"{number} update" if number == 1 else f"{number} updates"
