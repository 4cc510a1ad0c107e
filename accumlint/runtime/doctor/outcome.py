"""What the two-rank experiment must give, and whether it did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TARGET_COUNTS = ((2, 6), (4, 8))
EXACT = 1e-15  # a right gradient may differ from the full batch's by the order of summation in float64
MEAN_OF_MEANS = 0.0948  # largest absolute error of the wrong one
MEAN_OF_MEANS_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Expected:
    """One way to accumulate: calls of the communication hook in the window (None without a hook), and whether it is right."""

    name: str
    says: str
    calls: int | None
    right: bool


EXPECTED = (
    Expected("native", "one synchronisation at the end, no hook", None, True),
    Expected("sync-each", "synchronised at every micro-batch", 2, True),
    Expected("sync-final", "one synchronisation at the end", 1, True),
    Expected("backward-only", "no_sync around the backward only", 2, True),
    Expected("mean-of-means", "the mean of the micro-batches' means", 1, False),
)


@dataclass(frozen=True, slots=True)
class Case:
    """What one case gave: calls a rank, errors against the full batch (max-abs, float64), spread between the ranks."""

    expected: Expected
    calls: tuple[int | None, ...]
    gradient_error: float
    weight_error: float
    between_ranks: float
    deviations: tuple[str, ...]


def judge(results: Sequence[Mapping[str, Any]]) -> tuple[Case, ...]:
    """The cases of the experiment, from what its ranks wrote, rank 0 first. Raises KeyError for a result without its cases."""
    hooked = results[0]["cases"]["sync-final"]["gradient"]
    return tuple(_case(expected, results, hooked) for expected in EXPECTED)


def _case(expected: Expected, results: Sequence[Mapping[str, Any]], hooked: Sequence[float]) -> Case:
    ranks = [result["cases"][expected.name] for result in results]
    full = results[0]["full_batch"]
    calls = tuple(None if rank["calls"] is None else sum(rank["calls"]) for rank in ranks)
    case = Case(
        expected,
        calls,
        max(largest(rank["gradient"], full["gradient"]) for rank in ranks),
        max(largest(rank["weights"], full["weights"]) for rank in ranks),
        max(largest(rank[what], ranks[0][what]) for rank in ranks for what in ("gradient", "weights")),
        (),
    )
    found = list(_deviations(case))
    if expected.calls is None and (apart := largest(ranks[0]["gradient"], hooked)) > EXACT:
        found.append(f"its gradient is {apart:.3g} from that of the same window with a hook")
    return Case(case.expected, case.calls, case.gradient_error, case.weight_error, case.between_ranks, tuple(found))


def _deviations(case: Case) -> list[str]:
    expected, found = case.expected, []
    if any(calls != expected.calls for calls in case.calls):
        found.append(f"the hook was called {_each(case.calls)} times on the ranks, not {expected.calls} on each")
    if expected.right and not (case.gradient_error < EXACT and case.weight_error < EXACT):
        found.append(f"gradient error {case.gradient_error:.3g}, weight error {case.weight_error:.3g}, not under {EXACT:g}")
    if not expected.right and not abs(case.gradient_error - MEAN_OF_MEANS) <= MEAN_OF_MEANS_TOLERANCE:
        found.append(f"gradient error {case.gradient_error:.5f}, not {MEAN_OF_MEANS} ± {MEAN_OF_MEANS_TOLERANCE:g}")
    if not case.between_ranks <= EXACT:
        found.append(f"the ranks' gradients or weights are {case.between_ranks:.3g} apart")
    return found


def largest(values: Sequence[float], others: Sequence[float]) -> float:
    """The largest absolute difference; infinite where the lengths differ or a value is not a number."""
    if len(values) != len(others) or not values:
        return float("inf")
    apart = [abs(one - other) for one, other in zip(values, others, strict=True)]
    return max(apart) if all(value == value for value in apart) else float("inf")


def _each(calls: Sequence[int | None]) -> str:
    return " and ".join(str(value) for value in calls)
