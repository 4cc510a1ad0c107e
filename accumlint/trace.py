"""The vocabulary that both halves share: a window of gradient accumulation is a trace of events.

A front end (the rehearsal of source code, or the probes of a run) writes a `Trace`; the rules read it. Nothing here
imports LibCST or torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

from accumlint.weight import Weight


class Kind(enum.Enum):
    """What happened."""

    __hash__ = object.__hash__  # sets of kinds are asked for all the time

    DATA = "data"  # a new piece of data was taken
    FORWARD = "forward"
    LOSS = "loss"  # a loss value was formed
    BACKWARD = "backward"
    REDUCE = "reduce"  # one bucket or shard group was reduced, or gradients were all-reduced by hand
    UNSCALE = "unscale"
    NORMALIZE = "normalize"  # .grad was scaled, neither as unscale nor as clip
    CLIP = "clip"
    STEP = "step"  # an optimizer's update
    SCALER_UPDATE = "scaler-update"
    ZERO = "zero"
    SCHEDULE = "schedule"
    AVERAGE = "average"  # EMA, weight averaging, per-update counters
    SAVE = "save"
    SKIP = "skip"  # a data-dependent leaving of the path
    SYNC_OFF = "sync-off"  # a no_sync context, or a flag that switches synchronisation, was entered or set
    SYNC_ON = "sync-on"
    COUNT = "count"  # targets were counted
    RETAIN = "retain"  # a loss whose graph is kept was added to a running sum
    OPAQUE = "opaque"  # a call that could not be followed received tracked objects


class Role(enum.Enum):
    """What an object is in a training loop."""

    __hash__ = object.__hash__

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCALER = "scaler"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    PARAMETERS = "parameters"
    ENGINE = "engine"  # a framework's object that does the backward or owns the window: Accelerator, DeepSpeed engine, Fabric
    OTHER = "other"


class Wrapper(enum.Enum):
    """The data-parallel wrapper around a model, which decides when the sync flag is read."""

    __hash__ = object.__hash__

    NONE = "none"
    DDP = "DDP"  # reads the flag in the forward
    APEX_DDP = "apex DDP"
    FSDP1 = "FSDP1"  # reads the flag in the backward
    FSDP2 = "FSDP2"
    ZERO = "ZeRO"
    UNKNOWN = "unknown"  # wrapped by something that could not be followed

    @property
    def reads_flag_in_forward(self) -> bool:
        return self in {Wrapper.DDP, Wrapper.APEX_DDP}

    @property
    def reads_flag_in_backward(self) -> bool:
        return self in {Wrapper.FSDP1, Wrapper.FSDP2, Wrapper.ZERO}


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the source: 1-based line and column, end exclusive in columns."""

    path: str
    line: int
    column: int = 1
    end_line: int = 0
    end_column: int = 0
    cell: int = 0  # of a notebook, counted over all its cells from 1
    above: int = 0  # lines of the program of a notebook before that cell; `line` counts them

    @property
    def row(self) -> int:
        """The line as people count: from the beginning of the file or of the cell."""
        return self.line - self.above

    @property
    def end_row(self) -> int:
        return (self.end_line or self.line) - self.above

    @property
    def spoken(self) -> str:
        """The line, as a sentence names it."""
        return f"line {self.row} of cell {self.cell}" if self.cell else f"line {self.line}"


@dataclass(frozen=True, slots=True)
class Actor:
    """An object that takes part in training.

    `uid` identifies the object (aliases share it); `name` is how the source spells it. `base` is the uid of the raw
    module behind a wrapper, of the module that a sub-module belongs to, or of the module whose parameters an optimizer
    holds; None when unknown. `known` says that its construction was followed (not only its name or use seen).
    """

    uid: int
    name: str
    role: Role
    wrapper: Wrapper = Wrapper.NONE
    base: int | None = None
    known: bool = False
    options: frozenset[str] = frozenset()  # e.g. "static_graph", "disabled", "prepared", "process_group"


FILE_LINES = 1_000_000  # the lines of the file number n of a program begin at n times this


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one loop that encloses an event: the loop's line, the index of the turn, and how the loop ends.

    `entry` counts how often the loop had been entered before, so (line, entry) names one pass over a loader.
    """

    line: int
    index: int
    entry: int = 0
    last: bool = False  # the loop's last turn
    endless: bool = False  # the loop was cut by the rehearsal (while True, an infinite generator): it has no tail


PERHAPS = "perhaps"  # option of an event under a condition that nobody could follow and that may differ between micro-batches
SHIFTED = "shifted:"  # option of a loss or a count: what was cut from its second position on before, by name


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition under which an event happened."""

    place: Place
    text: str
    cause: str  # "gate" (counter against K), "setting" (a choice of the user), "data", "rank", "clock", "memory", "exception", "unknown"
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, with the state it saw. Fields that a kind does not use keep their defaults.

    FORWARD   model, sync (the flag the forward saw), bypass (the wrapper was gone round), data (ids of its inputs)
    LOSS      weight (of one unit in it)
    BACKWARD  forwards (indices of the FORWARD events behind it), weight, scaler (that scaled the loss), sync,
              reaches (uids of models whose parameters receive gradients), retains_graph
    CLIP, UNSCALE, NORMALIZE, ZERO, STEP  targets (the optimizers concerned; empty means unknown: all),
              NORMALIZE weight (the factor), STEP scaler (that it goes through)
    SKIP      guard (the condition), skipped (kinds left out), leaves ("continue", "break", "return", "branch", "except")
    OPAQUE    targets (the tracked objects that the unknown call received)
    """

    index: int
    kind: Kind
    place: Place
    micro_batch: int
    turns: tuple[Turn, ...] = ()
    text: str = ""  # source of the call or statement, one line
    rank: int = 0
    model: Actor | None = None
    scaler: Actor | None = None
    targets: tuple[Actor, ...] = ()
    sync: bool | None = None
    bypass: bool = False
    weight: Weight | None = None
    forwards: tuple[int, ...] = ()
    reaches: frozenset[int] = frozenset()
    data: tuple[int, ...] = ()
    retains_graph: bool = False
    scaled: bool | None = None  # the loss of a BACKWARD is scaled for AMP; None when unknown
    guards: tuple[Guard, ...] = ()
    guard: Guard | None = None
    skipped: frozenset[Kind] = frozenset()
    leaves: str = ""
    options: frozenset[str] = frozenset()
    note: str = ""
    call: Place | None = None  # of the helper in another file that it lies in, by the file of the loop

    def renumbered(self, index: int, forwards: tuple[int, ...], micro_batch: int) -> Event:
        """The same event among others."""
        if index == self.index and forwards == self.forwards and micro_batch == self.micro_batch:
            return self
        made = object.__new__(Event)
        for name in FIELDS:
            set_field(made, name, getattr(self, name))
        set_field(made, "index", index)
        set_field(made, "forwards", forwards)
        set_field(made, "micro_batch", micro_batch)
        return made

    @property
    def in_loop(self) -> Place:
        """Where the file of the loop brings it about."""
        return self.call or self.place

    def concerns(self, optimizer: Actor | None) -> bool:
        """Whether the event belongs to this optimizer (an event with unknown targets belongs to all)."""
        if optimizer is None or not self.targets:
            return True
        return any(target.uid == optimizer.uid or (optimizer.base is not None and target.uid == optimizer.base) for target in self.targets)


FIELDS = tuple(each.name for each in fields(Event))
set_field = object.__setattr__  # of what is frozen once it is made


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What happens to one new piece of data, in order."""

    number: int
    events: tuple[Event, ...]

    def of(self, *kinds: Kind) -> tuple[Event, ...]:
        return tuple(event for event in self.events if event.kind in kinds)

    @property
    def backwards(self) -> tuple[Event, ...]:
        return self.of(Kind.BACKWARD)


@dataclass(frozen=True)
class Window:
    """The micro-batches between two STEPs of one optimizer, and the update's own events.

    `micro_batches` hold the events up to the last BACKWARD before the step; `update` those after it, the STEP, and what
    follows until the next micro-batch begins. A tail (micro-batches that no step follows) has `step` None.
    """

    optimizer: Actor | None
    micro_batches: tuple[MicroBatch, ...]
    update: tuple[Event, ...]
    step: Event | None

    @cached_property
    def events(self) -> tuple[Event, ...]:
        found = [event for micro_batch in self.micro_batches for event in micro_batch.events]
        return tuple(sorted(found, key=lambda event: event.index)) + self.update

    @cached_property
    def _by_kind(self) -> dict[tuple[Kind, ...], tuple[Event, ...]]:
        return {}

    def of(self, *kinds: Kind) -> tuple[Event, ...]:
        """The events of these kinds, in order."""
        return _chosen(self._by_kind, self.events, kinds)

    @property
    def backwards(self) -> tuple[Event, ...]:
        return self.of(Kind.BACKWARD)

    @property
    def size(self) -> int:
        """Number of micro-batches that have a backward."""
        return sum(1 for micro_batch in self.micro_batches if micro_batch.backwards)

    @property
    def boundary(self) -> MicroBatch | None:
        """The micro-batch after which the optimizer steps."""
        trained = [micro for micro in self.micro_batches if micro.backwards]
        return max(trained, key=lambda micro: micro.backwards[-1].index, default=None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something the source says that a rule may rest on, with the place that says it."""

    place: Place
    text: str


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What is known of K: how the source spells it and the value that the rehearsal gave it."""

    text: str
    value: int
    place: Place | None = None
    literal: bool = False  # K stands in place as a number


@dataclass(frozen=True)
class Trace:
    """The windows of one training loop in order, and what is left over at the end.

    `settings` are the answers that unknown conditions got in this rehearsal, the ones that differ from the default
    first. `facts` hold evidence by name: "varying-units" (the number of valid targets varies), "ignored-targets",
    "distributed", "rank-agreed" (a value was reduced over ranks), "means-to-accumulate", "engine-divides", "may-count" (the
    engine can be told to weigh micro-batches by their targets), "batchnorm".
    `followed` is False where the rehearsal ended early or an unknown call could have hidden events.
    """

    path: str
    place: Place  # of the loop
    function: str
    events: tuple[Event, ...]
    accumulation: Accumulation | None = None
    settings: tuple[tuple[str, str], ...] = ()
    facts: Mapping[str, tuple[Evidence, ...]] = field(default_factory=dict)
    followed: bool = True
    judges_tail: bool = True
    limits: tuple[str, ...] = ()  # what could not be followed, and why
    actors: tuple[Actor, ...] = ()  # objects that were made but take part in no event
    versions: tuple[tuple[str, str], ...] = ()  # which version of each framework was assumed, and why
    frameworks: tuple[str, ...] = ()  # those whose calls were carried out as they do it, with the versions that this is told of
    measured: bool = False  # seen in a run, not in a rehearsal

    def fact(self, name: str) -> Evidence | None:
        """The first piece of evidence of that name."""
        evidence = self.facts.get(name)
        return evidence[0] if evidence else None

    @cached_property
    def _by_kind(self) -> dict[tuple[Kind, ...], tuple[Event, ...]]:
        return {}

    def of(self, *kinds: Kind) -> tuple[Event, ...]:
        """The events of these kinds, in order."""
        return _chosen(self._by_kind, self.events, kinds)

    @cached_property
    def optimizers(self) -> tuple[Actor, ...]:
        """The optimizers that step, in the order of their first step."""
        seen: dict[int, Actor] = {}
        for event in self.of(Kind.STEP):
            for target in event.targets:
                seen.setdefault(target.uid, target)
        return tuple(seen.values())

    @cached_property
    def _windows(self) -> dict[int | None, tuple[tuple[Window, ...], Window | None]]:
        return {
            None if actor is None else actor.uid: cut_windows(self.events[self.begins(actor) :], actor)
            for actor in (self.optimizers or (None,))
        }

    def begins(self, optimizer: Actor | None) -> int:
        """Where an optimizer's windows begin: after the last step of one made by the same line before it, which never steps again,
        or at its own first zero where such a one never stepped at all."""
        if optimizer is None:
            return 0
        own = next(event for event in self.of(Kind.STEP) if event.concerns(optimizer))
        ends = {target.uid: event for event in self.of(Kind.STEP) for target in event.targets}
        begins = 0
        for uid, last in ends.items():
            if uid == optimizer.uid or last.place != own.place or last.index >= own.index or uid > optimizer.uid:
                continue
            if any(event.kind in {Kind.FORWARD, Kind.BACKWARD} for event in self.events[last.index : own.index]):
                begins = max(begins, last.index + 1)
        return max(begins, self._first_zero(optimizer, own))

    def _first_zero(self, optimizer: Actor, step: Event) -> int:
        """The optimizer's first zero before its first step, where one that is gone by then was zeroed by the same line."""
        own = next((event for event in self.of(Kind.ZERO) if any(target.uid == optimizer.uid for target in event.targets)), None)
        if own is None or own.index > step.index:
            return 0
        before, after = set[int](), set[int]()
        for event in self.of(Kind.ZERO, Kind.STEP):
            (before if event.place == own.place and event.index < own.index else after).update(target.uid for target in event.targets)
        return own.index if any(uid < optimizer.uid for uid in before - after) else 0

    def windows(self, optimizer: Actor | None = None) -> tuple[Window, ...]:
        """The complete windows of one optimizer (of the first, when none is named)."""
        return self._cut(optimizer)[0]

    def tail(self, optimizer: Actor | None = None) -> Window | None:
        """The micro-batches left over at the end, or None."""
        return self._cut(optimizer)[1]

    def all_windows(self) -> Iterator[Window]:
        """The complete windows of every optimizer."""
        for windows, _ in self._windows.values():
            yield from windows

    def _cut(self, optimizer: Actor | None) -> tuple[tuple[Window, ...], Window | None]:
        if optimizer is None:
            return next(iter(self._windows.values()))
        return self._windows[optimizer.uid]

    @cached_property
    def accumulates(self) -> bool:
        """Whether some window has two or more micro-batches, or the code says that it means to accumulate.

        Not where gradients are gathered elsewhere and put in place before the step: which backwards it uses cannot be told.
        """
        if self.fact("gradients-by-hand"):
            return False
        return any(window.size >= 2 for window in self.all_windows()) or bool(self.fact("means-to-accumulate"))


def _chosen(known: dict[tuple[Kind, ...], tuple[Event, ...]], events: tuple[Event, ...], kinds: tuple[Kind, ...]) -> tuple[Event, ...]:
    """The events of these kinds; what was asked before is kept, for the rules ask the same again and again."""
    found = known.get(kinds)
    if found is None:
        found = known[kinds] = tuple(event for event in events if event.kind in kinds)
    return found


def cut_windows(events: tuple[Event, ...], optimizer: Actor | None) -> tuple[tuple[Window, ...], Window | None]:
    """Cuts the events at the steps of one optimizer; returns the windows and the tail.

    What follows a step belongs to its window until the next DATA, FORWARD or BACKWARD.
    """
    windows: list[Window] = []
    pending: list[Event] = []
    step: Event | None = None
    for event in events:
        if step is not None and event.kind in {Kind.DATA, Kind.FORWARD, Kind.BACKWARD}:
            windows.append(_window(optimizer, pending, step))
            pending, step = [], None
        pending.append(event)
        if event.kind is Kind.STEP and optimizer is not None and event.concerns(optimizer):
            step = event
    if step is not None:
        windows.append(_window(optimizer, pending, step))
        pending = []
    tail = _window(optimizer, pending, None)
    return tuple(windows), tail if tail.backwards else None


def _window(optimizer: Actor | None, events: list[Event], step: Event | None) -> Window:
    last = max((at for at, event in enumerate(events) if event.kind is Kind.BACKWARD), default=-1)
    groups: dict[int, list[Event]] = {}
    for event in events[: last + 1]:
        groups.setdefault(event.micro_batch, []).append(event)
    micro_batches = tuple(MicroBatch(number, tuple(group)) for number, group in groups.items())
    return Window(optimizer, micro_batches, tuple(events[last + 1 :]), step)
