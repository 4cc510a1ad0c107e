"""What lies off a window's boundary, seen from one optimizer.

A `Window` holds every event between two steps of an optimizer, those of other optimizers and models too (a GAN's two halves, a probe). The
rules of the window ask only about the backwards whose gradients this step uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

from accumlint.findings import Confidence
from accumlint.trace import Actor, Event, Guard, Kind, Place, Role, Trace, Window, Wrapper

T = TypeVar("T")
GATED = "gated"  # the framework itself ignores the call off the boundary


class Boundaries:
    """A trace, with the question answered which backward belongs to which optimizer."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._kept: dict[Callable[[Boundaries], Any], Any] = {}
        self._own: dict[int, tuple[Window, tuple[Event, ...]]] = {}
        self._groups = _step_groups(trace.events)
        self._group_starts = [steps[0].index for steps in self._groups]
        self._turns: dict[int, frozenset[int]] = {}  # where optimizers take turns on one line, whose turn each backward is
        self._intended = self._intentions()
        self._raw = {
            actor.uid: actor.base for actor in _models(trace.events) if actor.base is not None and actor.wrapper is not Wrapper.NONE
        }

    _last: ClassVar[Boundaries | None] = None

    @classmethod
    def of(cls, trace: Trace) -> Boundaries:
        """The boundaries of a trace; the rules ask for those of the same trace one after the other."""
        if cls._last is None or cls._last.trace is not trace:
            cls._last = cls(trace)
        return cls._last

    def once(self, ask: Callable[[Boundaries], T]) -> T:
        """What else is worked out of the trace, and kept as long as its boundaries are."""
        if ask not in self._kept:
            self._kept[ask] = ask(self)
        kept: T = self._kept[ask]
        return kept

    def own(self, window: Window) -> tuple[Event, ...]:
        """The backwards whose gradients the window's step is meant to use, in order."""
        known = self._own.get(id(window))
        if known is None or known[0] is not window:
            optimizer = window.optimizer
            own = tuple(one for one in window.backwards if self.means(one, optimizer) and self.reaches(one, optimizer) is not False)
            known = self._own[id(window)] = (window, own)
        return known[1]

    def numbers(self, window: Window) -> tuple[int, ...]:
        """The numbers of the micro-batches with such a backward, in order."""
        return tuple(dict.fromkeys(one.micro_batch for one in self.own(window)))

    def size(self, window: Window) -> int:
        """How many micro-batches add to the window's gradient."""
        return len(self.numbers(window))

    def leaks(self, window: Window) -> tuple[Event, ...]:
        """The backwards that leave gradients in the optimizer's parameters though they are meant for another optimizer."""
        return tuple(
            one
            for one in window.backwards
            if self._intended.get(one.place) and not self.means(one, window.optimizer) and self.reaches(one, window.optimizer)
        )

    def means(self, backward: Event, optimizer: Actor | None) -> bool:
        """Whether the step that this line's backward leads up to is one of this optimizer."""
        if optimizer is None:
            return True
        return optimizer.uid in (self._turns.get(backward.index) or self._intended.get(backward.place, frozenset()))

    def reaches(self, backward: Event, optimizer: Actor | None) -> bool | None:
        """Whether the backward writes gradients that the optimizer holds; None when unknown."""
        if optimizer is None or optimizer.base is None or not backward.reaches:
            return None
        return self._root(optimizer.base) in {self._root(uid) for uid in backward.reaches}

    def acts_on(self, event: Event, optimizer: Actor | None) -> bool:
        """Whether the event surely acts on this optimizer's gradients; one with unknown targets acts on what steps next."""
        if optimizer is None or (event.concerns(optimizer) and event.targets):
            return True
        if not event.targets:
            return any(step.concerns(optimizer) for step in self._next_steps(event.index))
        return any(target.role is Role.MODEL and self._same_model(target, optimizer) for target in event.targets)

    def may_act_on(self, event: Event, optimizer: Actor | None) -> bool:
        """Whether the event could act on this optimizer's gradients, partly or wholly."""
        if optimizer is None or not event.targets or event.concerns(optimizer):
            return True
        return any(self._may_share(target, optimizer) for target in event.targets)

    def off_boundary(self, window: Window, *kinds: Kind) -> Iterator[Event]:
        """The events of these kinds that act on the window's gradient while a later micro-batch is still to be added."""
        if window.step is None:
            return
        own = self.own(window)
        for event in window.of(*kinds):
            if GATED not in event.options and self.between_micro_batches(own, event) and self.acts_on(event, window.optimizer):
                yield event

    def between_micro_batches(self, own: tuple[Event, ...], event: Event) -> bool:
        """Whether a backward of an earlier micro-batch comes before the event and one of a later micro-batch after it."""
        before = [one for one in own if one.index < event.index]
        after = [one for one in own if one.index > event.index]
        return bool(before and after) and before[-1].micro_batch != after[0].micro_batch

    def confidence(self, optimizer: Actor | None, start: int, end: int) -> Confidence:
        """HIGH, or MEDIUM when an unknown call between these events received the optimizer or its model."""
        unclear = any(start < event.index < end and self.may_act_on(event, optimizer) for event in self.trace.of(Kind.OPAQUE))
        return Confidence.MEDIUM if unclear else Confidence.HIGH

    def stands_still(self, optimizer: Actor | None, start: int, end: int) -> Confidence:
        """HIGH, or MEDIUM when an unknown call between these events may step: only one that received an optimizer can."""
        held = (
            event for event in self.trace.of(Kind.OPAQUE) if not event.targets or any(each.role is Role.OPTIMIZER for each in event.targets)
        )
        unclear = any(start < event.index < end and self.may_act_on(event, optimizer) for event in held)
        return Confidence.MEDIUM if unclear else Confidence.HIGH

    def steps_between(self, start: int, end: int) -> bool:
        """Whether any optimizer steps between these two events."""
        return any(start < step.index < end for step in self.trace.of(Kind.STEP))

    def _intentions(self) -> dict[Place, frozenset[int]]:
        """For each line with a backward the optimizers that step next, read where the fewest other backwards lie between.

        Where two models accumulate side by side, each with a gated step behind its backward, only the boundary's turn tells them apart.
        A line in whose loop no step ever comes, as in an evaluation that looks at gradients, means none.
        """
        best: dict[Place, tuple[int, frozenset[int]]] = {}
        nearest: dict[Place, list[tuple[int, frozenset[int]]]] = {}  # the backwards behind that, each with its own optimizers
        stepped = set[Place]()
        backwards = [event.index for event in self.trace.of(Kind.BACKWARD)]
        lines = {turn.line for event in self.trace.of(Kind.BACKWARD) for turn in event.turns}
        for event in self.trace.of(Kind.BACKWARD):
            steps = self._next_steps(event.index)
            if not steps:
                continue
            if any(_in_one_loop(event, step, lines) for step in steps):
                stepped.add(event.place)
            distance = bisect_right(backwards, steps[0].index) - bisect_right(backwards, event.index)
            uids = frozenset(target.uid for step in steps for target in step.targets)
            known, before = best.get(event.place, (distance, frozenset()))
            if distance < known or not before:
                nearest[event.place] = []
            if distance <= known:
                best[event.place] = (distance, uids | before if distance == known else uids)
                nearest[event.place].append((event.index, uids))
        for seen in nearest.values():
            different = {uids for _, uids in seen}
            if any(one.isdisjoint(other) for one in different for other in different):
                self._turns.update(seen)
        return {place: uids for place, (_, uids) in best.items() if place in stepped}

    def _next_steps(self, index: int) -> tuple[Event, ...]:
        position = bisect_right(self._group_starts, index)
        return self._groups[position] if position < len(self._groups) else ()

    def _root(self, uid: int) -> int:
        return self._raw.get(uid, uid)

    def _same_model(self, model: Actor, optimizer: Actor) -> bool:
        return optimizer.base is not None and self._root(model.uid) == self._root(optimizer.base)

    def _may_share(self, target: Actor, optimizer: Actor) -> bool:
        if target.role is Role.OPTIMIZER:
            # An optimizer of unknown making may be one around the other.
            wraps = target.known and not optimizer.known and optimizer.base is None
            return wraps or target.uid == optimizer.uid or (target.base is not None and target.base == optimizer.uid)
        if optimizer.base is None:
            return True
        own = {optimizer.base, self._root(optimizer.base)}
        return target.uid in own or self._root(target.uid) in own or target.base is None or target.base in own


def _step_groups(events: tuple[Event, ...]) -> tuple[tuple[Event, ...], ...]:
    """The steps, those with no forward or backward between them together."""
    groups: list[list[Event]] = []
    open_group = False
    for event in events:
        if event.kind is Kind.STEP:
            if open_group:
                groups[-1].append(event)
            else:
                groups.append([event])
            open_group = True
        elif event.kind in {Kind.FORWARD, Kind.BACKWARD}:
            open_group = False
    return tuple(tuple(group) for group in groups)


def _models(events: tuple[Event, ...]) -> Iterator[Actor]:
    for event in events:
        if event.model is not None:
            yield event.model
        yield from (target for target in event.targets if target.role is Role.MODEL)


def _in_one_loop(backward: Event, step: Event, lines: set[int]) -> bool:
    """Whether one lies in all the loops of the other, in the same pass of them; loops over optimizers do not count."""
    own, other = passes(backward), frozenset(each for each in passes(step) if each[0] in lines)
    return own <= other or other <= own


def gate_of(step: Event) -> Guard | None:
    """The test against K that lets a step through, the innermost one."""
    return next((guard for guard in reversed(step.guards) if guard.cause == "gate"), None)


def in_the_loop(trace: Trace, kind: Kind) -> Iterator[Event]:
    """The events of a kind that stand in the same loop as the backward of their micro-batch."""
    loops = {one.micro_batch: passes(one) for one in trace.of(Kind.BACKWARD)}
    return (event for event in trace.of(kind) if event.micro_batch in loops and loops[event.micro_batch] <= passes(event))


def loss_of(backward: Event, window: Window) -> Event:
    """The loss that a backward goes through: the last one formed before it in its micro-batch, else the backward itself."""
    losses = [event for event in window.of(Kind.LOSS) if event.micro_batch == backward.micro_batch and event.index < backward.index]
    return losses[-1] if losses else backward


def passes(event: Event) -> frozenset[tuple[int, int]]:
    """The passes of the loops around an event: one over a loader in one epoch is not that of the next."""
    return frozenset((turn.line, turn.entry) for turn in event.turns)
