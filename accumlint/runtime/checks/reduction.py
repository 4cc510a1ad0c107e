"""By which factor the reduction scales the sum of the ranks' gradients: read from samples before and after it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accumlint.runtime.checks.context import Run, confirmed, share, unobserved, violated
from accumlint.trace import Kind
from accumlint.verdict import Check, Topic

CODES = ("ACC107",)
EXACT = 1e-3

Row = Mapping[str, Any]


def reduction(run: Run) -> Check:
    """1/W where the wrapper averages; whatever was measured is named."""
    topic = Topic.REDUCTION
    codes = run.guilty(*CODES)
    if run.world < 2:
        return unobserved(topic, "One process: there is no reduction.")
    found = list(measured(run))
    if not found:
        return unobserved(topic, "No bucket was seen before and after its reduction on all ranks.")
    factor, residual = _typical(found)
    numbers = {"factor": factor, "residual": residual, "reductions": len(found)}
    what = f"The reduction multiplies the sum over the ranks by {share(factor)} ({len(found)} measured, {run.world} ranks)"
    if codes:
        return violated(topic, codes, f"{what}.", (), numbers)
    if residual > EXACT:
        return unobserved(
            topic, f"{what}, but by more than one scalar (residual {residual:.1e}): a hook of the user's own compresses.", (), numbers
        )
    return confirmed(topic, f"{what}.", (), numbers)


def measured_factor(run: Run) -> float | None:
    """The factor, where it is one scalar."""
    found = list(measured(run))
    if not found:
        return None
    factor, residual = _typical(found)
    return factor if residual <= EXACT else None


def measured(run: Run) -> Iterator[tuple[float, float]]:
    """Factor and residual of each reduction that all ranks have seen."""
    by_model: dict[int, list[list[Row]]] = defaultdict(list)
    for report in run.reports:
        own: dict[int, list[Row]] = defaultdict(list)
        for row in report["events"]:
            if row["kind"] == Kind.REDUCE.value and "manual" not in row["options"] and row["model"] is not None:
                own[row["model"]].append(row)
        for model, rows in own.items():
            by_model[model].append(rows)
    for of_ranks in by_model.values():
        if len(of_ranks) != len(run.reports) or len({len(rows) for rows in of_ranks}) != 1:
            continue
        for together in zip(*of_ranks, strict=True):
            found = _compare([row["numbers"] for row in together])
            if found is not None:
                yield found


def _compare(ranks: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    befores = [numbers.get("before") for numbers in ranks]
    afters = [numbers.get("after") for numbers in ranks]
    if any(not each for each in (*befores, *afters)):
        return None
    if isinstance(befores[0][0], list):  # type: ignore[index]
        summed = [[math.fsum(values) for values in zip(*parts, strict=True)] for parts in zip(*befores, strict=True)]
        pairs = [(one, other) for part, after in zip(summed, afters, strict=False) for one, other in zip(part, after or (), strict=False)]
    else:
        summed_flat = [math.fsum(values) for values in zip(*befores, strict=True)]
        pairs = list(zip(summed_flat, afters[0] or (), strict=False))
    size = math.fsum(one * one for one, _ in pairs)
    if not size or not math.isfinite(size):
        return None
    factor = math.fsum(one * other for one, other in pairs) / size
    after = math.sqrt(math.fsum(other * other for _, other in pairs))
    residual = math.sqrt(math.fsum((other - factor * one) ** 2 for one, other in pairs)) / after if after else 0.0
    return factor, residual


def _typical(found: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The median factor and the largest residual, where the factors are alike."""
    factors = sorted(factor for factor, _ in found)
    middle = factors[len(factors) // 2]
    spread = max(abs(factor - middle) for factor in factors) / abs(middle) if middle else math.inf
    return middle, max(spread, max(residual for _, residual in found))
