"""What an observed run has shown: checks, findings, and the numbers of every update."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accumlint.findings import Finding, Severity


class State(enum.Enum):
    """The three answers of a check. What was not observed has not passed."""

    CONFIRMED = "confirmed"
    VIOLATED = "violated"
    NOT_OBSERVED = "not observed"


class Topic(enum.Enum):
    """The sections of the report, in order."""

    HOOKS = "hook counts"  # buckets reduced in each micro-batch and window
    BOUNDARY = "window boundary"
    ORDER = "order of update events"
    AMP = "loss scale"
    WEIGHTS = "weight of a target"  # uniform over the window
    SUM = "sum of the weights"
    REDUCTION = "factor of the reduction"
    NORMALISATION = "factors before the step"  # unscale, normalise, clip
    GRADIENT = "gradient against the reference"
    RANKS = "agreement of the ranks"
    SCHEDULE = "scheduler and counters"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Check:
    """One section of the report.

    `summary` is one sentence, with the numbers or with the reason why nothing was observed; `lines` are further rows of
    text; `codes` those of the findings behind a violation; `numbers` what was measured, as plain data.
    """

    topic: Topic
    state: State
    summary: str
    lines: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    doubt: str = ""  # what was measured that nothing explains: such a run is not confirmed


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one optimizer on one rank. Counts of targets and elements are those given to the losses; None is not observed."""

    rank: int
    number: int  # from 1
    optimizer: str
    optimizer_step: int
    micro_steps: int
    updated: bool  # False where a scaler left the step out
    path: str = ""
    line: int = 0
    targets_local: float | None = None
    targets_global: float | None = None
    elements: float | None = None
    norm_before: float | None = None  # of the gradient, before clipping
    norm_after: float | None = None
    clip_limit: float | None = None
    scale: float | None = None
    buckets: tuple[int, ...] = ()  # reduced in each micro-batch
    coefficients: tuple[float | None, ...] = ()  # of one target in each micro-batch, before the reduction
    weight_sum: float | None = None  # over the window and all ranks, after the reduction
    gradient_error: float | None = None  # relative L2 against the reference


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How one rank came to its end. `stack` is set where it hung or died, and to the traceback where it raised the run's first error."""

    rank: int
    updates: int
    ended: str  # "updates", "script", "error", "stalled", "died"
    detail: str = ""
    stack: str = ""


@dataclass(frozen=True)
class Measurement:
    """Everything that a run has shown.

    `problem` says in one sentence why the run is not what was asked for (it ended early, a rank hung); `failed` is set
    where the script failed by itself, with its exit status.
    """

    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    updates: tuple[Update, ...]
    ranks: tuple[RankEnd, ...]
    limits: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    wanted: int = 0  # updates asked for
    problem: str = ""
    failed: int | None = None

    def check(self, topic: Topic) -> Check | None:
        return next((check for check in self.checks if check.topic is topic), None)


class Status(enum.IntEnum):
    """What a run comes to; the value is the exit status of the command."""

    CONFIRMED = 0
    VIOLATED = 1
    FAILED = 2  # the script failed by itself
    UNPROVED = 3  # nothing could be confirmed, the run ended early, or what was required was not observed

    def __str__(self) -> str:
        return {0: "confirmed", 1: "violated", 2: "script failed", 3: "not proved"}[self.value]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The status of a run, and in one sentence why it is not confirmed."""

    status: Status
    reason: str = ""


REQUIREMENTS = {
    "weights": (Topic.WEIGHTS, Topic.SUM),
    "buckets": (Topic.HOOKS,),
    "gradient": (Topic.GRADIENT,),
    "ranks": (Topic.RANKS,),
}


def judged(measurement: Measurement, *, max_warnings: int | None = None, require: frozenset[str] = frozenset()) -> Verdict:
    """What the run comes to. `require` holds names of REQUIREMENTS; an unknown one raises KeyError."""
    required = [topic for name in sorted(require) for topic in REQUIREMENTS[name]]
    levels = [_severity(finding) for finding in measurement.findings]
    errors, warnings = levels.count(Severity.ERROR), levels.count(Severity.WARNING)
    violated = [check for check in measurement.checks if check.state is State.VIOLATED and not _only_warns(check, measurement)]
    if errors or violated:
        return Verdict(Status.VIOLATED, _listed("wrong", [check.topic for check in violated]))
    if measurement.failed is not None:
        return Verdict(Status.FAILED, f"The script failed by itself with exit status {measurement.failed}.")
    if max_warnings is not None and warnings > max_warnings:
        return Verdict(Status.VIOLATED, f"There are more warnings ({warnings}) than --max-warnings allows ({max_warnings}).")
    reason = _doubt(measurement, required)
    return Verdict(Status.UNPROVED, reason) if reason else Verdict(Status.CONFIRMED, _warned(measurement))


def _warned(measurement: Measurement) -> str:
    """What is violated all the same in a run that warnings alone speak against."""
    topics = [check.topic for check in measurement.checks if check.state is State.VIOLATED]
    return _listed("but warned of (`--max-warnings 0` makes it fail)", topics)


def exit_status(measurement: Measurement, *, max_warnings: int | None = None, require: frozenset[str] = frozenset()) -> int:
    """The exit status of `accumlint verify`: 0 confirmed, 1 violated, 2 the script failed by itself, 3 not proved."""
    return judged(measurement, max_warnings=max_warnings, require=require).status.value


def _doubt(measurement: Measurement, required: list[Topic]) -> str:
    """Why a run without violations confirms nothing; "" where it does."""
    if measurement.problem:
        return measurement.problem
    behind = [end for end in measurement.ranks if end.updates < measurement.wanted]
    if behind:
        least = min(behind, key=lambda end: end.updates)
        return f"The run ended early: rank {least.rank} made {least.updates} of {measurement.wanted} updates."
    states = {check.topic: check.state for check in measurement.checks}
    doubt = next((check.doubt for check in measurement.checks if check.doubt), "")
    if doubt:
        return doubt
    if State.CONFIRMED not in states.values():
        return "Nothing could be confirmed."
    unseen = [topic for topic in (Topic.BOUNDARY, *required) if states.get(topic, State.NOT_OBSERVED) is State.NOT_OBSERVED]
    return _listed("not observed, though required", list(dict.fromkeys(unseen)))


def _only_warns(check: Check, measurement: Measurement) -> bool:
    """Whether all that stands behind a violation are findings below an error; one without findings is as bad as an error."""
    found = {finding.code for finding in measurement.findings}
    levels = [_severity(finding) for finding in measurement.findings if finding.code in check.codes]
    return bool(check.codes) and found.issuperset(check.codes) and Severity.ERROR not in levels


def _severity(finding: Finding) -> Severity:
    """The finding's own; what was never judged is taken as an error."""
    return Severity.ERROR if finding.severity is None else finding.severity


def _listed(what: str, topics: list[Topic]) -> str:
    return f"{what.capitalize()}: {', '.join(topic.value for topic in topics)}." if topics else ""
