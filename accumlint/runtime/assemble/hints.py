"""What the source says of the same lines: names for what was measured, and what people do on purpose.

No number comes from here. The rehearsal knows how K is spelled, that a horizon is counted in micro-batches, or that a loss is a sum by
convention; the run knows how large everything is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from accumlint.runtime.assemble.sources import place_of
from accumlint.runtime.assemble.windows import Report, SharedWindow, stack_of
from accumlint.trace import Accumulation, Event, Evidence, Guard, Kind, Place, Trace
from accumlint.weight import Factor, Quantity, Weight

# Evidence that only the source can give; what can be counted is taken from the run.
FROM_SOURCE = ("sum-convention", "engine-divides", "replays-features", "warm-up", "dist-autograd", "freezes", "means-to-accumulate")


class Hints:
    """The rehearsed traces of the files that the run came through."""

    def __init__(self, traces: Iterable[Trace] = ()) -> None:
        self.traces = tuple(traces)
        self._events: dict[tuple[Kind, str, int], Event] = {}
        for trace in self.traces:
            for event in trace.events:
                self._events.setdefault((event.kind, event.place.path, event.place.line), event)

    def event(self, kind: Kind, place: Place) -> Event | None:
        """The rehearsed event of this kind at the same line."""
        return self._events.get((kind, place.path, place.line))

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

    def factors(self, place: Place, quantity: Quantity) -> list[Factor]:
        """How the source spells the factors of this quantity in the weight of a backward, or in a scaling of gradients."""
        for kind in (Kind.BACKWARD, Kind.NORMALIZE):
            event = self.event(kind, place)
            if event is not None and event.weight is not None:
                return [factor for factor in event.weight.of(quantity) if not factor.implicit]
        return []

    def named(self, weight: Weight, place: Place) -> Weight:
        """The weight with the texts and places of the factors that the source has in this line's weight.

        A number that no count of the run explains is a count of inputs where the source says so.
        """
        spare = {quantity: self.factors(place, quantity) for quantity in Quantity}
        return replace(weight, factors=tuple(_named(factor, spare) for factor in weight.factors))

    def accumulation(self, backwards: Iterable[Place]) -> Accumulation | None:
        """How K is spelled in the loop with these backwards."""
        places = {(place.path, place.line) for place in backwards}
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


def _named(factor: Factor, spare: dict[Quantity, list[Factor]]) -> Factor:
    if factor.implicit:
        return factor
    candidates = [factor.quantity, Quantity.UNKNOWN, Quantity.CONSTANT]
    if factor.quantity is Quantity.CONSTANT:
        candidates = [Quantity.CONSTANT, Quantity.INPUTS, Quantity.ACCUMULATION, Quantity.UNKNOWN]
    for quantity in candidates:
        match = next((each for each in spare[quantity] if (each.power > 0) == (factor.power > 0)), None)
        if match is not None:
            spare[quantity].remove(match)
            taken = quantity if quantity in {Quantity.INPUTS, Quantity.ACCUMULATION} else factor.quantity
            return replace(match, quantity=taken, power=factor.power, value=factor.value)
    for quantity, left in spare.items():
        if quantity is not Quantity.SCALE and len(left) == 1 and (left[0].power > 0) == (factor.power > 0):
            return replace(left.pop(), quantity=factor.quantity, power=factor.power, value=factor.value)
    return factor
