"""A trace and the rules in, findings out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Protocol

from accumlint.findings import Finding, Severity
from accumlint.rule import Rule
from accumlint.trace import PERHAPS, Trace

K = 3  # the accumulation that a rehearsal is judged at …
CONTROL_K = 2  # … and the one at which what it found must show again


class Rehearsal(Protocol):
    """What judging needs of a rehearsal: its traces, one for each world of answers to what the code leaves open."""

    def worlds(self, k: int, /) -> Iterator[Trace]: ...


def judge(trace: Trace, rules: Iterable[Rule]) -> list[Finding]:
    """What the rules say of one rehearsal or run, one finding a code and place."""
    found: dict[tuple[str, str, int, int], Finding] = {}
    assumed = Severity.INFO if trace.fact("assumes-k") else None  # nothing shows that it accumulates at all
    perhaps = {place for event in trace.events if PERHAPS in event.options for place in (event.place, event.in_loop)}
    for each in rules:
        if not (each.every_loop or trace.accumulates):
            continue
        for finding in each.check(trace):
            if finding.place in perhaps:
                continue
            own = each.severity if finding.severity is None else finding.severity
            severity = own if assumed is None else assumed
            found.setdefault(finding.key, replace(finding, severity=severity, trace=trace))
    return list(found.values())


def judge_rehearsal(rehearsal: Rehearsal, rules: Iterable[Rule]) -> list[Finding]:
    """What the rules say of a training loop at K = 3 and again at K = 2, each finding once, from the first world that shows it.

    A finding that the default world does not show carries the settings under which it happens.
    """
    wanted = tuple(rules)
    worlds = list(rehearsal.worlds(K))
    first: dict[tuple[str, str, int, int], Finding] = {}
    for number, trace in enumerate(worlds):
        if any(_shows(trace) == _shows(other) for other in worlds[:number]):
            continue  # the same is found in it
        for finding in judge(trace, wanted):
            settings = () if number == 0 else finding.settings or _differing(trace, worlds[0])
            first.setdefault(finding.key, replace(finding, settings=settings))
    if not first:
        return []
    missing = {_line(finding) for finding in first.values()}
    for trace in rehearsal.worlds(CONTROL_K):
        missing -= {_line(finding) for finding in judge(trace, wanted)}
        if not missing:
            break
    return [finding for finding in first.values() if _line(finding) not in missing]


def _shows(trace: Trace) -> list[object]:
    """All that a rule sees of a trace."""
    return [getattr(trace, each.name) for each in fields(trace) if each.name != "settings"]


def _line(finding: Finding) -> tuple[str, str, int]:
    """What must agree between the two values of K: columns and messages may name the numbers."""
    return (finding.code, finding.place.path, finding.place.line)


def _differing(trace: Trace, default: Trace) -> tuple[tuple[str, str], ...]:
    """The settings of a world that the default world answers otherwise."""
    answers = dict(default.settings)
    return tuple((name, answer) for name, answer in trace.settings if answers.get(name) != answer)
