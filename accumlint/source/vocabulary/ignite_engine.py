"""Ignite's loop: epochs, iterations, and the events whose handlers run around the update function."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.iterate import MOST_TURNS
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import NONE, Function, Known, Method, Opaque, Root, Thing, Value, actor_of, key_of
from accumlint.source.rehearsal.worlds import OUTER_TURNS
from accumlint.source.vocabulary.ignite_handlers import aligned, handler_of
from accumlint.source.vocabulary.ignite_supervised import Supervised
from accumlint.source.vocabulary.played import entered, guarded, kinds_of, parameters_of, period, turn
from accumlint.trace import Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PER_EPOCH = frozenset({"EPOCH_STARTED", "EPOCH_COMPLETED"})
PER_ITERATION = frozenset({"GET_BATCH_STARTED", "GET_BATCH_COMPLETED", "ITERATION_STARTED", "ITERATION_COMPLETED"})
ONCE = frozenset({"STARTED", "COMPLETED"})
EVENTS = PER_EPOCH | PER_ITERATION | ONCE


@dataclass(eq=False)
class Registration:
    """A handler, the expression of the event that it waits for, and where it was added."""

    event: ast.expr
    function: Value
    arguments: list[Value]
    keywords: dict[str, Value]
    node: ast.AST
    filters: dict[str, dict[str, Value]] = field(default_factory=dict)  # of each event that it waits for: every, once, event_filter


@dataclass(eq=False)
class Engine:
    """An engine, with its update function and its handlers."""

    thing: Thing
    update: Value
    registrations: list[Registration] = field(default_factory=list)
    entered: bool = False
    running: bool = False

    def supervised(self, state: Machine) -> Supervised | None:
        """The update that Ignite makes itself, where the engine has one."""
        return state.memory.get(("ignite update", self.update.actor.uid)) if isinstance(self.update, Thing) else None

    def set(self, **numbers: Value) -> None:
        """Sets what `engine.state` says."""
        inner = self.thing.attributes["state"]
        assert isinstance(inner, Opaque)
        inner.attributes.update(numbers)


def adds(state: Machine, engine: Engine, registration: Registration) -> None:
    """Adds a handler to an engine. An event whose name does not stand in place is one of those that bring nothing about."""
    registration.filters = _filters(state, registration.event)
    if not registration.filters and kinds_of(state, registration.function):
        state.limits.append(f"{state.recorder.text(registration.node)}: the event is not known")
    engine.registrations.append(registration)


def _filters(state: Machine, event: ast.expr) -> dict[str, dict[str, Value]]:
    """`Events.A(every=2) | Events.B`: the names of the events, and how each is filtered."""
    if isinstance(event, ast.BinOp) and isinstance(event.op, ast.BitOr):
        return _filters(state, event.left) | _filters(state, event.right)
    if isinstance(event, ast.Call):
        inner = _filters(state, event.func)
        given = {keyword.arg: state.eval(keyword.value) for keyword in event.keywords if keyword.arg is not None}
        if event.args:
            given["event_filter"] = state.eval(event.args[0])
        return {name: dict(given) for name in inner}
    if isinstance(event, ast.Attribute) and event.attr in EVENTS:
        return {event.attr: {}}
    value = state.force(state.eval(event)) if isinstance(event, (ast.Name, ast.Attribute)) else NONE
    if isinstance(value, Opaque) and value.name in EVENTS:
        return {value.name: value.attributes}
    return {}


def filtered(state: Machine, call: Call) -> Value | None:
    """`Events.X(every=2)`, kept under a name."""
    made = state.opaque(("event", call.name, id(call.node)), state.recorder.text(call.node), name=call.name)
    made.attributes.update(call.keywords)
    return made


def play(state: Machine, engine: Engine, node: ast.Call, data: Value, epochs: Value | None, *, judged: bool = True) -> None:
    """Runs an engine over its data. What is left at the end of the run can be judged only where the run itself was seen."""
    engine.entered = engine.running = True
    try:
        _Run(state, engine, node, judged).play(state.force(data), epochs)
    finally:
        engine.running = False


class _Run:
    def __init__(self, state: Machine, engine: Engine, node: ast.Call, judged: bool) -> None:
        self.state = state
        self.engine = engine
        self.node = node
        self.judged = judged
        self.iteration = 0
        self.supervised = engine.supervised(state)

    def play(self, data: Value, epochs: Value | None) -> None:
        state = self.state
        entry = entered(state, self.node.lineno)
        most = self._epochs(epochs)
        self.engine.set(iteration=Known(0), epoch=Known(0))
        self._fire("STARTED", 1)
        for epoch in range(most):
            with turn(state, OpenTurn(self.node.lineno, epoch, entry, epoch == most - 1, not self.judged)):
                self.engine.set(epoch=Known(epoch + 1))
                self._fire("EPOCH_STARTED", epoch + 1)
                self._epoch(data)
                self._fire("EPOCH_COMPLETED", epoch + 1)
        self._fire("COMPLETED", 1)

    def _epochs(self, epochs: Value | None) -> int:
        if epochs is None:
            return 1
        number = self.state.number(self.state.force(epochs))
        return 1 if number is not None and number.root is None and number.value == 1 else OUTER_TURNS

    def _epoch(self, data: Value) -> None:
        state, line = self.state, self._line()
        entry = entered(state, line)
        known = not (isinstance(data, Known) and data.value is None)
        plan = state.plan(data, self.node) if known else None
        count = min(plan.count, MOST_TURNS) if plan is not None and not plan.endless else state.world.batches
        endless = plan is None or plan.endless or not self.judged
        length = Root(("len", key_of(data)), "epoch_length", "length")
        self.engine.set(epoch_length=Known(count, frozenset({length}), length))
        for at in range(count):
            with turn(state, OpenTurn(line, at, entry, at == count - 1 and not endless, endless, micro=True)):
                self.iteration += 1
                self.engine.set(iteration=Known(self.iteration))
                self._fire("GET_BATCH_STARTED", self.iteration)
                state.recorder.new_data()
                batch = plan.item(at) if plan is not None else self._datum()
                self.engine.set(batch=batch)
                for name in ("GET_BATCH_COMPLETED", "ITERATION_STARTED"):
                    self._fire(name, self.iteration)
                self.engine.set(output=self._update(batch))
                self._fire("ITERATION_COMPLETED", self.iteration)

    def _line(self) -> int:
        """Where the loop over the batches is said to stand: at the update function, for the loop itself stands nowhere."""
        update = self.state.force(self.engine.update)
        return update.node.lineno if isinstance(update, Function) else self.node.lineno

    def _datum(self) -> Value:
        update = self.state.force(self.engine.update)
        names = parameters_of(update) if isinstance(update, Function) else []
        return self.state.datum(self.node, names[1] if len(names) > 1 else "batch")

    def _update(self, batch: Value) -> Value:
        if self.supervised is not None:
            return self.supervised.play(self.state, self.node, self.iteration, batch)
        return self.state.call_value(self.engine.update, [self.engine.thing, batch])

    def _fire(self, name: str, count: int) -> None:
        for one in list(self.engine.registrations):
            if name in one.filters:
                self._handle(one, one.filters[name], count)

    def _handle(self, one: Registration, given: dict[str, Value], count: int) -> None:
        if "event_filter" in given:
            passes = self.state.force(self.state.call_value(given["event_filter"], [self.engine.thing, Known(count)]))
            for root in passes.gates if isinstance(passes, Known) else ():
                self._learn(one, root)
            if self.state.truth(passes):
                with guarded(self.state, one.event):
                    self._call(one)
            return
        every = self._period(one, given["every"]) if "every" in given else None
        once = self._period(one, given["once"]) if "once" in given else None
        if every is not None and count % every:
            return
        if once is not None and count != once:
            return
        if every is not None and every > 1:
            with guarded(self.state, one.event):
                self._call(one)
        else:
            self._call(one)

    def _period(self, one: Registration, value: Value) -> int:
        """The number in `every=…`."""
        value = self.state.force(value)
        root = value.root if isinstance(value, Known) else Root(value.key, value.text) if isinstance(value, Opaque) else None
        if root is not None:
            self._learn(one, root)
        number = aligned(self.state, value) or period(self.state, value, self.state.world.period).value
        assert isinstance(number, int)
        return number

    def _learn(self, one: Registration, root: Root) -> None:
        """What an update waits for is K."""
        kinds = kinds_of(self.state, one.function)
        updates = kinds & {Kind.STEP, Kind.ZERO, Kind.SCALER_UPDATE} and Kind.BACKWARD not in kinds
        if updates and root.kind in {"setting", "constant"}:
            self.state.world.knowledge.learn_accumulation(root)

    def _call(self, one: Registration) -> None:
        function = self.state.force(one.function)
        if isinstance(function, Thing) and function.actor.name == "LRScheduler":
            self._schedule(function, one.node)
        elif (own := handler_of(self.state, function)) is not None:
            if PER_ITERATION & one.filters.keys():  # what comes once an epoch waits for no window
                own.act(self.state, one.arguments, one.node)
        elif isinstance(function, Thing) or (isinstance(function, Opaque) and function.owner is None):
            return
        elif isinstance(function, Function):
            takes = parameters_of(function)
            arguments = one.arguments if len(takes) <= len(one.arguments) + len(one.keywords) else [self.engine.thing, *one.arguments]
            if function.node.args.vararg is None:
                arguments = arguments[: len(takes)]
            self.state.call_value(function, arguments, None, one.keywords)
        elif isinstance(function, (Method, Opaque)):
            self.state.call_value(function, one.arguments, _bare(one.node), one.keywords)
        else:
            self.state.call_value(function, [self.engine.thing, *one.arguments], None, one.keywords)

    def _schedule(self, wrapper: Thing, node: ast.AST) -> None:
        actor = actor_of(wrapper.inner)
        targets = (actor,) if actor is not None and actor.role is Role.SCHEDULER else ()
        options = actor.options if actor is not None else frozenset()
        self.state.recorder.emit(Kind.SCHEDULE, node, targets=targets, options=options)


def _bare(node: ast.AST) -> ast.Call:
    """A call at the place where a handler was added, without the arguments of the adding."""
    made = ast.Call(ast.Name("handler", ast.Load()), [], [])
    return ast.copy_location(made, node)
