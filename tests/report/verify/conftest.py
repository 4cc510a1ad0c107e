"""What two runs have shown: one that is right, and one whose losses are means of unequal micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from accumlint.findings import Finding, Severity, at
from accumlint.verdict import Check, Measurement, RankEnd, State, Topic, Update

TARGETS = ((2, 6), (4, 8))  # of each micro-batch, on each rank
Runs = Callable[..., Measurement]


def update(rank: int, number: int, **fields: object) -> Update:
    """An update in which every target weighs 1/20 after the reduction over the ranks."""
    ranks = len(TARGETS)
    plain = Update(
        rank,
        number,
        "optimizer",
        number,
        micro_steps=2,
        updated=True,
        path="/project/train.py",
        line=10,
        targets_local=float(sum(TARGETS[rank % ranks])),
        targets_global=20.0,
        elements=float(sum(TARGETS[rank % ranks])),
        norm_before=1.25,
        norm_after=1.0,
        clip_limit=1.0,
        buckets=(0, 2),
        coefficients=(1 / 10, 1 / 10),
        weight_sum=1.0,
        gradient_error=2.5e-16,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]


def _right(ranks: int = 2, updates: int = 2) -> Measurement:
    checks = (
        Check(Topic.MEMORY, State.CONFIRMED, "The peak was 1.2 GiB.", numbers={"peak_bytes": 1288490188}),
        Check(Topic.AMP, State.NOT_OBSERVED, "No gradient scaler was used."),
        Check(Topic.BOUNDARY, State.CONFIRMED, "Each of 2 updates came after 2 micro-batches."),
        Check(Topic.HOOKS, State.CONFIRMED, "Buckets were reduced in the last micro-batch alone."),
    )
    table = tuple(update(rank, number) for number in range(1, updates + 1) for rank in range(ranks))
    ends = tuple(RankEnd(rank, updates, "updates") for rank in range(ranks))
    environment = {"torch": "2.13.0", "backend": "gloo", "argv": ["--accum", "2"], "nested": {"left": "out"}}
    return Measurement(checks, (), table, ends, ("BatchNorm in training mode sees each micro-batch alone.",), environment, wanted=updates)


@pytest.fixture
def right() -> Runs:
    return _right


@pytest.fixture
def wrong(measured: Finding) -> Measurement:
    """Means of 2, 6, 4 and 8 targets, halved."""
    base = _right()
    updates = tuple(
        replace(each, coefficients=tuple(1 / (2 * n) for n in TARGETS[each.rank]), gradient_error=0.0948) for each in base.updates
    )
    violated = Check(
        Topic.WEIGHTS,
        State.VIOLATED,
        "A target weighs between 1/16 and 1/4.",
        ("the heaviest are in micro-batch 1 of rank 0",),
        ("ACC201",),
        {"low": 1 / 16, "high": 0.25, "by_rank": [[0.25]]},
    )
    return replace(base, checks=(violated, *base.checks), findings=(measured,), updates=updates)


@pytest.fixture
def measured(loop: Callable[..., object], finding: Finding) -> Finding:
    """A finding on a window that was measured."""
    assert finding.trace is not None
    trace = replace(finding.trace, measured=True)
    window = trace.windows()[0]
    found = at("ACC201", window.backwards[0], "Means are averaged.", help="Divide by all targets.", window=window)
    return replace(found, trace=trace, severity=Severity.ERROR)
