"""The windows of a run as the ranks' reports hold them: which backwards each update used, on every rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accumlint.runtime.assemble.sources import Site, comes_by_count
from accumlint.trace import Kind

Report = Mapping[str, Any]
Row = Mapping[str, Any]

LEFT_OUT, RAISED, CLOSURE = "left-out", "raised", "closure"


@dataclass
class RankWindow:
    """What one rank did between two steps of one optimizer. `step` is None for what is left over at the end."""

    rank: int
    optimizer: int
    backwards: list[Row] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # everything from the first backward to the step
    step: Row | None = None

    @property
    def size(self) -> int:
        """Micro-batches with a backward."""
        return len({row["micro_batch"] for row in self.backwards})

    @property
    def work(self) -> tuple[int, int]:
        """Micro-batches with a backward, and forwards through a wrapper, since the step before. A rank may validate on its own."""
        wrapped = [row for row in self.rows if row["kind"] == Kind.FORWARD.value and row["sync"] is not None and not row["bypass"]]
        return self.size, len(wrapped)

    @property
    def updated(self) -> bool:
        """Whether the parameters really moved: a scaler leaves a step out, a fused optimizer finds that out itself."""
        return self.step is not None and not {LEFT_OUT, RAISED} & set(self.step["options"]) and not self.step["numbers"].get("found_inf")

    @property
    def losses(self) -> Iterator[tuple[Row, Mapping[str, Any]]]:
        for row in self.backwards:
            for loss in row["numbers"].get("losses") or ():
                yield row, loss


@dataclass
class SharedWindow:
    """The same update on all ranks, in the order of the ranks; its number counts from 0."""

    number: int
    optimizer: int
    ranks: list[RankWindow]

    @property
    def size(self) -> int:
        return max((window.size for window in self.ranks), default=0)


def prepared(report: Report) -> Report:
    """The report with the site of its call in every loss, and with the clearings that give a window up.

    A site is the line of the call, and which of several callers of that line in one micro-batch it came from: a helper that
    two places call is one term of the loss, unless both call it for the same data.
    """
    rows = report["events"]
    callers: dict[tuple[int, str], list[int]] = defaultdict(list)
    for row in rows:
        for loss in row["numbers"].get("losses") or ():
            at = rows[loss["call"]]["at"] if 0 <= loss["call"] < len(rows) else -1
            line = _line(report, at)
            seen = callers[row["micro_batch"], line]
            if at not in seen:
                seen.append(at)
            loss["site"] = f"{loss['name']} {line} {seen.index(at)}"
            loss["frame"] = report["stacks"][at][0] if line else None
    _mark_abandoned(report)
    return report


def _line(report: Report, at: int) -> str:
    stack = report["stacks"][at] if at >= 0 else []
    return ":".join(str(part) for part in stack[0][:5]) if stack else ""


def _mark_abandoned(report: Report) -> None:
    """Clearings that give a window up, for the data were not fit: not those of every window or at every so many steps, which are a
    mistake, nor those between two passes over the data, which drop a tail. Where several optimizers step, one clears what another's
    backward has left it."""
    rows = report["events"]
    steppers = dict.fromkeys(row["targets"][0] for row in rows if row["kind"] == Kind.STEP.value and row["targets"])
    if len(steppers) != 1:
        return
    optimizer = next(iter(steppers))
    inside: list[dict[str, Any]] = []
    clean = 0
    last: dict[str, Any] | None = None
    cleared = False
    for row in rows:
        if row["kind"] == Kind.BACKWARD.value and optimizer in row["numbers"].get("optimizers", ()):
            if inside and inside[-1].get("before") is None and last is None:
                inside[-1]["before"] = row
            last = row
        elif row["kind"] == Kind.ZERO.value and optimizer in row["targets"] and last is not None:
            inside.append({"row": row, "after": last, "before": None})
            last, cleared = None, True
        elif row["kind"] == Kind.STEP.value and optimizer in row["targets"]:
            clean += int(last is not None and not cleared)
            last, cleared = None, False
    if clean:
        micro_loops = _micro_loops(rows, optimizer)
        beside = [stack_of(report, row) for row in rows if row["kind"] in {Kind.BACKWARD.value, Kind.STEP.value}]
        for each in inside:
            once = each["before"] is not None and _in_one_pass(each["after"], each["before"], micro_loops)
            if once and CLOSURE not in each["row"]["options"] and not comes_by_count(stack_of(report, each["row"]), beside):
                each["row"]["abandons"] = optimizer


def _in_one_pass(one: Row, other: Row, micro_loops: set[int]) -> bool:
    """Whether no loop around the first was entered anew for the second, but for those that are entered once a window."""
    pairs = zip(one["turns"], other["turns"], strict=False)
    return all(turn[2] == later[2] for turn, later in pairs if turn[0] == later[0] and turn[0] not in micro_loops)


def _micro_loops(rows: Sequence[Row], optimizer: int) -> set[int]:
    """The lines of the loops whose every pass lies in one window."""
    windows: dict[tuple[int, int], set[int]] = defaultdict(set)
    number = 0
    for row in rows:
        if row["kind"] == Kind.STEP.value and optimizer in row["targets"]:
            number += 1
        elif row["kind"] == Kind.BACKWARD.value:
            for turn in row["turns"]:
                windows[turn[0], turn[2]].add(number)
    several = {line for (line, _), held in windows.items() if len(held) > 1}
    return {line for line, _ in windows} - several


def windows_of(report: Report) -> dict[int, list[RankWindow]]:
    """The windows of each optimizer that steps, in order; the last one is a tail where no step follows."""
    rows = report["events"]
    steppers = [row["targets"][0] for row in rows if row["kind"] == Kind.STEP.value and row["targets"]]
    found: dict[int, list[RankWindow]] = {}
    for optimizer in dict.fromkeys(steppers):
        open_window = RankWindow(report["rank"], optimizer)
        found[optimizer] = []
        for row in rows:
            if row.get("abandons") == optimizer:
                found[optimizer].append(open_window)
                open_window = RankWindow(report["rank"], optimizer)
            if row["kind"] == Kind.BACKWARD.value and optimizer in row["numbers"].get("optimizers", ()):
                open_window.backwards.append(row)
            open_window.rows.append(row)
            if row["kind"] == Kind.STEP.value and optimizer in row["targets"]:
                open_window.step = row
                found[optimizer].append(open_window)
                open_window = RankWindow(report["rank"], optimizer)
        if open_window.backwards:
            found[optimizer].append(open_window)
    return found


def shared(reports: Sequence[Report]) -> list[SharedWindow]:
    """The windows that all ranks have in common, by optimizer and number. Ranks make their objects in the same order."""
    by_rank = [windows_of(report) for report in reports]
    found: list[SharedWindow] = []
    for optimizer in by_rank[0] if by_rank else ():
        of_ranks = [windows.get(optimizer, []) for windows in by_rank]
        longest = max(len(windows) for windows in of_ranks)
        found += [SharedWindow(at, optimizer, [windows[at] for windows in of_ranks if at < len(windows)]) for at in range(longest)]
    return found


def steady_size(windows: Sequence[SharedWindow]) -> int:
    """K as it was measured: the most frequent size of a complete window, the larger of two that are equally frequent."""
    sizes = Counter(window.size for window in windows if window.size and all(each.step is not None for each in window.ranks))
    return max(sizes, key=lambda size: (sizes[size], size), default=0)


def is_steady(windows: Sequence[SharedWindow], k: int) -> bool:
    """Whether the size was met twice, or is the only one."""
    sizes = [window.size for window in windows if window.size and all(each.step is not None for each in window.ranks)]
    return sizes.count(k) > 1 or set(sizes) == {k}


def stack_of(report: Report, row: Row) -> list[Site]:
    return list(report["stacks"][row["at"]]) if row["at"] >= 0 else []
