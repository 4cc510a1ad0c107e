"""Ignite's own handlers: what saves and what averages when an event of an engine comes."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import NONE, Known, Thing, Value, make_actor
from accumlint.source.vocabulary.base import receiver_of
from accumlint.source.vocabulary.bookkeeping import MOVING, OPTIMIZER_STATE, holds_optimizer
from accumlint.trace import Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

KEY = "ignite handler"


@dataclass(eq=False)
class Handler:
    """A handler, and what it does when its event comes: with what was given where it was added, placed there."""

    act: Callable[[Machine, list[Value], ast.AST], None]


def checkpoint(state: Machine, call: Call) -> Value | None:
    """`Checkpoint(to_save, save_handler)`, `ModelCheckpoint(dirname)`; the latter is told what to save where it is added."""
    if not call.path.startswith("ignite"):
        return None
    kept = call.argument(0, "to_save") if call.name == "Checkpoint" else None

    def save(machine: Machine, given: list[Value], node: ast.AST) -> None:
        saved = [kept] if kept is not None else given
        whole = any(holds_optimizer(machine, value) for value in saved)
        machine.recorder.emit(Kind.SAVE, node, options=frozenset({OPTIMIZER_STATE}) if whole else frozenset())

    return _made(state, call.name, save)


def average(state: Machine, call: Call) -> Value | None:
    """`EMAHandler(model, momentum)`: moves when the event comes that it is attached to."""
    if not call.path.startswith("ignite"):
        return None

    def move(machine: Machine, given: list[Value], node: ast.AST) -> None:
        machine.recorder.emit(Kind.AVERAGE, node, options=frozenset({MOVING}))

    return _made(state, call.name, move)


def _made(state: Machine, name: str, act: Callable[[Machine, list[Value], ast.AST], None]) -> Thing:
    made = Thing(make_actor(Role.OTHER, name))
    state.memory[(KEY, made.actor.uid)] = Handler(act)
    return made


def handler_of(state: Machine, value: Value | None) -> Handler | None:
    """What a value does as a handler, where it is one of Ignite's."""
    value = state.force(value) if value is not None else NONE
    found = state.memory.get((KEY, value.actor.uid)) if isinstance(value, Thing) else None
    return found if isinstance(found, Handler) else None


def attached(state: Machine, call: Call) -> tuple[Value, ast.expr, Value] | None:
    """`handler.attach(engine, …, event=…)`: the engine, the event and the handler."""
    owner = state.force(receiver_of(call) or NONE)
    engine = call.argument(0, "engine")
    if handler_of(state, owner) is None or engine is None:
        return None
    given = next((word.value for word in call.node.keywords if word.arg == "event"), None)
    default = ast.copy_location(ast.Attribute(ast.Name("Events", ast.Load()), "ITERATION_COMPLETED", ast.Load()), call.node)
    return engine, given if given is not None else default, owner


def aligned(state: Machine, value: Value) -> int | None:
    """A number of batches that stands in place and is a multiple of a K that the source gives: as many windows of the rehearsed K."""
    number = value.value if isinstance(value, Known) and value.root is None else None
    if not isinstance(number, int):
        return None
    for root in state.world.knowledge.accumulations.values():
        size, rehearsed = root.default, state.world.number(root)
        if size is not None and rehearsed and size > 1 and number % size == 0:
            return number // size * rehearsed
    return None
