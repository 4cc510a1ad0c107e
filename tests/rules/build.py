"""A hand-written trace in a few lines: call the methods in the order in which things happen, then `trace()`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from fractions import Fraction

from accumlint.findings import Finding
from accumlint.judge import judge
from accumlint.rule import Rule
from accumlint.trace import Accumulation, Actor, Event, Evidence, Guard, Kind, Place, Role, Trace, Turn, Wrapper
from accumlint.weight import Factor, Quantity, Weight

PATH = "train.py"
LINES = {kind: 10 + at for at, kind in enumerate(Kind)}
MEAN = Factor(Quantity.UNITS, -1, implicit=True)


def place(line: int) -> Place:
    return Place(PATH, line)


def over_k(value: int = 3, text: str = "K") -> Factor:
    """The factor of `/ K`."""
    return Factor(Quantity.ACCUMULATION, -1, Fraction(value), text, place(9), root=text)


class Builder:
    """Writes events in order. `line` says where an event is; left out, every kind has a line of its own."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.micro_batch = -1
        self.turns: tuple[Turn, ...] = ()
        self.facts: dict[str, tuple[Evidence, ...]] = {}
        self._uid = 100

    def actor(
        self, name: str, role: Role, *, wrapper: Wrapper = Wrapper.NONE, base: int | None = None, known: bool = True, options: str = ""
    ) -> Actor:
        self._uid += 1
        return Actor(self._uid, name, role, wrapper, base, known, frozenset(options.split()))

    def model(self, name: str = "model", wrapper: Wrapper = Wrapper.NONE, *, known: bool = True, options: str = "") -> Actor:
        """A model; a wrapped one gets a raw module behind it as its base."""
        self._uid += 1
        base = None if wrapper is Wrapper.NONE else self._uid
        return self.actor(name, Role.MODEL, wrapper=wrapper, base=base, known=known, options=options)

    def optimizer(self, model: Actor | None = None, name: str = "optimizer", *, options: str = "") -> Actor:
        base = None if model is None else model.uid if model.base is None else model.base
        return self.actor(name, Role.OPTIMIZER, base=base, options=options)

    def scaler(self, name: str = "scaler", *, options: str = "") -> Actor:
        return self.actor(name, Role.SCALER, options=options)

    def fact(self, name: str, text: str = "") -> None:
        self.facts[name] = (*self.facts.get(name, ()), Evidence(place(1), text))

    def add(self, kind: Kind, line: int | None = None, **fields: object) -> Event:
        where = place(LINES[kind] if line is None else line)
        bare = Event(len(self.events), kind, where, max(self.micro_batch, 0), self.turns)
        event = replace(bare, **fields)  # type: ignore[arg-type]
        self.events.append(event)
        return event

    def data(self, line: int | None = None) -> Event:
        self.micro_batch += 1
        return self.add(Kind.DATA, line)

    def forward(self, model: Actor, line: int | None = None, *, sync: bool | None = None, bypass: bool = False, text: str = "") -> Event:
        reaches = frozenset({model.uid} if model.base is None else {model.uid, model.base})
        return self.add(Kind.FORWARD, line, model=model, sync=sync, bypass=bypass, reaches=reaches, text=text or f"{model.name}(x)")

    def backward(
        self,
        *forwards: Event,
        line: int | None = None,
        sync: bool | None = None,
        weight: Weight | None = None,
        scaler: Actor | None = None,
        scaled: bool | None = None,
        reaches: Iterable[int] = (),
        guards: tuple[Guard, ...] = (),
        text: str = "loss.backward()",
    ) -> Event:
        return self.add(
            Kind.BACKWARD,
            line,
            forwards=tuple(forward.index for forward in forwards),
            sync=sync,
            weight=weight,
            scaler=scaler,
            scaled=scaler is not None if scaled is None else scaled,
            reaches=frozenset(reaches),
            guards=guards,
            text=text,
        )

    def step(
        self, optimizer: Actor, line: int | None = None, *, scaler: Actor | None = None, guards: tuple[Guard, ...] = (), options: str = ""
    ) -> Event:
        text = f"{scaler.name}.step({optimizer.name})" if scaler else f"{optimizer.name}.step()"
        found = frozenset(options.split())
        return self.add(Kind.STEP, line, targets=(optimizer,), scaler=scaler, guards=guards, options=found, text=text)

    def zero(self, target: Actor, line: int | None = None) -> Event:
        return self.add(Kind.ZERO, line, targets=(target,), text=f"{target.name}.zero_grad()")

    def clip(self, target: Actor, line: int | None = None, *, text: str = "clip_grad_norm_(model.parameters(), 1.0)") -> Event:
        return self.add(Kind.CLIP, line, targets=(target,), text=text)

    def unscale(self, scaler: Actor, *targets: Actor, line: int | None = None) -> Event:
        name = targets[0].name if targets else ""
        return self.add(Kind.UNSCALE, line, scaler=scaler, targets=targets, text=f"{scaler.name}.unscale_({name})")

    def update(self, scaler: Actor, line: int | None = None, *, options: str = "") -> Event:
        return self.add(Kind.SCALER_UPDATE, line, scaler=scaler, options=frozenset(options.split()), text=f"{scaler.name}.update()")

    def normalize(self, target: Actor, factor: Factor, line: int | None = None) -> Event:
        return self.add(Kind.NORMALIZE, line, targets=(target,), weight=Weight((factor,)), text="p.grad.div_(n)")

    def skip(self, text: str, line: int, *skipped: Kind, cause: str = "data", leaves: str = "continue", options: str = "") -> Event:
        guard = Guard(place(line), text, cause)
        return self.add(
            Kind.SKIP, line, guard=guard, skipped=frozenset(skipped), leaves=leaves, options=frozenset(options.split()), text=text
        )

    def sync_off(self, model: Actor | None, line: int | None = None, *, options: str = "context") -> Event:
        return self.add(
            Kind.SYNC_OFF, line, model=model, options=frozenset(options.split()), text=f"{model.name if model else ''}.no_sync()"
        )

    def sync_on(self, model: Actor | None, line: int | None = None, *, options: str = "context") -> Event:
        return self.add(Kind.SYNC_ON, line, model=model, options=frozenset(options.split()))

    def trace(self, *, k: int | None = 3, settings: tuple[tuple[str, str], ...] = ()) -> Trace:
        accumulation = None if k is None else Accumulation("K", k, place(2))
        return Trace(PATH, place(5), "train", tuple(self.events), accumulation, settings, self.facts)


def windows(build: Callable[[int, bool], None], *, k: int = 3, count: int = 2) -> None:
    """Calls `build(k, boundary)` for every micro-batch of `count` windows."""
    for number in range(k * count):
        build(number % k, number % k == k - 1)


def codes(rule: Rule, trace: Trace) -> list[Finding]:
    """What one rule says of a trace, after the judge."""
    return judge(trace, [rule])


def lines(rule: Rule, trace: Trace) -> list[int]:
    return sorted(finding.place.line for finding in codes(rule, trace))
