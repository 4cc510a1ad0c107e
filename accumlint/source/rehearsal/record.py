"""Writes down what happens in a rehearsal, as events."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from accumlint.source.reading.notebook import cell_at
from accumlint.source.reading.program import Program
from accumlint.source.rehearsal.values import Value
from accumlint.source.rehearsal.worlds import MOST_EVENTS, Alike, Differs, OutOfSteps
from accumlint.trace import FILE_LINES, Actor, Event, Evidence, Guard, Kind, Place, Turn

LONGEST_TEXT = 80
NUMBERED = frozenset({"index", "micro_batch", "model", "scaler", "targets", "reaches", "forwards", "data"})
COMPARED = tuple(each.name for each in fields(Event) if each.name not in NUMBERED)
compared = attrgetter(*COMPARED)
BEGINS = frozenset({Kind.DATA, Kind.FORWARD, Kind.BACKWARD})


@dataclass(slots=True)
class OpenTurn:
    """A turn of a loop that is being rehearsed."""

    line: int
    index: int
    entry: int
    last: bool = False
    endless: bool = False
    micro_batch: int | None = None
    own_data: bool = False  # new data was taken in this very turn
    source: Value | None = None  # what the loop goes over
    taken: set[int] = field(default_factory=set)  # the data taken in this very turn
    parts: bool = False  # its loop goes over the parts of a batch, and no optimizer steps in it
    micro: bool = False  # it goes backward itself, not in a loop within
    turn: Turn | None = None  # as events show it

    def closed(self) -> Turn:
        if self.turn is None:
            self.turn = Turn(self.line, self.index, self.entry, self.last, self.endless)
        return self.turn


Looks = tuple[Any, ...]


@dataclass
class Expected:
    """What happened in a rehearsal that another one is compared with, which ends where the two part."""

    looks: Sequence[Looks]
    until: int | None = None  # how many of the events it is enough to meet
    met: int = 0
    steps: int = 0  # that the comparison took

    def meet(self, event: Event) -> None:
        """Takes the next event; new data may be taken anywhere."""
        if event.kind is Kind.DATA:
            return
        if self.met == len(self.looks) or self.looks[self.met] != looks(event):
            raise Differs
        self.met += 1
        if self.until is not None and self.met > self.until:
            raise Alike


def looks(event: Event) -> Looks:
    """An event without the numbers of its objects, as it is when it happens."""
    actors = ((event.model, event.model and event.model.name), (event.scaler, ""), *((each, "") for each in event.targets))
    return (
        *compared(event),
        *((name, actor.role, actor.wrapper, actor.known, actor.options) for actor, name in actors if actor is not None),
        len(event.reaches),
    )


def _as_unparsed(node: ast.AST) -> str:
    try:
        return " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return ""


def _column(lines: tuple[str, ...], line: int, offset: int) -> int:
    """The 1-based column of an offset."""
    text = lines[line - 1] if 0 < line <= len(lines) else ""
    return offset + 1 if text.isascii() else len(text.encode()[:offset].decode(errors="replace")) + 1


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 1] + "…"


@dataclass
class Recorder:
    """The events so far, and the loops and conditions that are open around the statement being rehearsed."""

    program: Program
    events: list[Event] = field(default_factory=list)
    turns: list[OpenTurn] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)
    calls: list[ast.Call] = field(default_factory=list)  # of helpers, that are being followed
    facts: dict[str, list[Evidence]] = field(default_factory=dict)
    entries: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # by the index of a skip, the index at which what it passes over is over
    compared: set[str] = field(default_factory=set)  # models whose earlier outputs are taken from their present ones
    micro_batches: int = 0
    updates: int = 0  # that were done so far
    used: frozenset[int] = frozenset()  # the data that forwards were given
    texts: dict[int, str] = field(default_factory=dict)  # of nodes, shared by all rehearsals of a module
    places: dict[int, Place] = field(default_factory=dict)  # likewise
    looks: list[Looks] = field(default_factory=list)  # of the events, where they are compared with nothing
    expected: Expected | None = None  # what this rehearsal is compared with

    def place(self, node: ast.AST) -> Place:
        known = self.places.get(id(node))
        if known is None:
            known = self.places[id(node)] = self._find_place(node)
        return known

    def _find_place(self, node: ast.AST) -> Place:
        line = getattr(node, "lineno", 1)
        end = getattr(node, "end_lineno", line) or line
        first, last = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0) or 0
        return self.place_of(line, first, end, last)

    def place_of(self, line: int, first: int = 0, end: int | None = None, last: int | None = None) -> Place:
        """Where a line of the program stands; offsets are as the parser counts them, in bytes."""
        source = self.program.source_of(line)
        start = line % FILE_LINES
        if end is None or last is None:
            return Place(source.path, start, 1, 0, 0, *cell_at(source.cells, start))
        end %= FILE_LINES
        first, last = _column(source.lines, start, first), _column(source.lines, end, last)
        return Place(source.path, start, first, end, last, *cell_at(source.cells, start))

    def text(self, node: ast.AST) -> str:
        """The source of a node as one short line."""
        known = self.texts.get(id(node))
        if known is None:
            known = self.texts[id(node)] = _shortened(self._as_written(node) or _as_unparsed(node))
        return known

    def _as_written(self, node: ast.AST) -> str:
        """The text of a node that stands on one line; "" for others, and for nodes that the source does not hold."""
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", None)
        if not isinstance(node, ast.expr) or line != end:
            return ""
        lines = self.program.source_of(line).lines
        line %= FILE_LINES
        if not 0 < line <= len(lines):
            return ""
        text = lines[line - 1].encode()[node.col_offset : node.end_col_offset]
        return " ".join(text.decode(errors="replace").split())

    @contextmanager
    def passed_over(self, skip: Event | None) -> Iterator[None]:
        """What happens in here is all that the skip leaves out, unless it leaves the turn."""
        try:
            yield
        finally:
            if skip is not None and skip.leaves in {"branch", "except"}:
                self.ends[skip.index] = len(self.events)

    def fact(self, name: str, node: ast.AST, text: str = "") -> None:
        place = self.place(node)
        known = self.facts.setdefault(name, [])
        if all(one.place != place for one in known):
            known.append(Evidence(place, text or self.text(node)))

    def cached_by(self, model: Actor) -> str:
        """What marks the outputs of a model that are computed here without a graph."""
        return f"cached:{model.uid}:{self._turn}"

    def replays(self, causes: Set[str], models: Iterable[Actor]) -> bool:
        """Whether outputs of these models, computed without a graph before this turn, are among the causes.

        Those of the same turn (old or reference probabilities, a first pass to condition on) belong to this micro-batch's own loss.
        """
        own = {model.uid for model in models}
        cached = (cause.split(":") for cause in causes if cause.startswith("cached:"))
        return any(int(uid) in own and uid not in self.compared and turn != self._turn for _, uid, turn in cached)

    def compares(self, causes: Set[str]) -> None:
        """Notes that what a model gave earlier is taken from what it gives now: old probabilities, not features to replay."""
        self.compared.update(cause.split(":")[1] for cause in causes if cause.startswith("cached:"))

    @property
    def _turn(self) -> str:
        return "/".join(f"{turn.line}.{turn.entry}.{turn.index}" for turn in self.turns)

    def new_data(self) -> int:
        """New data was taken in the innermost turn: it begins a micro-batch unless that turn already has one."""
        for turn in reversed(self.turns):
            if turn.micro_batch is None:
                self.micro_batches += 1
                turn.micro_batch = self.micro_batches
            turn.own_data = True
            return turn.micro_batch
        if self.micro_batches == 0:
            self.micro_batches = 1
        return self.micro_batches

    def uses(self, data: frozenset[int]) -> None:
        """Data that was fetched before its turn, by a prefetcher, begins a micro-batch where a forward first uses it."""
        known, self.used = self.used, self.used | data
        turn = self.turns[-1] if self.turns else None
        if turn is None or turn.micro_batch is not None or not data or data & known:
            return
        before = next((event for event in reversed(self.events) if event.kind is Kind.FORWARD), None)
        if before is not None and any((one.line, one.entry) == (turn.line, turn.entry) and one.index < turn.index for one in before.turns):
            self.new_data()

    def current(self) -> int:
        """The micro-batch at hand, without beginning one."""
        return next((turn.micro_batch for turn in reversed(self.turns) if turn.micro_batch is not None), self.micro_batches)

    def micro_batch(self) -> int:
        """The micro-batch that an event happening now belongs to."""
        for turn in reversed(self.turns):
            if turn.micro_batch is not None:
                return turn.micro_batch
        if not self.turns:
            return self.micro_batches
        return self.new_data()

    def is_of_earlier_turn(self, event: Event) -> bool:
        """Whether an event happened in an earlier turn of a loop that is open now; inner loops that are over belong to this turn."""
        for one, turn in zip(self.turns, event.turns, strict=False):
            if one.line != turn.line:
                return False
            if (one.index, one.entry) != (turn.index, turn.entry):
                return True
        return False

    def _call_in_loop(self, node: ast.AST) -> Place | None:
        """Where the file of the innermost loop calls the helper of another file that a node stands in."""
        loop = self.turns[-1].line // FILE_LINES if self.turns else None
        if loop is None or not self.calls or getattr(node, "lineno", 1) // FILE_LINES == loop:
            return None
        call = next((each for each in reversed(self.calls) if each.lineno // FILE_LINES == loop), None)
        return self.place(call) if call is not None else None

    def emit(self, kind: Kind, node: ast.AST, **known: Any) -> Event:
        event = Event(
            index=len(self.events),
            kind=kind,
            place=self.place(node),
            micro_batch=self.micro_batch() if kind in BEGINS else self.current(),
            turns=tuple([turn.closed() for turn in self.turns]),
            text=self.text(node),
            guards=tuple(self.guards),
            call=self._call_in_loop(node),
            **known,
        )
        self.events.append(event)
        self.updates += kind is Kind.STEP
        if len(self.events) > MOST_EVENTS:
            raise OutOfSteps
        if self.expected is not None:
            self.expected.meet(event)
        elif kind is not Kind.DATA:
            self.looks.append(looks(event))
        return event
