"""From the reports of a run to what it has shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accumlint.findings import Confidence, Finding
from accumlint.judge import judge
from accumlint.rule import Rule
from accumlint.runtime.assemble import Assembly, assemble
from accumlint.runtime.assemble.windows import Report
from accumlint.runtime.checks import Run, checks_of
from accumlint.runtime.checks.across import findings_across
from accumlint.runtime.checks.updates import updates_of
from accumlint.trace import Trace
from accumlint.verdict import Measurement, RankEnd

# What a run shows of these is also what people do on purpose (several passes over one batch, parts of a batch in one loss):
# the source has to say the same.
ASKS_SOURCE = frozenset({"ACC309", "ACC312"})


@dataclass(frozen=True)
class Question:
    """What the user wants to know: `expect_k` and `tolerance` are None unless given; `rules` are those that judge, and `keep`
    selects among what they find."""

    steps: int
    rules: Sequence[Rule]
    expect_k: int | None = None
    tolerance: float | None = None
    min_confidence: Confidence = Confidence.HIGH
    keep: Callable[[list[Finding]], list[Finding]] = list


def measurement(
    reports: Iterable[Report],
    question: Question,
    *,
    rehearsed: Iterable[Trace] = (),
    ends: Sequence[RankEnd] = (),
    problem: str = "",
    failed: int | None = None,
) -> Measurement:
    """What the reports of all ranks show. `rehearsed` are the traces of the source files, for names and for what is meant."""
    every = list(reports)
    assembly = assemble(every, rehearsed)
    findings = findings_of(assembly, question)
    run = Run(assembly, findings, question.expect_k, question.tolerance)
    return Measurement(
        checks=checks_of(run),
        findings=tuple(findings),
        updates=tuple(updates_of(run)),
        ranks=tuple(ends) or tuple(_end(report) for report in assembly.reports),
        limits=(*_alone(every, assembly.reports), *_limits(assembly.reports)),
        environment=_environment(assembly.reports),
        wanted=question.steps,
        problem=problem,
        failed=failed,
    )


def findings_of(assembly: Assembly, question: Question) -> list[Finding]:
    """Each finding once: of the first rank that shows it."""
    chosen = {rule.code for rule in question.rules}
    supported = {finding.code for trace in assembly.hints.traces for finding in judge(trace, _asking(question.rules))}
    found: dict[tuple[str, str, int, int], Finding] = {}
    for trace in assembly.traces:
        for finding in judge(trace, question.rules):
            if finding.confidence >= question.min_confidence and (finding.code not in ASKS_SOURCE or finding.code in supported):
                found.setdefault(finding.key, finding)
    for finding in findings_across(assembly, list(found.values())):
        if finding.code in chosen and not any(each.code == finding.code for each in found.values()):
            found.setdefault(finding.key, replace(finding, trace=assembly.traces[0] if assembly.traces else None))
    return sorted(question.keep(list(found.values())), key=lambda finding: (finding.place.path, finding.place.line, finding.code))


def _asking(rules: Sequence[Rule]) -> list[Rule]:
    return [rule for rule in rules if rule.code in ASKS_SOURCE]


def _end(report: Report) -> RankEnd:
    error = report.get("error") or {}
    return RankEnd(int(report["rank"]), int(report["updates"]), str(report["ended"]), str(error.get("message", "")))


def _alone(every: Sequence[Report], shown: Sequence[Report]) -> Iterable[str]:
    trained = sum(1 for report in every if report["events"])
    if trained > len(shown):
        yield f"{trained} processes trained without a process group between them: the one that got furthest is shown."


def _environment(reports: Sequence[Report]) -> Mapping[str, Any]:
    if not reports:
        return {}
    names = ("torch", "python", "device", "backend", "world", "script", "argv", "host")
    return {name: reports[0].get(name) for name in names}


def _limits(reports: Sequence[Report]) -> Iterable[str]:
    """What keeps micro-batches from being one large batch in this model, and what could not be observed."""
    kinds = reports[0].get("modules", {}) if reports else {}
    if kinds.get("coupled"):
        yield f"{', '.join(kinds['coupled'])} in training mode: statistics are those of each micro-batch, not of the whole window."
    if kinds.get("random"):
        yield f"{', '.join(kinds['random'])} in training mode: other random masks than one large batch would draw."
    seen: dict[str, None] = {}
    for report in reports:
        for text in (*report.get("limits", ()), *(f"internal: {trouble}" for trouble in report.get("troubles", ()))):
            seen.setdefault(str(text), None)
    yield from seen
