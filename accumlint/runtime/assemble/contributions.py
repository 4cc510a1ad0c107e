"""The weight of every backward and of every scaling of gradients in a window, from the coefficients that all ranks have measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from accumlint.runtime.assemble.sources import place_of, text_of
from accumlint.runtime.assemble.weights import UNKNOWN, Counts, factors_of, mean_factor, uniform
from accumlint.runtime.assemble.windows import RankWindow, Row, SharedWindow
from accumlint.trace import Kind
from accumlint.weight import Factor, Quantity, Term, Weight, add

Key = tuple[int, int]  # rank, index of the row
Call = tuple[Row, dict[str, Any], RankWindow]  # the backward, the loss call behind it, the window
Site = str  # of a loss call, the same on all ranks

TOLERANCE = 1e-2
MOST_OVERCOUNTED = 1.5


class Contributions:
    """Weights by rank and row; `calls` gives what a loss site's calls were in one window."""

    def __init__(self, windows: Sequence[SharedWindow], k: int, world: int) -> None:
        self.weights: dict[Key, Weight] = {}
        self.factors: dict[Key, Weight] = {}
        self._windows = windows
        self._before: dict[tuple[Site, int], float] = defaultdict(float)  # targets of a rank in the windows before the present one
        self.k = k
        self._world = world
        self._overcounts = overcounts(windows, world)
        for window in windows:
            self._losses(window)
            self._scalings(window)
            for site, calls in calls_by_site(window).items():
                for _, loss, rank in calls:
                    self._before[site, rank.rank] += loss["units"] or 0.0
        if not any(_is_empty(rank) for window in windows for rank in window.ranks):
            for weights in (self.weights, self.factors):
                weights.update({key: _never_zero(weight) for key, weight in weights.items()})

    def unseen(self, rank: int, index: int, divisor: float) -> Weight:
        """The weight of a scaling that no probe saw, in the window of this row."""
        for window in self._windows:
            mine = next((each for each in window.ranks if each.rank == rank), None)
            inside = mine is not None and bool(mine.rows) and mine.rows[0]["index"] <= index <= mine.rows[-1]["index"]
            for calls in calls_by_site(window).values() if inside else ():
                counts = counts_of(calls, self.k, self._world)
                own = next((one for call, one in zip(calls, counts, strict=True) if call[2].rank == rank), None)
                if own is not None:
                    mean = all(call[1]["reduction"] == "mean" for call in calls)
                    return Weight(factors_of([divisor], [own], mean=mean)[0])
        return UNKNOWN

    def _counts_of(self, site: Site, calls: Sequence[Call], window: SharedWindow) -> list[Counts]:
        before = {rank: units for (where, rank), units in self._before.items() if where == site}
        found = counts_of(calls, self.k, self._world, before)
        of_ranks = [self._overcounts.get((id(window), call[2].rank), 0.0) for call in calls]
        return [replace(one, overcount=count) for one, count in zip(found, of_ranks, strict=True)]

    def _losses(self, window: SharedWindow) -> None:
        terms: dict[Key, list[Term]] = defaultdict(list)
        for site, calls in calls_by_site(window).items():
            full = [call for call in calls if call[1]["units"] != 0]
            found = list(_weights(full, self._counts_of(site, full, window)))
            for call, weight in zip(full, found, strict=True):
                terms[_key(call)].append(_term(call, weight))
            for call in calls if full else ():
                if call[1]["units"] == 0:  # nothing can be measured of it, and it is written like the others
                    terms[_key(call)].append(_term(call, found[0]))
        for rank in window.ranks:
            for row in rank.backwards:
                own = terms.get((rank.rank, row["index"]), [])
                together = _sum_of(own)
                covered = row["numbers"].get("covered")
                self.weights[rank.rank, row["index"]] = UNKNOWN if together is None or covered is False else together

    def _scalings(self, window: SharedWindow) -> None:
        """Scalings between the last backward and the step: the same statement on all ranks is one scalar of the window."""
        sites = calls_by_site(window)
        for site, calls in sites.items():
            counts = self._counts_of(site, calls, window)
            first = {call[2].rank: one for call, one in zip(reversed(calls), reversed(counts), strict=True)}
            mean = all(call[1]["reduction"] == "mean" for call in calls)
            for rows in _scaling_rows(window):
                divisors = [divisor_of(row) for _, row in rows]
                if any(each is None for each in divisors) or any(rank not in first for rank, _ in rows):
                    continue
                found = [each for each in divisors if each is not None]
                of_ranks = [first[rank] for rank, _ in rows]
                if self.k == self._world and _reduced_by_hand(window, rows[0]):
                    of_ranks = [replace(one, accumulation=0) for one in of_ranks]  # then it is W
                for (rank, row), factors in zip(rows, factors_of(found, of_ranks, mean=mean), strict=True):
                    self.factors[rank, row["index"]] = Weight(factors)
            return


def _is_empty(window: RankWindow) -> bool:
    """Whether a rank's losses have no target in all of a window."""
    counts = [loss["units"] for _, loss in window.losses]
    return bool(counts) and not any(counts)


def _never_zero(weight: Weight) -> Weight:
    """With counts of the window that are known to be no zero; micro-batches may have none."""
    whole = {Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS}
    return replace(
        weight, factors=tuple(replace(factor, guarded=True) if factor.quantity in whole else factor for factor in weight.factors)
    )


def _term(call: Call, weight: Weight) -> Term:
    frame = call[1].get("frame")
    return Term(weight, text_of(frame), place_of(frame)) if frame else Term(weight, str(call[1]["name"]))


def _sum_of(terms: Sequence[Term]) -> Weight | None:
    """The weight of a loss that is the sum of these."""
    weights = [term.weight for term in terms]
    if len(terms) < 2:
        return add(weights)
    together = add(_with_term_weights(weights))
    return None if together is None else replace(together, terms=tuple(terms))


def _key(call: Call) -> Key:
    return call[2].rank, call[0]["index"]


def _with_term_weights(terms: Sequence[Weight]) -> Iterator[Weight]:
    """The weights of a loss's terms. A number that a term has beside K is its own weight, though it may be as large as K or W."""
    for weight in terms:
        kept: list[Factor] = []
        divided = False
        mean = not weight.of(Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS)
        for factor in weight.factors:
            by_k = factor.quantity is Quantity.ACCUMULATION and factor.power < 0
            own = (by_k and divided) or (mean and factor.quantity is Quantity.WORLD)
            divided = divided or by_k
            kept.append(replace(factor, quantity=Quantity.CONSTANT) if own else factor)
        yield replace(weight, factors=tuple(kept))


def calls_by_site(window: SharedWindow) -> dict[Site, list[Call]]:
    """The loss calls of a window on all ranks, by where they are made.

    Calls of one function are one site where each micro-batch makes but one of them: the boundary's has a branch of its own.
    """
    found: dict[Site, list[Call]] = defaultdict(list)
    for rank in window.ranks:
        for row, loss in rank.losses:
            found[loss["site"]].append((row, dict(loss), rank))
    names = {loss["name"] for calls in found.values() for _, loss, _ in calls}
    if len(found) < 2 or len(names) > 1:
        return found
    together = [call for calls in found.values() for call in calls]
    together.sort(key=lambda call: (call[2].rank, call[0]["index"]))
    batches = {(rank.rank, row["micro_batch"]) for row, _, rank in together}
    return {next(iter(found)): together} if len(batches) == len(together) else found


def counts_of(calls: Sequence[Call], k: int, world: int, before: Mapping[int, float] | None = None) -> list[Counts]:
    """What can divide each of these calls of one site; `before` has the targets of earlier windows by rank."""
    earlier = before or {}
    of_micro_batch: dict[tuple[int, int], float] = defaultdict(float)
    elements: dict[tuple[int, int], float] = defaultdict(float)
    of_rank: dict[int, float] = defaultdict(float)
    elements_of_rank: dict[int, float] = defaultdict(float)
    for row, loss, rank in calls:
        of_micro_batch[rank.rank, row["micro_batch"]] += loss["units"] or 0.0
        elements[rank.rank, row["micro_batch"]] += loss.get("elements") or 0.0
        of_rank[rank.rank] += loss["units"] or 0.0
        elements_of_rank[rank.rank] += loss.get("elements") or 0.0
    everything = sum(of_rank.values())
    return [
        Counts(
            units=of_micro_batch[rank.rank, row["micro_batch"]],
            elements=elements[rank.rank, row["micro_batch"]],
            window_units=of_rank[rank.rank],
            global_units=everything,
            units_so_far=of_rank[rank.rank] + earlier.get(rank.rank, 0.0),
            global_units_so_far=everything + sum(earlier.values()),
            rows=float(loss.get("sequences") or 0.0),
            window_elements=elements_of_rank[rank.rank],
            accumulation=k,
            size=rank.size,
            world=world,
        )
        for row, loss, rank in calls
    ]


def _weights(calls: Sequence[Call], counts: Sequence[Counts]) -> Iterator[Weight]:
    mean = all(loss["reduction"] == "mean" for _, loss, _ in calls)
    scalars = [_scalars(row, loss) for row, loss, _ in calls]
    lengths = {len(each) for each in scalars if each is not None}
    if len(lengths) != 1 or any(each is None for each in scalars):
        scalars = [_product_of_all(row, loss) for row, loss, _ in calls]
    else:
        scalars = _without_undone([each for each in scalars if each is not None])
    length = next((len(each) for each in scalars if each is not None), 0)
    columns = [factors_of([each[at] if each is not None else math.nan for each in scalars], counts, mean=mean) for at in range(length)]
    for at, (_, loss, _) in enumerate(calls):
        if scalars[at] is None:
            yield UNKNOWN
            continue
        factors = [mean_factor(loss)] if loss["reduction"] == "mean" else []
        yield Weight((*factors, *(factor for column in columns for factor in column[at])))


def _without_undone(scalars: Sequence[list[float]]) -> list[list[float] | None]:
    """Without the scalars that another one takes back in every call, such as `/ K` under `* K`."""
    columns = [list(column) for column in zip(*scalars, strict=True)]
    kept: list[list[float]] = []
    for column in columns:
        undone = next((each for each in kept if all(math.isclose(one * other, 1.0) for one, other in zip(each, column, strict=True))), None)
        if undone is not None:
            kept.remove(undone)
        else:
            kept.append(column)
    return [[column[at] for column in kept] for at in range(len(scalars))]


def _scalars(row: Row, loss: dict[str, Any]) -> list[float] | None:
    """The divisors that the loss went through, without the loss scale; None where they do not give the measured coefficient."""
    operands = loss.get("operands")
    measured = total(row, loss)
    if operands is None or measured is None or any(value is None for _, value in operands):
        return None
    scale = scale_of(row)
    found: list[float] = []
    for operation, value in operands:
        if scale is not None and operation == "mul" and math.isclose(value, scale, rel_tol=1e-6):
            scale = None
        elif value:
            found.append(value if operation == "div" else 1 / value)
        else:
            return None
    product = math.prod(1 / each for each in found)
    return found if math.isclose(product, measured, rel_tol=TOLERANCE) else None


def _product_of_all(row: Row, loss: dict[str, Any]) -> list[float] | None:
    measured = total(row, loss)
    return None if measured is None or measured <= 0 else [1 / measured]


def total(row: Row, loss: Mapping[str, Any]) -> float | None:
    """What the loss call's own value is multiplied by on its way to the root, without the loss scale."""
    coefficient = uniform(loss)
    if coefficient is None:
        return None
    own = loss["units"] if loss["reduction"] == "mean" else 1.0
    return None if not own else coefficient * float(own) / (scale_of(row) or 1.0)


def scale_of(row: Row) -> float | None:
    """The loss scale of a backward whose root a scaler has scaled."""
    scale = row["numbers"].get("scale")
    return float(scale) if row["scaled"] and scale else None


def _reduced_by_hand(window: SharedWindow, scaling: tuple[int, Row]) -> bool:
    """Whether the gradients were summed over the ranks by a call before this scaling."""
    number, scaled = scaling
    rows = next(rank.rows for rank in window.ranks if rank.rank == number)
    return any(row["kind"] == Kind.REDUCE.value and "manual" in row["options"] for row in rows if row["index"] < scaled["index"])


def _scaling_rows(window: SharedWindow) -> Iterator[list[tuple[int, Row]]]:
    """The scalings of the window's end, those of one place on all ranks together."""
    by_place: dict[tuple[int, int], list[tuple[int, Row]]] = defaultdict(list)
    for rank in window.ranks:
        last = rank.backwards[-1]["index"] if rank.backwards else -1
        seen: dict[int, int] = defaultdict(int)
        for row in rank.rows:
            if row["kind"] == Kind.NORMALIZE.value and row["index"] > last:
                by_place[row["at"], seen[row["at"]]].append((rank.rank, row))
                seen[row["at"]] += 1
    yield from by_place.values()


def divisor_of(row: Row) -> float | None:
    """What a scaling by hand divides the gradients by."""
    numbers = row["numbers"]
    operand, factor = numbers.get("operand"), numbers.get("factor")
    if operand:
        return float(operand) if numbers.get("operation") == "div" else 1 / float(operand)
    return 1 / float(factor) if factor else None


def overcounts(windows: Sequence[SharedWindow], world: int) -> dict[Key, float]:
    """What divides the summed losses or the gradients of each window on each rank, where it is a count of somewhat more than their
    targets; by the window's id and the rank.

    Only where it follows the targets: a whole number in every window, not the same in all, and larger each time. It counts the targets
    of all ranks, from which the averaging over them is taken out or not, or those of each rank.
    """
    divisors = {(id(window), rank.rank): _common_divisor(window, rank) for window in windows for rank in window.ranks}
    known = {key: divisor for key, divisor in divisors.items() if divisor is not None}
    if len(known) < len(divisors):
        return {}
    own = {(id(window), rank.rank): _units([rank]) for window in windows for rank in window.ranks}
    whole = {(id(window), rank.rank): _units(window.ranks) for window in windows for rank in window.ranks}
    together = all(len({known[id(window), rank.rank] for rank in window.ranks}) == 1 for window in windows)
    for scale, units in [(world, whole), (1, whole)] * together + [(1, own)]:
        found = {key: round(divisor * scale, 2) for key, divisor in known.items()}
        follow = all(each == int(each) and units[key] < each <= MOST_OVERCOUNTED * units[key] for key, each in found.items())
        if follow and len(set(found.values())) > 1:
            return found
    return {}


def _units(ranks: Sequence[RankWindow]) -> float:
    return sum(loss["units"] or 0.0 for rank in ranks for _, loss in rank.losses)


def _common_divisor(window: SharedWindow, rank: RankWindow) -> float | None:
    """What every summed loss of a rank's window is divided by, or else all of its gradients."""
    losses = list(rank.losses)
    if any(loss["reduction"] != "sum" for _, loss in losses):
        return None
    measured = {total(row, loss) for row, loss in losses}
    divisors = {round(1 / each, 2) for each in measured if each}
    if divisors == {1.0}:
        rows = [row for found in _scaling_rows(window) for number, row in found if number == rank.rank]
        divisors = {round(each, 2) for row in rows for each in (divisor_of(row),) if each}
    return divisors.pop() if len(divisors) == 1 else None
