"""With which coefficient a valid target enters the gradient: a monomial over the counts of a window.

A `mean` loss gives 1/n, `/ K` gives 1/(nK), `sum * W / N` gives W/N. K itself is a number in a rehearsal (3, then 2), so
that a tail of one micro-batch divided by K shows as 1/3; the factors remember where each number came from.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accumlint.trace import Place


class Quantity(enum.Enum):
    """What a factor counts."""

    __hash__ = object.__hash__

    UNITS = "n"  # valid targets of this micro-batch (what a mean runs over)
    WINDOW_UNITS = "N_r"  # of the window, this rank only
    GLOBAL_UNITS = "N"  # of the window, over all ranks
    ACCUMULATION = "K"  # K, or the size of this very window
    WORLD = "W"  # number of ranks
    SCALE = "S"  # loss scale of mixed precision
    CONSTANT = "c"  # a plain number, such as the weight of a loss term
    INPUTS = "x"  # a count of inputs, not of valid targets (numel, attention mask, unshifted labels)
    UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Factor:
    """One multiplication (power 1) or division (power -1) that the loss or the gradient went through.

    `value` is the number used in the rehearsal or measured, None while symbolic. `text` is the source of the operand.
    `implicit` marks what a function or a framework does by itself (the mean of a loss function, an engine's division).
    `guarded` says that the operand cannot be zero (`max(n, 1)`, `clamp(min=1)`, an if around it).
    """

    quantity: Quantity
    power: int
    value: Fraction | None = None
    text: str = ""
    place: Place | None = None
    implicit: bool = False
    guarded: bool = False
    root: str = ""  # the setting that the number comes from, to tell two settings apart
    uneven: bool = False  # a count of what a mask or a filter leaves, so that it differs between micro-batches
    stale: bool = False  # a running count that holds targets of earlier updates as well
    of: str = ""  # what is counted, or multiplied by, to tell that a mask is divided by its own sum
    group: str = ""  # of the ranks that were counted: "all", "own" (a process group of their own), "" where nobody knows


@dataclass(frozen=True, slots=True)
class Term:
    """A summand of a loss, as the source spells it, with the weight that it has by now."""

    weight: Weight
    text: str = ""
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """The coefficient of one unit: the product of its factors. `mixed` when terms of different weight were added.

    `known` is False where the loss came out of a function that could not be followed: then a division in it may be hidden.
    `terms` are the summands of a loss that is a sum, those of unknown weight included.
    """

    factors: tuple[Factor, ...] = ()
    mixed: bool = False
    known: bool = True
    terms: tuple[Term, ...] = ()

    def times(self, *factors: Factor) -> Weight:
        terms = tuple(replace(term, weight=term.weight.times(*factors)) for term in self.terms)
        return replace(self, factors=self.factors + factors, terms=terms)

    def of(self, *quantities: Quantity) -> tuple[Factor, ...]:
        return tuple(factor for factor in self.factors if factor.quantity in quantities)

    def power(self, quantity: Quantity) -> int:
        """The exponent of a quantity in the monomial: -1 for a plain mean's n."""
        return sum(factor.power for factor in self.factors if factor.quantity is quantity)

    def value(self, *quantities: Quantity) -> Fraction | None:
        """The product of the numbers of these quantities (of all, when none is named); None if one is symbolic."""
        product = Fraction(1)
        for factor in self.factors:
            if quantities and factor.quantity not in quantities:
                continue
            if factor.value is None or (factor.value == 0 and factor.power < 0):
                return None
            product *= factor.value**factor.power
        return product

    @property
    def share(self) -> Fraction | None:
        """What the divisions by K (or by the window's size) leave: 1/3 for `/ K` at K = 3, 1 where nothing divides."""
        return self.value(Quantity.ACCUMULATION)

    def __str__(self) -> str:
        names: dict[str, int] = {}
        for factor in self.factors:
            if factor.quantity is Quantity.CONSTANT:
                continue
            names[factor.quantity.value] = names.get(factor.quantity.value, 0) + factor.power
        over = [_power(name, power) for name, power in names.items() if power > 0]
        under = [_power(name, -power) for name, power in names.items() if power < 0]
        top = "·".join(over) or "1"
        bottom = "·".join(under)
        text = f"{top}/({bottom})" if len(under) > 1 else f"{top}/{bottom}" if under else top
        return f"{text} + …" if self.mixed else text


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def add(weights: Iterable[Weight | None]) -> Weight | None:
    """The weight of a sum of terms: theirs when they agree, mixed when they do not."""
    present = [weight for weight in weights if weight is not None]
    if not present:
        return None
    first = present[0]
    agree = all(_monomial(weight) == _monomial(first) for weight in present)
    return replace(first, mixed=first.mixed or not agree, known=all(weight.known for weight in present))


def _monomial(weight: Weight) -> tuple[tuple[str, int], ...]:
    powers = {quantity.value: weight.power(quantity) for quantity in Quantity if quantity is not Quantity.CONSTANT}
    return tuple(sorted((name, power) for name, power in powers.items() if power))
