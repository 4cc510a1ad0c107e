"""What the vocabularies of frameworks share that run the loop themselves: turns of a loop that stands nowhere in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import Function, Instance, Known, Opaque, Partial, Value
from accumlint.trace import Guard, Kind

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine


def entered(state: Machine, line: int) -> int:
    """How often the loop of a line had been entered before."""
    entry = state.recorder.entries.get(line, 0)
    state.recorder.entries[line] = entry + 1
    return entry


@contextmanager
def turn(state: Machine, opened: OpenTurn) -> Iterator[OpenTurn]:
    """One turn of a loop."""
    state.recorder.turns.append(opened)
    try:
        yield opened
    finally:
        state.recorder.turns.remove(opened)


@contextmanager
def guarded(state: Machine, node: ast.AST, cause: str = "gate") -> Iterator[None]:
    """What happens in here happens because a condition of the framework holds, which the source gives at a node."""
    state.recorder.guards.append(Guard(state.recorder.place(node), state.recorder.text(node), cause))
    try:
        yield
    finally:
        state.recorder.guards.pop()


def kinds_of(state: Machine, value: Value | None) -> frozenset[Kind]:
    """The kinds of event that calling a value of the source can bring about."""
    value = state.force(value) if value is not None else None
    while isinstance(value, Partial):
        value = state.force(value.function)
    if isinstance(value, Function):
        return state.index.kinds(value.node)
    if isinstance(value, Instance):
        method = value.cls.find("__call__")
        return state.index.kinds(method.node) if isinstance(method, Function) else frozenset()
    return frozenset()


def name_helper(state: Machine, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, begun: int) -> None:
    """Where the loss was formed in a helper, the call of that helper in a framework's own method is where it can be mended."""
    losses = [event for event in state.recorder.events[begun:] if event.kind is Kind.LOSS]
    node = state.loss_calls.get(id(function))
    first, last = function.lineno, function.end_lineno or function.lineno
    if losses and node is not None and not first <= losses[-1].place.line <= last:
        state.recorder.emit(Kind.LOSS, node, weight=losses[-1].weight)


def parameters_of(function: Function) -> list[str]:
    """The names of a function's positional parameters, without `self`."""
    arguments = function.node.args
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    return names[1:] if function.bound is not None else names


def period(state: Machine, value: Value, default: int) -> Known:
    """The number that a period has here: the code's own, K's, or the one that stands for an unknown one."""
    number = state.number(value, role="modulus")
    return number if number is not None and isinstance(number.value, int) and number.value >= 1 else Known(default)


def is_open(value: Value) -> bool:
    """Whether nobody knows what a value is."""
    return isinstance(value, Opaque) and not value.path
