"""The windows of a run as the ranks' reports hold them: which backwards each update used, on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accumlint.runtime.assemble.sources import Site
from accumlint.trace import Kind

Report = Mapping[str, Any]
Row = Mapping[str, Any]

LEFT_OUT, RAISED = "left-out", "raised"


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
    def work(self) -> tuple[int, int, int]:
        """Micro-batches with a backward, forwards, and batches taken since the step before."""
        kinds = [row["kind"] for row in self.rows]
        return self.size, kinds.count(Kind.FORWARD.value), kinds.count(Kind.DATA.value)

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
    """The report with the place of its call in every loss."""
    rows = report["events"]
    for row in rows:
        for loss in row["numbers"].get("losses") or ():
            loss["at"] = rows[loss["call"]]["at"] if 0 <= loss["call"] < len(rows) else -1
    return report


def windows_of(report: Report) -> dict[int, list[RankWindow]]:
    """The windows of each optimizer that steps, in order; the last one is a tail where no step follows."""
    rows = report["events"]
    steppers = [row["targets"][0] for row in rows if row["kind"] == Kind.STEP.value and row["targets"]]
    found: dict[int, list[RankWindow]] = {}
    for optimizer in dict.fromkeys(steppers):
        open_window = RankWindow(report["rank"], optimizer)
        found[optimizer] = []
        for row in rows:
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


def stack_of(report: Report, row: Row) -> list[Site]:
    return list(report["stacks"][row["at"]]) if row["at"] >= 0 else []
