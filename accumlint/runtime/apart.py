"""What one rank of several shows by itself: nothing that needs the other ranks' numbers. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import replace

from accumlint.verdict import Check, Measurement, State, Topic

# Rules that compare a denominator with the counts of all ranks.
ACROSS = frozenset({"ACC105", "ACC203", "ACC204", "ACC206", "ACC207", "ACC208", "ACC212"})
# What is computed from all ranks, and would be wrong with fewer.
SHARED = (Topic.SUM, Topic.REDUCTION, Topic.GRADIENT, Topic.RANKS)


def apart(measurement: Measurement, rank: int, world: int) -> Measurement:
    """Takes from a rank's measurement what it cannot know."""
    found = tuple(finding for finding in measurement.findings if finding.code not in ACROSS)
    kept = {finding.code for finding in found}
    why = f"Rank {rank} of {world} alone does not know the others' numbers; window.gather() compares them."
    return replace(
        measurement,
        findings=found,
        checks=tuple(_alone(check, kept, why) for check in measurement.checks),
        updates=tuple(replace(update, weight_sum=None, targets_global=None, gradient_error=None) for update in measurement.updates),
    )


def _alone(check: Check, kept: set[str], why: str) -> Check:
    codes = tuple(code for code in check.codes if code in kept)
    if check.state is State.VIOLATED and (codes or not check.codes):
        return replace(check, codes=codes)
    if check.topic in SHARED or check.state is State.VIOLATED:
        return Check(check.topic, State.NOT_OBSERVED, why)
    if check.topic is Topic.WEIGHTS and check.state is State.CONFIRMED:
        return replace(check, state=State.NOT_OBSERVED, summary=f"All targets of this rank count the same. {why}")
    return check
