"""Reading a trace for one optimizer: which events are its own, in order, and how sure an absence is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from accumlint.findings import Confidence
from accumlint.trace import Actor, Event, Kind, Role, Trace

OF_AN_OPTIMIZER = frozenset({Kind.UNSCALE, Kind.NORMALIZE, Kind.CLIP, Kind.STEP, Kind.ZERO})


def family(actor: Actor) -> int:
    """The raw module behind a wrapper or a sub-module; two actors of one family share parameters."""
    return actor.uid if actor.base is None else actor.base


def forwards_of(trace: Trace, backward: Event) -> tuple[Event, ...]:
    """The FORWARD events behind a backward, in order."""
    found = (trace.events[index] for index in sorted(backward.forwards) if 0 <= index < len(trace.events))
    return tuple(event for event in found if event.kind is Kind.FORWARD)


def events_of(trace: Trace, optimizer: Actor) -> Iterator[Event]:
    """The events that make, change, use or clear this optimizer's gradients, and the scaler updates between them, in its time.

    An optimizer made anew for each epoch takes over the parameters of the one before: it answers for what happens from that
    one's last step to its own.
    """
    holds = _Holdings(trace, optimizer)
    start, end = _time_of(trace, optimizer)
    for event in trace.events:
        if not start < event.index <= end:
            continue
        if event.kind is Kind.BACKWARD:
            if holds.fed_by(event):
                yield event
        elif event.kind is Kind.SCALER_UPDATE or (event.kind in OF_AN_OPTIMIZER and holds.meant_by(event)):
            yield event


def _time_of(trace: Trace, optimizer: Actor) -> tuple[int, int]:
    """From the last step of a forerunner on the same module, whose steps all come first, to the optimizer's own last step."""
    spans = {other.uid: _steps(trace, other) for other in trace.optimizers}
    own = spans.get(optimizer.uid, ())
    if not own:
        return -1, -1
    same_module = (spans[other.uid] for other in trace.optimizers if other.base is not None and other.base == optimizer.base)
    begun = max((steps[-1] for steps in same_module if steps and steps[-1] < own[0]), default=-1)
    return max(begun, trace.begins(optimizer) - 1), own[-1]


def _steps(trace: Trace, optimizer: Actor) -> tuple[int, ...]:
    return tuple(event.index for event in trace.of(Kind.STEP) if any(target.uid == optimizer.uid for target in event.targets))


class _Holdings:
    """Which events are about one optimizer's parameters. What is unknown counts only where there is one optimizer."""

    def __init__(self, trace: Trace, optimizer: Actor) -> None:
        self._trace = trace
        self._optimizer = optimizer
        self._alone = len(trace.optimizers) <= 1
        models = (forward.model for forward in trace.of(Kind.FORWARD))
        self._raw = {model.uid: family(model) for model in models if model is not None}
        self._module = None if optimizer.base is None else self._raw.get(optimizer.base, optimizer.base)

    def fed_by(self, backward: Event) -> bool:
        if self._alone:
            return True
        reached = backward.reaches or {family(forward.model) for forward in forwards_of(self._trace, backward) if forward.model}
        return self._module is not None and self._module in {self._raw.get(uid, uid) for uid in reached}

    def meant_by(self, event: Event) -> bool:
        if event.concerns(self._optimizer):
            return True
        if self._module is None:
            return self._alone and any(target.role is Role.MODEL for target in event.targets)
        return any(family(target) == self._module for target in event.targets if target.role is Role.MODEL)


def same(one: Actor | None, other: Actor | None) -> bool:
    """Whether two scalers may be one."""
    return one is None or other is None or one.uid == other.uid


def works(scaler: Actor | None) -> bool:
    """Whether this is a scaler that is not switched off."""
    return scaler is not None and "disabled" not in scaler.options


def sureness(trace: Trace, start: Event, end: Event, *actors: Actor | None) -> Confidence:
    """MEDIUM where an unknown call between two events received one of the actors: it may have done what seems missing."""
    watched = {uid for actor in actors if actor is not None for uid in (actor.uid, family(actor))}
    between = (event for event in trace.of(Kind.OPAQUE) if start.index < event.index < end.index)
    hidden = any(uid in watched for event in between for uid in _uids(event.targets))
    return Confidence.MEDIUM if hidden else Confidence.HIGH


def same_choice(one: Event, other: Event) -> bool:
    """False where two events hang on different settings: then they may never meet in one run."""
    choices, others = _settings(one), _settings(other)
    return not choices or not others or bool(choices & others)


def _settings(event: Event) -> set[tuple[str, bool]]:
    return {(guard.text, guard.holds) for guard in event.guards if guard.cause == "setting"}


def _uids(actors: Iterable[Actor]) -> set[int]:
    return {uid for actor in actors for uid in (actor.uid, family(actor))}
