"""What the source says of the same lines: names for what was measured, and what people do on purpose.

No number comes from here. The rehearsal knows how K is spelled, that a horizon is counted in micro-batches, or that a loss is a sum by
convention; the run knows how large everything is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.weights import number
from accumlint.runtime.assemble.windows import Report, SharedWindow, stack_of
from accumlint.trace import Accumulation, Event, Evidence, Guard, Kind, Place, Trace
from accumlint.weight import Factor, Quantity, Weight

# Evidence that only the source can give; what can be counted is taken from the run.
FROM_SOURCE = (
    "sum-convention",
    "engine-divides",
    "replays-features",
    "warm-up",
    "dist-autograd",
    "freezes",
    "means-to-accumulate",
    "gradients-by-hand",
    "windows-by-size",
)


COUNTS = frozenset({Quantity.UNITS, Quantity.INPUTS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS})
INSIDE = "inside"  # of a rehearsed event that lies in a framework's own loop, and is placed at what that calls


class Hints:
    """The rehearsed traces of the files that the run came through."""

    def __init__(self, traces: Iterable[Trace] = ()) -> None:
        self.traces = tuple(traces)
        self._events: dict[tuple[Kind, str, int], Event] = {}
        self._weights: dict[tuple[str, int], list[Weight]] = {}  # that a backward or a scaling of this line has in some world
        inside: dict[str, set[int]] = {}
        for trace in self.traces:
            for event in trace.events:
                self._events.setdefault((event.kind, event.place.path, event.place.line), event)
                if event.kind is Kind.BACKWARD and INSIDE in event.options:
                    inside.setdefault(event.place.path, set()).add(event.place.line)
                if event.kind in {Kind.BACKWARD, Kind.NORMALIZE} and event.weight is not None:
                    held = self._weights.setdefault((event.place.path, event.place.line), [])
                    if _explicit(event.weight) not in map(_explicit, held):
                        held.append(event.weight)

        self._inside = {path: lines.pop() for path, lines in inside.items() if len(lines) == 1}

    def _line(self, place: Place) -> int:
        """The line at which the source tells of a backward: where the run only saw a framework being started, that of what it calls."""
        if place.path not in self._inside or (Kind.BACKWARD, place.path, place.line) in self._events:
            return place.line
        return self._inside[place.path]

    def event(self, kind: Kind, place: Place) -> Event | None:
        """The rehearsed event of this kind at the same line."""
        line = self._line(place) if kind is Kind.BACKWARD else place.line
        return self._events.get((kind, place.path, line))

    def of(self, kind: Kind, path: str) -> list[Event]:
        """The rehearsed events of a kind in a file, by line, each line once."""
        return [
            event for (each, where, _), event in sorted(self._events.items(), key=lambda item: item[0][2]) if each is kind and where == path
        ]

    def options(self, kind: Kind, place: Place) -> frozenset[str]:
        event = self.event(kind, place)
        return event.options if event is not None else frozenset()

    def gate(self, place: Place) -> Guard | None:
        """The boundary's test around a step."""
        event = self.event(Kind.STEP, place)
        return next((guard for guard in reversed(event.guards) if guard.cause == "gate"), None) if event is not None else None

    def spans(self, place: Place) -> bool | None:
        """Whether this line's backward goes through forwards of one call on several pieces of data; None where the source does not tell."""
        counts = [
            _pieces([forward for forward in trace.of(Kind.FORWARD) if forward.index in event.forwards])
            for trace in self.traces
            for event in trace.of(Kind.BACKWARD)
            if event.forwards and (event.place.path, event.place.line) == (place.path, place.line)
        ]
        return max(counts) > 1 if counts else None

    def factors(self, place: Place, quantity: Quantity) -> list[Factor]:
        """How the source spells the factors of this quantity in the weight of a backward, or in a scaling of gradients."""
        for kind in (Kind.BACKWARD, Kind.NORMALIZE):
            event = self.event(kind, place)
            if event is not None and event.weight is not None:
                return [factor for factor in event.weight.of(quantity) if _stands_alone(factor)]
        return []

    def named(self, weight: Weight, place: Place, world: int) -> Weight:
        """The weight with the texts and places of the factors that the source has in this line's weight.

        A number that no count of the run explains is a count of inputs where the source says so.
        """
        stated = self._weights.get((place.path, place.line)) or self._weights.get((place.path, self._line(place)), [])
        same = [each for each in stated if _explicit(each) == _explicit(weight)]
        spare = {quantity: self.factors(place, quantity) for quantity in Quantity}
        if same:
            spare = {quantity: [factor for factor in same[0].of(quantity) if _stands_alone(factor)] for quantity in Quantity}
        known = frozenset(quantity for quantity, factors in spare.items() if factors)
        divisions = len(self.factors(place, Quantity.ACCUMULATION))
        # What was recognised has its name first; another number may still be a K of the source.
        order = sorted(range(len(weight.factors)), key=lambda at: weight.factors[at].quantity is Quantity.CONSTANT)
        named = {at: _named(weight.factors[at], spare, known, world) for at in order}
        found = replace(weight, factors=_divided(tuple(named[at] for at in sorted(named)), max(divisions, 1)))
        if same or not any(_is_other_loss(each, weight) for each in stated):
            return found
        # A branch of the source that did not run scales another loss: its line is not to be blamed.
        bare = (replace(factor, place=None, text=number(float(factor.value)) if factor.value else "") for factor in found.factors)
        return replace(found, factors=tuple(one if one.implicit else other for one, other in zip(found.factors, bare, strict=True)))

    def accumulation(self, backwards: Iterable[Place]) -> Accumulation | None:
        """How K is spelled in the loop with these backwards."""
        places = {(place.path, self._line(place)) for place in backwards}
        for trace in self.traces:
            if trace.accumulation is not None and any((one.place.path, one.place.line) in places for one in trace.of(Kind.BACKWARD)):
                return trace.accumulation
        return None

    def facts(self) -> Mapping[str, tuple[Evidence, ...]]:
        found: dict[str, tuple[Evidence, ...]] = {}
        for trace in self.traces:
            for name in FROM_SOURCE:
                if trace.facts.get(name):
                    found.setdefault(name, trace.facts[name])
        return found


def declared_size(reports: Sequence[Report], windows: Sequence[SharedWindow], hints: Hints) -> int:
    """K where every update has one micro-batch: the whole number that divides each loss, where the source says that it is K; else 0."""
    found: set[float] = set()
    for window in windows:
        for rank, report in zip(window.ranks, reports, strict=False):
            for row, loss in rank.losses:
                stack = stack_of(report, row)
                if not stack or not hints.factors(place_of(stack[0]), Quantity.ACCUMULATION):
                    return 0
                divisors = [value if operation == "div" else 1 / value for operation, value in loss.get("operands") or () if value]
                found.add(next((round(each) for each in divisors if each > 1.5 and abs(each - round(each)) < 1e-3), 0))
    return int(found.pop()) if len(found) == 1 else 0


def _is_other_loss(stated: Weight, measured: Weight) -> bool:
    """Whether one is a mean and the other a sum."""
    return stated.known and bool(_own_mean(stated)) != bool(_own_mean(measured))


def _own_mean(weight: Weight) -> list[Factor]:
    return [factor for factor in weight.of(Quantity.UNITS) if factor.implicit and factor.power < 0]


def _explicit(weight: Weight) -> list[tuple[str, int]]:
    return sorted((factor.quantity.value, factor.power) for factor in weight.factors if _stands_alone(factor))


def _stands_alone(factor: Factor) -> bool:
    """Whether a run sees a factor as a number of its own: also what an engine divides by, but not the mean of a loss function."""
    return not factor.implicit or factor.quantity is Quantity.ACCUMULATION


def _named(factor: Factor, spare: dict[Quantity, list[Factor]], known: frozenset[Quantity], world: int) -> Factor:
    if factor.implicit:
        return factor
    candidates = [factor.quantity, Quantity.UNKNOWN, Quantity.CONSTANT]
    if factor.quantity is Quantity.ACCUMULATION and factor.value == world:
        candidates.insert(1, Quantity.WORLD)
    if factor.quantity is Quantity.CONSTANT:
        candidates = [Quantity.CONSTANT, Quantity.INPUTS, Quantity.ACCUMULATION, Quantity.WORLD, Quantity.UNKNOWN]
    for quantity in candidates:
        match = next((each for each in spare[quantity] if _fits(each, factor)), None)
        if match is not None:
            spare[quantity].remove(match)
            stated = quantity in {Quantity.INPUTS, Quantity.ACCUMULATION, Quantity.WORLD} or _is_another(factor, match, known)
            taken = quantity if stated else factor.quantity
            return replace(
                match, quantity=taken, power=factor.power, value=factor.value, stale=factor.stale, guarded=factor.guarded or match.guarded
            )
    for quantity, left in spare.items():
        if quantity is not Quantity.SCALE and len(left) == 1 and (left[0].power > 0) == (factor.power > 0):
            by_chance = quantity is Quantity.ACCUMULATION and factor.quantity in COUNTS  # a K that is as large as the count of targets
            taken = quantity if by_chance else factor.quantity
            return replace(left.pop(), quantity=taken, power=factor.power, value=factor.value, stale=factor.stale, guarded=factor.guarded)
    return factor


def _divided(factors: tuple[Factor, ...], times: int) -> tuple[Factor, ...]:
    """The factors, of which no more divide by K than the source says: another number may be as large."""
    found: list[Factor] = []
    for factor in factors:
        by_k = factor.quantity is Quantity.ACCUMULATION and factor.power < 0
        found.append(replace(factor, quantity=Quantity.CONSTANT) if by_k and not times else factor)
        times -= by_k and times > 0
    return tuple(found)


def _pieces(forwards: Sequence[Event]) -> int:
    """The most pieces of data that one call took."""
    calls: dict[Place, set[tuple[int, ...]]] = {}
    for one in forwards:
        calls.setdefault(one.place, set()).add(one.data or (one.micro_batch,))
    return max((len(each) for each in calls.values()), default=0)


def _fits(written: Factor, factor: Factor) -> bool:
    """Whether the source's factor goes the same way; a plain number must be as large as what was taken for K or W."""
    if written.quantity is not Quantity.CONSTANT or not written.value or not factor.value:
        return (written.power > 0) == (factor.power > 0)
    one, other = float(written.value) ** written.power, float(factor.value) ** factor.power
    if factor.quantity in {Quantity.ACCUMULATION, Quantity.WORLD}:
        return math.isclose(one, other, rel_tol=1e-3)
    return (one > 1) == (other > 1)


def _is_another(factor: Factor, match: Factor, known: frozenset[Quantity]) -> bool:
    """Whether a number as large as K or W is another one: the source has K besides, and writes this as a number or setting of its own."""
    if factor.quantity is Quantity.ACCUMULATION:
        return Quantity.ACCUMULATION in known and match.quantity is not Quantity.ACCUMULATION
    return factor.quantity is Quantity.WORLD and match.quantity is Quantity.CONSTANT
