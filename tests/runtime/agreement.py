"""`python -m tests.runtime.agreement [PART OF A NAME]... [--share I/N]`: runs every fixture and compares what the two halves say.

A line for each fixture that differs, then a table by rule. What a rule's `exception` declares is counted, and no difference.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accumlint.cli.rehearsed import rehearsed
from accumlint.findings import Severity
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import Measurement, State
from tests.needs import can_run
from tests.runtime.runs import measure

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
NO_LOOP = {"acc000_unreadable_file", "acc001_unused_suppression"}
TRIES = 2  # two ranks on a busy machine now and then miss each other


@dataclass
class Compared:
    """One fixture: the codes that the linter reports, and what the run has shown."""

    path: Path
    expected: set[str]
    shown: Measurement | None
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def found(self) -> set[str]:
        findings = self.shown.findings if self.shown is not None else ()
        own = self.path.parent.name.partition("_")[0].upper()  # the rule of a folder may be a note
        return {finding.code for finding in findings if finding.severity is not Severity.INFO or finding.code == own}

    @property
    def missing(self) -> set[str]:
        return self.expected - self.found

    @property
    def undeclared(self) -> set[str]:
        return {code for code in self.missing if not catalogue()[code].exception}

    def differences(self) -> Iterator[str]:
        if self.undeclared:
            yield f"not measured: {', '.join(sorted(self.undeclared))}"
        if self.found - self.expected:
            yield f"only measured: {', '.join(sorted(self.found - self.expected))}"
        yield from self.problems


def scripts(parts: Sequence[str] = ("",)) -> list[Path]:
    chosen = (path for path in sorted(FIXTURES.glob("*/*.py")) if path.parent.name not in NO_LOOP)
    return [path for path in chosen if any(part in str(path) for part in parts) and can_run(path)]


def compare(path: Path) -> Compared:
    """Runs one script under the probes and judges it."""
    text = path.read_text(encoding="utf-8")
    head = "\n".join(text.split("\n")[:4])
    ranks = re.search(r"^# nproc: (\d+)", head, re.MULTILINE)
    ends = {"error", "stalled"} if re.search(r"^# raises: ", head, re.MULTILINE) else {"script"}
    expected = {code for line in text.split("\n") for code in re.findall(r"ACC\d{3}", line.partition("# expect:")[2])}
    for _ in range(TRIES):
        reports = measure(path, int(ranks.group(1)) if ranks else 1)
        if all(report["ended"] in ends for report in reports) or ("error" in ends and any(report["ended"] in ends for report in reports)):
            break
    compared = Compared(path, expected, _shown(reports))
    compared.problems += list(_problems(reports, ends, compared))
    return compared


def _shown(reports: Sequence[dict[str, Any]]) -> Measurement:
    seen = [report for report in reports if report.get("stacks")]
    return measurement(seen, Question(1, tuple(catalogue().values())), rehearsed=rehearsed(seen))


def _problems(reports: Sequence[dict[str, Any]], ends: set[str], compared: Compared) -> Iterator[str]:
    if not any(report["ended"] in ends for report in reports):
        yield f"ended: {', '.join(report['ended'] for report in reports)}"
    for trouble in sorted({trouble for report in reports for trouble in report.get("troubles", ())}):
        yield f"internal: {trouble}"
    violated = [check.topic.value for check in compared.shown.checks if check.state is State.VIOLATED] if compared.shown else []
    if violated and not compared.found:
        yield f"violated without a finding: {', '.join(violated)}"


def table(every: Iterable[Compared]) -> str:
    """By rule: fixtures that the linter reports, those that the run shows too, and those that the rule declares to be unseen."""
    said: Counter[str] = Counter()
    shown: Counter[str] = Counter()
    declared: Counter[str] = Counter()
    silent = Counter(bool(each.found) for each in every if not each.expected)
    for each in every:
        said.update(each.expected)
        shown.update(each.expected & each.found)
        declared.update(each.missing - each.undeclared)
    lines = ["code     linter  run  declared"]
    lines += [f"{code}  {said[code]:>6}  {shown[code]:>3}  {declared[code]:>8}" for code in sorted(said)]
    lines.append(f"good     {sum(silent.values()):>6} scripts, {silent[False]} silent in the run")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[""])
    parser.add_argument("--share", default="0/1", help="only every N-th script, beginning with the I-th")
    options = parser.parse_args()
    first, step = map(int, options.share.split("/"))
    every: list[Compared] = []
    differing = 0
    for path in scripts(options.parts)[first::step]:
        compared = compare(path)
        every.append(compared)
        for difference in compared.differences():
            differing += 1
            print(f"{compared.name}: {difference}", flush=True)
    print(table(every))
    return 1 if differing else 0


if __name__ == "__main__":
    import torch  # noqa: F401

    sys.exit(main())
