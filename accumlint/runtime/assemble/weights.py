"""Measured coefficients as weights: each number that a loss was scaled by is recognised as one of the window's counts, or is a constant.

A number counts as recognised only when it fits in every micro-batch of the window and on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from accumlint.weight import Factor, Quantity, Weight

TOLERANCE = 1e-3  # relative; half precision rounds what a loss is scaled by


@dataclass(frozen=True, slots=True)
class Counts:
    """What a scalar may stand for, in one micro-batch of one rank."""

    units: float
    elements: float
    window_units: float  # of this rank
    global_units: float
    rows: float  # samples: the first dimension of the targets, 0 where there is but one dimension
    window_elements: float
    accumulation: int  # K
    size: int  # micro-batches of this very window
    world: int
    units_so_far: float = 0.0  # of this rank, in this window and in those before it
    global_units_so_far: float = 0.0
    overcount: float = 0.0  # what divides each window of the run, where that is a count of more than its targets

    def value(self, quantity: Quantity) -> float:
        return {
            Quantity.UNITS: self.units,
            Quantity.INPUTS: self.elements,
            Quantity.WINDOW_UNITS: self.window_units,
            Quantity.GLOBAL_UNITS: self.global_units,
            Quantity.ACCUMULATION: float(self.accumulation),
            Quantity.WORLD: float(self.world),
        }[quantity]


Power = tuple[Quantity, int]

_N, _NR, _ALL, _K, _W, _X = (
    Quantity.UNITS,
    Quantity.WINDOW_UNITS,
    Quantity.GLOBAL_UNITS,
    Quantity.ACCUMULATION,
    Quantity.WORLD,
    Quantity.INPUTS,
)
# What a divisor may be, the simplest first. For a mean, K is simpler than a count of targets; for a sum it is the other way round.
_OF_A_MEAN: tuple[tuple[Power, ...], ...] = (
    ((_K, 1),),
    ((_W, 1),),
    ((_W, -1),),
    ((_N, 1),),
    ((_NR, 1),),
    ((_ALL, 1),),
    ((_X, 1),),
    ((_K, 1), (_W, 1)),
    ((_K, 1), (_W, -1)),
    ((_ALL, 1), (_W, -1)),
    ((_K, 2),),
    ((_NR, 1), (_K, 1)),
    ((_ALL, 1), (_K, 1)),
    # A mean that is multiplied by its own count again.
    ((_N, -1),),
    ((_N, -1), (_NR, 1)),
    ((_N, -1), (_ALL, 1)),
    ((_N, -1), (_ALL, 1), (_W, -1)),
    ((_N, -1), (_NR, 1), (_W, -1)),
)
_OF_A_SUM: tuple[tuple[Power, ...], ...] = (
    ((_N, 1),),
    ((_NR, 1),),
    ((_ALL, 1),),
    ((_X, 1),),
    ((_ALL, 1), (_W, -1)),
    ((_NR, 1), (_W, -1)),
    ((_NR, 1), (_W, 1)),
    ((_ALL, 1), (_W, 1)),
    ((_K, 1),),
    ((_W, 1),),
    ((_W, -1),),
    ((_N, 1), (_K, 1)),
    ((_N, 1), (_K, 1), (_W, -1)),
    ((_X, 1), (_K, 1)),
    ((_NR, 1), (_K, 1)),
    ((_ALL, 1), (_K, 1)),
    ((_ALL, 1), (_K, 1), (_W, -1)),
    ((_K, 2),),
    ((_NR, 2),),
    ((_ALL, 2),),
)


def explain(divisors: Sequence[float], counts: Sequence[Counts], *, mean: bool) -> tuple[Power, ...] | None:
    """The monomial that the divisors are in every micro-batch; () where they are 1, None where nothing fits."""
    if not divisors or not all(math.isfinite(each) and each > 0 for each in divisors):
        return None
    if all(_close(each, 1.0) for each in divisors):
        return ()
    sized = all(_close(each, one.size) for each, one in zip(divisors, counts, strict=True))
    if mean and sized:
        return ((_K, 1),)  # also in a short last window, whose size may be that of the group
    for monomial in _OF_A_MEAN if mean else _OF_A_SUM:
        if monomial == ((_K, 2),) and sized:
            break  # another optimizer of the loop has another K
        if _plausible(monomial, counts) and all(_close(each, _product(monomial, one)) for each, one in zip(divisors, counts, strict=True)):
            return monomial
    if mean and all(one.rows > 1 and _close(each, 1 / one.rows) for each, one in zip(divisors, counts, strict=True)):
        return ((_N, -1),)  # the mean, times the batch: a sum by another name
    if sized:
        return ((_K, 1),)
    return None


def _plausible(monomial: tuple[Power, ...], counts: Sequence[Counts]) -> bool:
    for quantity, _ in monomial:
        if quantity is _W and counts[0].world < 2:
            return False
        if quantity is _K and counts[0].accumulation < 2:
            return False
        if quantity is _ALL and counts[0].world < 2:
            return False
        if quantity is _NR and counts[0].world > 1 and len({one.window_units for one in counts}) == 1:
            return False  # equal on all ranks: then it is the global count over the ranks
        if quantity is _X and all(_close(one.elements, one.units) for one in counts):
            return False
    return True


def _product(monomial: tuple[Power, ...], counts: Counts) -> float:
    return math.prod(counts.value(quantity) ** power for quantity, power in monomial if counts.value(quantity) > 0)


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=TOLERANCE)


def factors_of(divisors: Sequence[float], counts: Sequence[Counts], *, mean: bool) -> list[tuple[Factor, ...]]:
    """The factors of one scalar of a loss, in each of the micro-batches."""
    monomial = explain(divisors, counts, mean=mean)
    if monomial == ():
        return [()] * len(divisors)
    if monomial is None:
        return (None if mean else _other_counts(divisors, counts)) or _unexplained(divisors)
    powers = [(quantity, -1 if power > 0 else 1) for quantity, power in monomial for _ in range(abs(power))]
    return [
        tuple(_factor(quantity, power, one, divisor) for quantity, power in powers) for one, divisor in zip(counts, divisors, strict=True)
    ]


def _other_counts(divisors: Sequence[float], counts: Sequence[Counts]) -> list[tuple[Factor, ...]] | None:
    """A count that no update set back, the targets of the whole run so far; or one of more than the targets."""
    for quantity, of in ((_NR, [one.units_so_far for one in counts]), (_ALL, [one.global_units_so_far for one in counts])):
        if all(_close(divisor, each) for divisor, each in zip(divisors, of, strict=True)):
            return [(Factor(quantity, -1, fraction(each), text=number(each), stale=True),) for each in of]
    pairs = list(zip(divisors, counts, strict=True))
    if not all(one.overcount for one in counts):
        return None
    by_more = [Factor(Quantity.INPUTS, -1, fraction(one.overcount), text=number(one.overcount)) for one in counts]
    if all(_close(divisor, one.overcount) for divisor, one in pairs):
        return [(factor,) for factor in by_more]
    if counts[0].world > 1 and all(_close(divisor * one.world, one.overcount) for divisor, one in pairs):
        return [(factor, _factor(_W, 1, one, divisor)) for factor, (divisor, one) in zip(by_more, pairs, strict=True)]
    return None


def _unexplained(divisors: Sequence[float]) -> list[tuple[Factor, ...]]:
    """A constant where all are alike, unknown where not."""
    value = divisors[0] if divisors else math.nan
    if not all(_close(each, value) for each in divisors) or not math.isfinite(value) or value <= 0:
        return [(Factor(Quantity.UNKNOWN, -1, None),)] * len(divisors)
    power, size = (-1, value) if value >= 1 else (1, 1 / value)
    return [(Factor(Quantity.CONSTANT, power, fraction(size), text=number(size)),)] * len(divisors)


def _factor(quantity: Quantity, power: int, counts: Counts, divisor: float) -> Factor:
    value = counts.value(quantity)
    if quantity is Quantity.ACCUMULATION and not _close(divisor, value) and _close(divisor, counts.size):
        value = float(counts.size)
    return Factor(quantity, power, fraction(value), text=number(value))


def fraction(value: float) -> Fraction:
    return Fraction(value).limit_denominator(1_000_000)


def number(value: float) -> str:
    """A number as people write it."""
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.6g}"


def mean_factor(loss: Mapping[str, Any]) -> Factor:
    """The division that the loss function does by itself."""
    return Factor(Quantity.UNITS, -1, None, text=f"{loss['name']}", implicit=True, root=loss["name"])


def uniform(loss: Mapping[str, Any]) -> float | None:
    """The one coefficient of all units of a loss call; None where they differ, or where it has none."""
    low, high = loss.get("low"), loss.get("high")
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)) or not _close(low, high) or low == 0:
        return None
    return (float(low) + float(high)) / 2


UNKNOWN = Weight((Factor(Quantity.UNKNOWN, -1, None),), known=False)
