"""A rank's report as a trace."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from accumlint.runtime.assemble.contributions import Contributions, divisor_of
from accumlint.runtime.assemble.facts import Together, facts_of
from accumlint.runtime.assemble.hints import Hints
from accumlint.runtime.assemble.loops import Loops
from accumlint.runtime.assemble.sources import Site, gate_of, place_of, text_of
from accumlint.runtime.assemble.windows import LEFT_OUT, Report, Row, SharedWindow, stack_of
from accumlint.trace import Accumulation, Actor, Event, Guard, Kind, Place, Role, Trace, Wrapper
from accumlint.weight import Weight

MANUAL = "manual"
IMPLICIT = "implicit"  # an unscale that the scaler's step does by itself
NOWHERE = Place("", 0)
KINDS = {kind.value: kind for kind in Kind}
CONTINUES = "continues"
ONE_PIECE = frozenset({"one-piece"})
OBSERVED = frozenset({"gated", "accumulate"})  # what a run tells by itself: one `with` switches the flag and enters the engine's window
UNSEEN = 1e-4  # a drift of gradients that is more than rounding


def trace_of(report: Report, windows: Sequence[SharedWindow], contributions: Contributions, hints: Hints, shared: Together) -> Trace:
    """The trace of one rank; the windows, the weights and what is shared are those of all ranks."""
    return _Builder(report, windows, contributions, hints, shared).build()


class _Builder:
    def __init__(
        self, report: Report, windows: Sequence[SharedWindow], contributions: Contributions, hints: Hints, shared: Together
    ) -> None:
        self.report = report
        self.shared = shared
        self.windows = windows
        self.contributions = contributions
        self.hints = hints
        self.rank = int(report["rank"])
        self.loops = Loops(report)
        self.actors = {entry["uid"]: _actor(entry) for entry in report["objects"]}
        self.inputs: dict[tuple[Any, ...], int] = {}
        self.behind: dict[int, set[int]] = defaultdict(set)  # what the backwards through a forward reach
        for row in report["events"]:
            for index in row["forwards"]:
                self.behind[index].update(row["reaches"])
        places = dict.fromkeys(row["at"] for row in report["events"] if row["kind"] == Kind.BACKWARD.value and row["at"] >= 0)
        self.backward_stacks = [list(report["stacks"][at]) for at in places]

    def build(self) -> Trace:
        rows = [row for row in self._with_unseen_scalings() if self._belongs(row)]
        position = {row["index"]: at for at, row in enumerate(rows) if not row.get("unseen")}
        events = tuple(self._event(row, at, position) for at, row in enumerate(rows))
        first = next((event for event in events if event.kind is Kind.BACKWARD), None)
        stack = next((stack for stack in self.backward_stacks if stack), [])
        backwards = [event.place for event in events if event.kind is Kind.BACKWARD]
        return Trace(
            path=first.place.path if first else str(self.report["script"]),
            place=first.place if first else Place(str(self.report["script"]), 1),
            function=str(stack[0][5]) if stack else "",
            events=events,
            accumulation=self._accumulation(backwards),
            facts=facts_of(self.report, self.windows, self.hints, self.shared),
            judges_tail=True,
            measured=True,
            actors=tuple(actor for actor in self.actors.values() if actor.wrapper is not Wrapper.NONE),
        )

    def _belongs(self, row: Row) -> bool:
        kind = KINDS.get(row["kind"])
        if IMPLICIT in row["options"]:
            return False
        return kind is not None and (kind is not Kind.REDUCE or MANUAL in row["options"])

    def _with_unseen_scalings(self) -> Iterable[Row]:
        """The rows, with a scaling in front of each change that finds the gradients other than what was seen has left them."""
        reduced, expected = False, 1.0
        for row in self.report["events"]:
            numbers = row["numbers"]
            if row["kind"] == Kind.REDUCE.value and MANUAL in row["options"]:
                reduced = True
            elif row["kind"] == Kind.BACKWARD.value:
                reduced, expected = False, 1.0
            elif row["kind"] == Kind.NORMALIZE.value:
                divisor = divisor_of(row)
                expected = expected / divisor if divisor else math.nan
            if "abandons" in row:
                yield {
                    **row,
                    "kind": Kind.STEP.value,
                    "targets": [row["abandons"]],
                    "options": [LEFT_OUT],
                    "numbers": {},
                    "unseen": True,
                    "note": "the window was given up",
                }
            drift, residual = numbers.get("drift"), numbers.get("drift_residual")
            if drift is not None and residual is not None:
                scalar = residual <= UNSEEN
                if not reduced and not (scalar and math.isclose(drift, expected, rel_tol=UNSEEN)):
                    factor = {"factor": drift / expected} if scalar and expected and math.isfinite(expected) else {}
                    yield {**row, "kind": Kind.NORMALIZE.value, "numbers": factor, "options": [], "unseen": True, "scaler": None}
                expected = 1.0
            yield row

    def _accumulation(self, backwards: Sequence[Place]) -> Accumulation | None:
        k = self.contributions.k
        named = self.hints.accumulation(backwards)
        text = named.text if named is not None else ""
        if k < 2:
            return None
        return Accumulation(text or str(k), k, named.place if named is not None else None, literal=not text)

    def _event(self, row: Row, at: int, position: dict[int, int]) -> Event:
        kind = KINDS[row["kind"]]
        stack = stack_of(self.report, row)
        place = place_of(stack[0]) if stack else NOWHERE
        written = next((site for site in stack if self.hints.event(Kind.CLIP, place_of(site)) is not None), None)
        if kind is Kind.NORMALIZE and written is not None:
            kind, place = Kind.CLIP, place_of(written)  # one that the user has written out
        hinted = self.hints.options(kind, place)
        model = self.actors.get(row["model"]) if row["model"] is not None else None
        return Event(
            index=at,
            kind=kind,
            place=place,
            micro_batch=self.loops.micro_batch(row),
            turns=self.loops.turns(row),
            text=self._text(row, stack),
            rank=self.rank,
            model=model,
            scaler=self.actors.get(row["scaler"]) if row["scaler"] is not None else None,
            targets=tuple(self.actors[uid] for uid in row["targets"] if uid in self.actors),
            sync=row["sync"],
            bypass=row["bypass"],
            weight=self._weight(row, kind),
            forwards=tuple(sorted(position[index] for index in row["forwards"] if index in position)),
            reaches=frozenset(self._reached(row, kind)),
            data=self._data(row),
            retains_graph=row["retains_graph"],
            scaled=row["scaled"],
            guards=self._guards(row, kind, stack, place),
            options=frozenset(row["options"]) | (hinted - OBSERVED) | self._extent(row, kind, place),
            note=row["note"],
        )

    def _extent(self, row: Row, kind: Kind, place: Place) -> frozenset[str]:
        """Marks a backward through several forwards over one micro-batch: views of a batch, the steps of a recurrent model."""
        if kind is not Kind.BACKWARD or len(row["forwards"]) < 2:
            return frozenset()
        events, first, last = self.report["events"], min(row["forwards"]), max(row["forwards"])
        spans = self.hints.spans(place)
        if spans is None:
            continued = any(CONTINUES in events[index]["options"] for index in row["forwards"])
            spans = not continued and any(each["kind"] == Kind.DATA.value for each in events[first:last])
        return frozenset() if spans else ONE_PIECE

    def _text(self, row: Row, stack: list[Site]) -> str:
        if row.get("unseen"):
            return "a change of the gradients before " + (text_of(stack[0]) if stack else "this")
        return text_of(stack[0]) if stack else ""

    def _weight(self, row: Row, kind: Kind) -> Weight | None:
        key = (self.rank, row["index"])
        if kind is Kind.BACKWARD:
            return self._named(self.contributions.weights.get(key), row)
        if kind is Kind.NORMALIZE and not row.get("unseen"):
            return self._named(self.contributions.factors.get(key), row)
        if kind is Kind.NORMALIZE and row["numbers"].get("factor"):
            return self.contributions.unseen(self.rank, row["index"], 1 / row["numbers"]["factor"])
        return None

    def _named(self, weight: Weight | None, row: Row) -> Weight | None:
        """The factors with the names and places that the source gives them."""
        stack = stack_of(self.report, row)
        if weight is None or not stack:
            return weight
        return self.hints.named(weight, place_of(stack[0]), int(self.report["world"]))

    def _reached(self, row: Row, kind: Kind) -> Iterable[int]:
        if kind is Kind.FORWARD and row["model"] is not None:
            return self.behind[row["index"]]
        found = set(row["reaches"])
        for uid in row["numbers"].get("optimizers", ()):
            base = self.actors[uid].base
            if base is not None:
                found.add(base)
        return found

    def _data(self, row: Row) -> tuple[int, ...]:
        keys = sorted(key for key in row["numbers"] if key.startswith("input"))
        samples = tuple(tuple(row["numbers"][key] or ()) for key in keys)
        if not any(len(each) > 1 for each in samples):
            return ()
        values = tuple("nan" if math.isnan(value) else value for each in samples for value in each)
        return (self.inputs.setdefault((row["numbers"].get("plain", ""), *values), len(self.inputs)),)

    def _guards(self, row: Row, kind: Kind, stack: list[Site], place: Place) -> tuple[Guard, ...]:
        if kind is not Kind.STEP or not stack:
            return ()
        named = self.hints.gate(place)
        found = named or gate_of(stack, self.backward_stacks)
        return (found,) if found is not None else ()


def _actor(entry: dict[str, Any]) -> Actor:
    return Actor(
        uid=entry["uid"],
        name=entry["name"],
        role=Role(entry["role"]),
        wrapper=Wrapper(entry["wrapper"]),
        base=entry["base"],
        known=True,
        options=frozenset(entry["options"]),
    )
