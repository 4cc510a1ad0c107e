"""What a run has shown, section by section: confirmed, violated or not observed. Nothing here imports torch."""

from __future__ import annotations

from accumlint.runtime.checks.context import Run
from accumlint.runtime.checks.gradient import gradient
from accumlint.runtime.checks.hooks import hooks
from accumlint.runtime.checks.memory import memory
from accumlint.runtime.checks.ranks import ranks
from accumlint.runtime.checks.reduction import reduction
from accumlint.runtime.checks.scaling import amp, normalisation
from accumlint.runtime.checks.weights import total, uniform
from accumlint.runtime.checks.window import boundary, order, schedule
from accumlint.verdict import Check

ALL = (hooks, boundary, order, amp, uniform, total, reduction, normalisation, gradient, ranks, schedule, memory)


def checks_of(run: Run) -> tuple[Check, ...]:
    """Every section, in the order of the report."""
    return tuple(check(run) for check in ALL)


__all__ = ["Run", "checks_of"]
