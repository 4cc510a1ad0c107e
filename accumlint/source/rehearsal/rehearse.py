"""Rehearses the training loops of a module, in every world that can matter."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from accumlint.config import Settings
from accumlint.source.reading.facts import FunctionNode
from accumlint.source.reading.index import Index
from accumlint.source.reading.parse import Source
from accumlint.source.reading.program import LONG_FILE, Program
from accumlint.source.reading.relevance import Relevance
from accumlint.source.reading.sieve import holds_sign, names_framework_entry
from accumlint.source.reading.slices import prune
from accumlint.source.reading.windows import literal_window
from accumlint.source.rehearsal.alternatives import Alternatives
from accumlint.source.rehearsal.calls import SourceRaised
from accumlint.source.rehearsal.entries import enters, module_reaches, outermost, reached, running, trains
from accumlint.source.rehearsal.evidence import gather, never_run
from accumlint.source.rehearsal.given import DATA_NAME, does_one_epoch, flags
from accumlint.source.rehearsal.intent import accumulation_of, means_to_accumulate
from accumlint.source.rehearsal.machine import Machine
from accumlint.source.rehearsal.names import COUNTER_NAMES
from accumlint.source.rehearsal.record import Expected, OpenTurn, Recorder
from accumlint.source.rehearsal.skips import narrowed
from accumlint.source.rehearsal.splitting import split_by_loop
from accumlint.source.rehearsal.state import Leave
from accumlint.source.rehearsal.trials import Trials
from accumlint.source.rehearsal.unclear import awaited, perhaps, questions, unclear, without_sync
from accumlint.source.rehearsal.values import Class, Function, Instance, Known, Opaque, Value
from accumlint.source.rehearsal.worlds import (
    MOST_STEPS_IN_ALL,
    MOST_WORLDS,
    OUTER_TURNS,
    Alike,
    Differs,
    Knowledge,
    OutOfSteps,
    Restart,
    World,
)
from accumlint.source.vocabulary.base import Vocabulary
from accumlint.source.vocabulary.project_wrappers import signs
from accumlint.source.vocabulary.registry import vocabulary_for
from accumlint.trace import FILE_LINES, Evidence, Kind, Place, Trace

RANKS = re.compile(r"distributed|multi_?gpu|ddp|local_rank|world|rank|n_?gpu|num_gpus|parallel|fsdp|devices", re.IGNORECASE)
MOST_RESTARTS = 12
WORLDS_WITHOUT_BACKWARD = 3  # that are tried where the first one trains nothing


@dataclass(frozen=True)
class Options:
    """What the configuration tells the rehearsal."""

    accumulation_names: tuple[str, ...] = ()
    wrappers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    objective: str = "token"

    @classmethod
    def of(cls, settings: Settings) -> Options:
        return cls(settings.accumulation_names, settings.wrappers, settings.objective)


@dataclass
class Rehearsal:
    """The training loops that one entry of a module reaches; `traces(k)` rehearses them."""

    program: Program
    index: Index
    relevance: Relevance
    options: Options
    vocabulary: Vocabulary
    entry: FunctionNode | None  # None: the module's own statements
    owner: ast.ClassDef | None = None  # the class of which the entry is called as a method
    drive: Callable[[Machine, Function], None] | None = None  # how a framework calls the entry
    covered: set[int] = field(default_factory=set)  # ids of the backward calls that were reached
    entered: set[int] = field(default_factory=set)  # ids of the functions that were run
    limits: list[str] = field(default_factory=list)
    follows: bool = True  # into the other files of the project; where that leads too far the file alone is rehearsed
    opens: bool = False  # gives the entry more than the None of its defaults, with which it raises
    passes: int = 1  # how often whoever calls the entry does
    passes_raises: bool = False  # takes helpers without events that raise in every run for ones that give something unknown
    _traces: dict[int, list[Trace]] = field(default_factory=dict)
    _rest: dict[int, Generator[Trace, None, None]] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return self.program.path

    @property
    def function(self) -> str:
        return self.entry.name if self.entry is not None else "<module>"

    def started_at(
        self, entry: FunctionNode, owner: ast.ClassDef | None, drive: Callable[[Machine, Function], None] | None = None
    ) -> Rehearsal:
        """A rehearsal of the same program that starts elsewhere."""
        return Rehearsal(self.program, self.index, self.relevance, self.options, self.vocabulary, entry, owner, drive)

    @property
    def asks_callers(self) -> str:
        """The name of a function or class that other files use and give a model which is not made here; "" where it is made here."""
        if self.entry is None or self.drive is not None:
            return ""
        models = {event.model for trace in self.traces(3) for event in trace.of(Kind.FORWARD)}
        if models and all(model is not None and model.known and "given" not in model.options for model in models):
            return ""
        return self.owner.name if self.owner is not None else self.entry.name

    @property
    def is_one_epoch(self) -> bool:
        """Whether the entry is what others call in every epoch, and accumulates: then what one pass leaves meets the next."""
        if not self.asks_callers or self.entry is None or not self.index.reaches_backward_in_loop(self.entry):
            return False
        return does_one_epoch(self.index, self.entry) and any(trace.accumulates for trace in self.traces(3))

    def of_two_epochs(self) -> Rehearsal:
        """The same, with the entry called twice."""
        again = self.started_at(self.entry, self.owner) if self.entry is not None else self
        again.passes = OUTER_TURNS
        return again

    @cached_property
    def place(self) -> Place:
        traces = self.traces(3)
        if traces:
            return traces[0].place
        return Place(self.path, self.entry.lineno if self.entry is not None else 1)

    def traces(self, k: int) -> tuple[Trace, ...]:
        """One trace a loop and world; those of the first world (empty `settings`) first."""
        return tuple(self.worlds(k))

    def worlds(self, k: int) -> Iterator[Trace]:
        """The same one by one: a world is rehearsed when it is asked for, and once."""
        seen = self._traces.setdefault(k, [])
        rest = self._rest.setdefault(k, self._rehearse(k))
        at = 0
        while True:
            while at < len(seen):
                yield seen[at]
                at += 1
            following = next(rest, None)
            if following is None:
                return
            seen.append(following)

    def end(self) -> None:
        """No more worlds are asked for."""
        for rest in self._rest.values():
            rest.close()

    def _rehearse(self, k: int) -> Generator[Trace, None, None]:
        knowledge = Knowledge(named=self.options.accumulation_names, literal=literal_window(self.index))
        first = self._run(World(k, knowledge, passes_raises=self.passes_raises))
        if first is None:
            return
        try:
            yield from self._from(first)
        finally:
            first.let_go()

    def _from(self, first: Machine) -> Iterator[Trace]:
        """What the first world shows, and those that differ from it in an answer."""
        default = list(self._traces_of(first, ()))
        yield from default
        gates = questions(first)
        open_answers = (one for one in first.world.answers.values() if one.flips and not one.is_incidental and one.text not in gates)
        flips = sorted(open_answers, key=lambda answer: -answer.weight)
        if not default:
            flips = flips[: 0 if self.drive is not None else WORLDS_WITHOUT_BACKWARD]
        if len(flips) >= MOST_WORLDS:
            self.limits.append(f"{len(flips)} unknown settings: {MOST_WORLDS - 1} of them were flipped")
        spent = first.steps
        flips = flips[: MOST_WORLDS - 1]
        doubtful = [answer for answer in flips if answer.weight <= 0 and not RANKS.search(answer.text)]
        idle = Trials(self._tried, lambda other: list(self._traces_of(other, ())), first, default).without_effect(doubtful)
        left = Alternatives(first, flips)
        while (answers := left.take(idle)) is not None:
            if spent > MOST_STEPS_IN_ALL:
                self.limits.append("out of steps: not every setting was flipped")
                return
            other = self._run(first.world.flipped(*answers))
            if other is not None:
                spent += other.steps
                shown = list(self._traces_of(other, tuple((one.text, "false" if one.holds else "true") for one in answers)))
                yield from shown
                if shown and not default if self.drive is None else default:  # without: this is the first world that trains
                    left.learn(answers, other)
                other.let_go()

    def _tried(self, world: World, expected: Expected) -> Machine | None:
        limits = len(self.limits)
        other = self._run(world, expected)
        if other is None:
            del self.limits[limits:]
        return other

    def _run(self, world: World, expected: Expected | None = None) -> Machine | None:
        """Rehearses in one world, again from the start whenever something is learnt; only as long as what is expected happens."""
        for _ in range(MOST_RESTARTS):
            recorder = Recorder(self.program, texts=self.index.texts, places=self.index.places, expected=expected)
            followed = self.program if self.follows else None
            machine = Machine(self.index, self.relevance, recorder, world, self.vocabulary, followed)
            whole = False
            try:
                self._enter(machine)
                whole = True
            except Restart:
                world.answers.clear()
                if expected is not None:
                    expected.met = 0
                continue
            except Alike:
                return machine
            except Differs:
                return None
            except SourceRaised:
                if world.forced or self.passes_raises:
                    return None
                if self.opens or self.entry is None:
                    self.passes_raises = world.passes_raises = True
                self.opens = True
                world.answers.clear()
                continue
            except OutOfSteps:
                if self.follows and machine.modules and not world.forced:
                    self.follows = False
                    world.answers.clear()
                    continue
                self.limits.append(f"out of steps in {self.function}")
                return None
            except (RecursionError, Leave):
                self.limits.append(f"too deep in {self.function}")
                return None
            except Exception as error:  # what the interpreter cannot take is passed over in silence, never a crash
                if os.environ.get("ACCUMLINT_DEBUG"):
                    raise
                self.limits.append(f"internal error in {self.function}: {error!r}")
                return None
            finally:
                if expected is not None:
                    expected.steps += machine.steps
                if not whole:
                    machine.let_go()
            self.covered |= machine.covered
            self.entered |= machine.entered
            if machine.engines:
                self.limits.append(f"a framework's engine does the backward: {machine.engines[0]}")
                return None
            return machine
        return None

    def _enter(self, machine: Machine) -> None:
        if self.entry is None:
            machine.block(self.program.source.tree.body)
            return
        quiet = [
            node
            for node in self.program.source.tree.body
            if not machine.index.kinds(node) or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        ]
        machine.block(quiet)
        function = self._bound(machine, self.owner) if self.owner is not None else machine.globals.find(self.entry.name)
        if not isinstance(function, Function):
            function = machine.function(self.entry, None)
        assert isinstance(function, Function)
        if self.drive is not None:
            self.drive(machine, function)
        elif self.index.reaches_backward_in_loop(self.entry):
            self._pass(machine, function)
        else:
            self._drive(machine, function)

    def _pass(self, machine: Machine, function: Function) -> None:
        """Calls the entry, as often as whoever calls it does."""
        given = machine.left_open(function) if self.opens else machine.clipping_open(function)
        if self.passes == 1:
            machine.call_function(function, [], given, None)
        for at in range(self.passes if self.passes > 1 else 0):
            machine.recorder.turns.append(OpenTurn(getattr(self.entry, "lineno", 1), at, 0))
            try:
                machine.call_function(function, [], given, None)
            finally:
                machine.recorder.turns.pop()

    def _bound(self, machine: Machine, owner: ast.ClassDef) -> Value | None:
        assert self.entry is not None
        cls = machine.globals.find(owner.name)
        if not isinstance(cls, Class):
            return None
        call = ast.copy_location(ast.Call(ast.Name(owner.name, ast.Load()), [], []), owner)
        init = cls.find("__init__")
        instance = machine.begun(cls, call, machine.choices_open(init) if self.drive is not None else machine.clipping_open(init))
        return machine.attribute(instance, self.entry.name, self.entry) if isinstance(instance, Instance) else None

    def _drive(self, machine: Machine, function: Function) -> None:
        """A function that does one micro-batch, called by code that is not here: 2K+1 calls, and no tail is judged."""
        assert self.entry is not None
        names = [argument.arg for argument in function.node.args.args]
        if function.bound is not None:
            names = names[1:]
        kept: dict[str, Value] = {}
        for at in range(machine.world.batches):
            machine.recorder.turns.append(OpenTurn(self.entry.lineno, at, 0, endless=True))
            try:
                machine.recorder.new_data()
                args: list[Value] = [Known(at) if name in COUNTER_NAMES else self._given(machine, function, name, kept) for name in names]
                machine.call_function(function, args, {}, None)
            finally:
                machine.recorder.turns.pop()
            for value in kept.values():
                _forget_losses(value)

    def _given(self, machine: Machine, function: Function, name: str, kept: dict[str, Value]) -> Value:
        """A parameter of a driven function: an object that is used by its attributes stays, the rest is new data each time."""
        if name in self.index.once("flags", function.node, flags) or (self.index.usage.get(name) and not DATA_NAME.search(name)):
            return kept.setdefault(name, machine.parameter(function, name))
        return machine.datum(function.node, name)

    def _traces_of(self, machine: Machine, settings: tuple[tuple[str, str], ...]) -> Iterator[Trace]:
        alone = any(RANKS.search(text) for text, _ in settings)
        facts: dict[str, list[Evidence]] = {name: list(evidence) for name, evidence in machine.recorder.facts.items()}
        unseen = list(never_run(self.index, machine.recorder, machine.sides.values(), machine.entered)) if self.follows else []
        for name, evidence in self.index.once("evidence", self.index.tree, lambda _: gather(self.index, machine.recorder)).items():
            kept = [one for one in evidence if not any(stretch.holds(one) for stretch in unseen)]
            if kept:
                facts.setdefault(name, []).extend(kept)
        seen = perhaps(machine, narrowed(machine.recorder.events, machine.recorder.ends))
        for events in split_by_loop(without_sync(seen) if unclear(machine.elsewhere.sync_asked) else seen):
            if not any(event.kind is Kind.BACKWARD for event in events):
                continue
            accumulation = accumulation_of(machine, events, self.entry)
            first = next(event for event in events if event.kind is Kind.BACKWARD)
            line = first.turns[0].line if first.turns else first.place.line
            driven = self.drive is None and self.entry is not None and not self.index.reaches_backward_in_loop(self.entry)
            own = {name: tuple(found) for name, found in facts.items() if not (alone and name == "distributed")}
            if means_to_accumulate(events, accumulation):
                own["means-to-accumulate"] = (Evidence(first.place, "K"),)
            place = machine.recorder.place_of(line)
            gate = awaited(machine, events)
            if gate:
                own["unclear-gate"] = (Evidence(place, gate),)
            yield Trace(
                path=place.path,
                place=place,
                function=self.function,
                events=events,
                accumulation=accumulation,
                settings=settings,
                facts=own,
                judges_tail=not (driven or gate),
                limits=tuple(dict.fromkeys(machine.limits)),
                versions=tuple((package, found.described) for package, found in sorted(machine.versions.items())),
                frameworks=tuple(sorted(machine.frameworks)),
                actors=tuple(wrapper.actor for wrapper in machine.wrappers.values()),
            )


def _forget_losses(value: Value) -> None:
    """What an object holds for one call, `runner.outputs["loss"]`, whoever calls sets anew before the next."""
    if not isinstance(value, Opaque):
        return
    for name, part in list(value.attributes.items()):
        if isinstance(part, Opaque) and part.actor is None:
            if part.forwards or part.weight is not None:
                del value.attributes[name]
            else:
                _forget_losses(part)


def _trains(program: Program) -> bool:
    """Whether the files of a program call a backward and an update, or are called by a framework that does."""
    source = program.source
    if any(names_framework_entry(each.text) for each in program.sources()):
        return True
    return (program.backward and program.update) if program.kept else trains(source.tree)


def rehearsals(source: Source | Program, options: Options | None = None, through: str = "") -> Iterator[Rehearsal]:
    """A rehearsal for every outermost piece of a module that reaches a backward, or that a framework calls.

    What it reaches may lie in the files that it is followed into. With `through`, only those that may run something of that followed file.
    """
    program = source if isinstance(source, Program) else Program(source)
    source = program.source
    chosen = options or Options()
    wraps = bool(chosen.wrappers) and holds_sign(source.text.encode("utf-8", "surrogatepass"), signs(chosen.wrappers))
    if not wraps and not _trains(program):
        return
    if len(source.lines) > LONG_FILE and not wraps and not program.kept and not prune(source.tree, source.lines):
        return
    index = Index(program.tree())
    vocabulary = vocabulary_for(index, chosen.wrappers)
    called = [each for each in vocabulary.entries(index) if each.function.lineno < FILE_LINES]
    driven = {id(each.function) for each in called}
    entries = [(entry, owner) for entry, owner in outermost(index) if id(entry) not in driven]
    if through:
        number = program.outlines[through].number
        entries = [(entry, owner) for entry, owner in entries if enters(index, entry, number)]
        called = [each for each in called if enters(index, each.function, number)]
    alone = module_reaches(index)
    if not entries and not alone and not called:
        return
    begun = Rehearsal(program, index, Relevance(index), chosen, vocabulary, None)
    covered: set[int] = set()
    entered: set[int] = set()
    told: set[int] = set()  # functions that were run in a rehearsal which gave a trace

    def done(rehearsal: Rehearsal) -> Rehearsal:
        if rehearsal.traces(3):
            told.update(rehearsal.entered)
        covered.update(rehearsal.covered)
        entered.update(rehearsal.entered)
        return rehearsal

    if alone:
        yield done(begun)
    played = {id(function) for each in called for function in running(index, each.function)}
    loops = {id(entry) for entry, _ in entries if id(entry) not in played and index.reaches_backward_in_loop(entry)}
    for entry, owner, drive in (
        *((entry, owner, None) for entry, owner in entries if not called or id(entry) in loops),
        *((each.function, index.owner.get(each.function), each.drive) for each in called),
        *((entry, owner, None) for entry, owner in entries if called and id(entry) not in loops),
    ):
        own = reached(index, entry)
        known = id(entry) in told if drive is not None else not own or own <= covered or (id(entry) in entered and own & covered)
        if not known:
            yield done(begun.started_at(entry, owner, drive))
