"""What all checks look at, and how they answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from accumlint.findings import Finding, Severity
from accumlint.runtime.assemble import Assembly
from accumlint.runtime.assemble.contributions import Contributions
from accumlint.runtime.assemble.windows import Report, SharedWindow
from accumlint.trace import Kind
from accumlint.verdict import Check, State, Topic

MANUAL = "manual"


@dataclass(frozen=True)
class Run:
    """The assembled reports and the findings on them. `expect_k` and `tolerance` are None unless the user has given them."""

    assembly: Assembly
    findings: Sequence[Finding]
    expect_k: int | None = None
    tolerance: float | None = None

    @property
    def reports(self) -> Sequence[Report]:
        return self.assembly.reports

    @property
    def world(self) -> int:
        return self.assembly.world

    @property
    def contributions(self) -> Contributions:
        return self.assembly.contributions

    @cached_property
    def complete(self) -> Sequence[SharedWindow]:
        """The windows that end with a step on every rank, and hold a backward."""
        return [window for window in self.assembly.windows if window.size and all(each.step is not None for each in window.ranks)]

    @property
    def explained(self) -> bool:
        """Whether there are findings: what is off beside them may follow from them."""
        return any(finding.severity is not Severity.INFO for finding in self.findings)

    def name_of(self, window: SharedWindow) -> str:
        """The window's number, with its optimizer where there are several."""
        optimizers = {each.optimizer for each in self.assembly.windows}
        names = {entry["uid"]: entry["name"] for entry in self.reports[0]["objects"]}
        of = f" of {names.get(window.optimizer, '')}" if len(optimizers) > 1 else ""
        return f"window {window.number + 1}{of}"

    @cached_property
    def reduction_factor(self) -> float | None:
        """What the sum over the ranks is multiplied by, where one scalar was measured."""
        from accumlint.runtime.checks.reduction import measured_factor

        return measured_factor(self)

    @cached_property
    def reduced(self) -> Mapping[tuple[int, int], int]:
        """Buckets that were reduced during a backward, by rank and index of the backward."""
        found: dict[tuple[int, int], int] = defaultdict(int)
        for report in self.reports:
            for row in report["events"]:
                if row["kind"] == Kind.REDUCE.value and MANUAL not in row["options"] and row["numbers"].get("backward") is not None:
                    found[report["rank"], row["numbers"]["backward"]] += 1
        return found

    def rows(self, *kinds: Kind) -> list[Mapping[str, Any]]:
        """The events of these kinds on the first rank."""
        wanted = {kind.value for kind in kinds}
        return [row for row in self.reports[0]["events"] if row["kind"] in wanted] if self.reports else []

    def guilty(self, *codes: str) -> tuple[str, ...]:
        """Those of these codes that were found, errors and warnings."""
        found = {finding.code for finding in self.findings if finding.severity is not Severity.INFO}
        return tuple(code for code in dict.fromkeys(codes) if code in found)


NONE: Mapping[str, Any] = {}


def confirmed(topic: Topic, summary: str, lines: Sequence[str] = (), numbers: Mapping[str, Any] = NONE) -> Check:
    return Check(topic, State.CONFIRMED, summary, tuple(lines), (), numbers)


def violated(topic: Topic, codes: Sequence[str], summary: str, lines: Sequence[str] = (), numbers: Mapping[str, Any] = NONE) -> Check:
    return Check(topic, State.VIOLATED, summary, tuple(lines), tuple(codes), numbers)


def unobserved(topic: Topic, why: str, lines: Sequence[str] = (), numbers: Mapping[str, Any] = NONE) -> Check:
    return Check(topic, State.NOT_OBSERVED, why, tuple(lines), (), numbers)


def counted(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def listed(values: Sequence[object], most: int = 12) -> str:
    """A short list, the rest as an ellipsis."""
    shown = ", ".join(str(value) for value in values[:most])
    return f"{shown}, …" if len(values) > most else shown


def share(value: float) -> str:
    """A coefficient as people write it: 1/8 where it is one over a whole number."""
    if value and abs(value) < 1 and abs(1 / value - round(1 / value)) < 1e-4 * abs(1 / value) and abs(1 / value) < 1e7:
        return f"1/{round(1 / value)}" if value > 0 else f"-1/{-round(1 / value)}"
    return f"{value:.6g}"
