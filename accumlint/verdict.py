"""What an observed run has shown: checks, findings, and the numbers of every update."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accumlint.findings import Finding


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
    """How one rank came to its end. `stack` is set where it hung or died."""

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
