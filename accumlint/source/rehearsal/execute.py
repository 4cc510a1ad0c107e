"""Statements: what happens when a rehearsal comes to them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from accumlint.source.reading.counting import counted_in_updates
from accumlint.source.reading.facts import terminal
from accumlint.source.rehearsal.arithmetic import combine
from accumlint.source.rehearsal.assign import Assignments
from accumlint.source.rehearsal.blocks import Blocks
from accumlint.source.rehearsal.branches import seen
from accumlint.source.rehearsal.conditions import Conditions
from accumlint.source.rehearsal.counts import run_on, since
from accumlint.source.rehearsal.state import BREAK, CONTINUE, Signal
from accumlint.source.rehearsal.values import (
    NONE,
    Class,
    Function,
    Instance,
    Items,
    Known,
    Opaque,
    Root,
    Value,
)
from accumlint.source.rehearsal.worlds import MOST_STEPS, OutOfSteps
from accumlint.trace import Kind

HANDLERS: dict[type[ast.stmt], Callable[[Any, Any], Signal | None]] = {}  # of the one interpreter there is


class Statements(Assignments, Conditions, Blocks):
    """Runs statements."""

    __slots__ = ()

    def block(self, statements: Sequence[ast.stmt]) -> Signal | None:
        known = self.relevance.known
        for at, statement in enumerate(statements):
            idle = known.get(id(statement))
            if idle or (idle is None and self.relevance.idle(statement)):
                continue
            signal = self.statement(statement)
            if signal is not None:
                return signal
            if statement.__class__ is ast.If and not statement.orelse and seen(self.index, statement).leaves == {"continue"}:
                return self._rest_of(statement, statements[at + 1 :])
        return None

    def statement(self, node: ast.stmt) -> Signal | None:
        self.steps = steps = self.steps + 1
        if steps > MOST_STEPS:
            raise OutOfSteps
        kind = node.__class__
        if kind is ast.If:
            assert isinstance(node, ast.If)
            return self.branch(node)
        handler = HANDLERS.get(kind)
        if handler is None:
            handler = HANDLERS[kind] = getattr(type(self), f"_exec_{kind.__name__}", _passed_over)
        return handler(self, node)

    def _exec_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.eval(node.value)

    def _exec_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        if node.value.__class__ is ast.BinOp:
            self._sum_kept(node, value)
        for target in node.targets:
            if target.__class__ is ast.Name:
                self._bind(target.id, self._named(target, node.value, value))
                continue
            if (
                isinstance(value, Items)
                and isinstance(node.value, ast.Tuple)
                and isinstance(target, ast.Tuple)
                and len(target.elts) == len(node.value.elts)
            ):
                given = [self._named(one, its, item) for one, its, item in zip(target.elts, node.value.elts, value.items, strict=False)]
                value = replace(value, items=given) if len(given) == len(value.items) else value
            self.assign(target, self._named(target, node.value, value))

    def _exec_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self._named(node.target, node.value, self.eval(node.value)))

    def _exec_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.eval(node.value)
        if self.scale_gradient(node.target, type(node.op), value, node):
            return
        current = self.force(self.eval(self.index.once("loaded", node.target, lambda one: _loaded(node.target))))
        if isinstance(current, Items) and isinstance(value, Items) and isinstance(node.op, ast.Add):
            current.items.extend(value.items)
            return
        counts = isinstance(current, Opaque) and isinstance(node.op, ast.Add) and not self._is_object(current, node.target)
        if counts and isinstance(current, Opaque) and self._is_counter(current, value):
            current = Known(0)
        result = combine(self, type(node.op), current, value, node)
        self.retained_sum(node, current, value, result)
        if since(result) is not None and self._is_seen_to_be_set(node.target):
            run_on(self, current, result, node)
        self.assign(node.target, result)
        taken = self.index.once("counters", self.index.tree, lambda _: counted_in_updates(self.index)).get(id(node))
        if taken is not None:
            self.recorder.emit(Kind.AVERAGE, node, options=frozenset({"counter", "moving"}), note=taken)

    def _is_seen_to_be_set(self, target: ast.expr) -> bool:
        """Whether all that sets a name or an attribute is run; a method of an unknown object may set it back."""
        if isinstance(target, ast.Attribute):
            return target.attr in self.relevance.needed and isinstance(self.force(self.eval(target.value)), Instance)
        return isinstance(target, ast.Name) and target.id in self.relevance.needed

    def _sum_kept(self, node: ast.Assign, result: Value) -> None:
        """`total = total + loss` is `total += loss`."""
        target, value = node.targets[0], node.value
        if not (isinstance(target, ast.Name) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
            return
        if isinstance(value.left, ast.Name) and value.left.id == target.id:
            current = self.eval(value.left)
            self.retained_sum(node, current, self._term_of(value.right, self.force(current), result), NONE)
            if self._is_seen_to_be_set(target):
                run_on(self, current, result, node)

    def _term_of(self, node: ast.expr, sum_before: Value, result: Value) -> Value:
        """What was added to a sum; a term with a call in it is not evaluated twice."""
        if not self.index.holds(node, ast.Call):
            return self.eval(node)
        if not isinstance(result, Opaque) or not isinstance(sum_before, Opaque):
            return NONE
        term = copy(result)
        term.forwards = result.forwards - sum_before.forwards
        return term

    def retained_sum(self, node: ast.AST, current: Value, value: Value, result: Value) -> None:
        """A loss with its graph added to a running sum."""

    def _is_object(self, current: Opaque, target: ast.expr) -> bool:
        """Whether what is added to is more than a number: an object that a call made and that has attributes."""
        key = current.key
        while key[0] == "Add" and isinstance(key[1], tuple):
            key = key[1]
        return key[0] == "call" and bool(self.index.usage.get(terminal(target)))

    def _is_counter(self, current: Opaque, value: Value) -> bool:
        """`step += 1` on a number that is not known (resumed, given): it starts at a boundary, so from zero."""
        value = self.force(value)
        return isinstance(value, Known) and isinstance(value.value, int) and not (current.forwards or current.born or current.weight)

    def _exec_Return(self, node: ast.Return) -> Signal:
        return Signal("return", self.eval(node.value) if node.value is not None else NONE)

    def _exec_Break(self, node: ast.Break) -> Signal:
        return BREAK

    def _exec_Continue(self, node: ast.Continue) -> Signal:
        return CONTINUE

    def _exec_Raise(self, node: ast.Raise) -> Signal:
        return Signal("raise", self.eval(node.exc) if node.exc is not None else None)

    def _exec_Delete(self, node: ast.Delete) -> None:
        return None

    def _exec_Global(self, node: ast.Global) -> None:
        self.frame.declared_global.update(node.names)

    def _exec_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.frame.declared_nonlocal.update(node.names)

    def _exec_Assert(self, node: ast.Assert) -> Signal | None:
        """What is asserted holds: a loader that K divides has no tail. A K asserted to be 1 ends every world with another."""
        for test in node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And) else [node.test]:
            if self._forbids(test):
                return Signal("raise")
            self._assume(test)
        return None

    def _forbids(self, test: ast.expr) -> bool:
        """Whether an assertion compares K itself with a number in place that it is not."""
        if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.comparators[0], ast.Constant)):
            return False
        number = self.number(self.eval(test.left))
        if number is None or number.root is None or number.root.key not in self.world.knowledge.accumulations:
            return False
        holds = self.force(self.eval(test))
        return isinstance(holds, Known) and not holds.value

    def _assume(self, test: ast.expr) -> None:
        if not (isinstance(test, ast.Compare) and isinstance(test.left, ast.BinOp) and isinstance(test.left.op, ast.Mod)):
            value = self.force(self.eval(test))
            if isinstance(value, Opaque):
                self.truth(value, True, flips=False)
            return
        if not isinstance(test.ops[0], ast.Eq):
            return
        size = self.force(self.eval(test.left.left))
        self.eval(test.left)
        root = size.root if isinstance(size, Known) else Root(size.key, size.text) if isinstance(size, Opaque) else None
        if root is None and isinstance(size, Known) and len(size.roots) == 1:
            (root,) = size.roots
        if root is not None and root.key not in self.world.knowledge.accumulations:
            self.world.knowledge.learn_divisible(root)

    def _exec_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        made = self.function(node, None)
        self._bind(node.name, made)
        if node.decorator_list and isinstance(made, Function):
            self._bind(node.name, self.decorated(node.decorator_list, made))

    _exec_AsyncFunctionDef = _exec_FunctionDef

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Class | None) -> Value:
        self.kept_frames.append(self.frame)
        made = Function(node, self.frame, owner=owner, decorators=tuple(_decorator(one) for one in node.decorator_list))
        arguments = node.args
        named = arguments.posonlyargs + arguments.args
        for argument, default in zip(named[len(named) - len(arguments.defaults) :], arguments.defaults, strict=False):
            made.defaults[argument.arg] = self.named_constant(argument.arg, default, self.eval(default))
        for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=False):
            if keyword_default is not None:
                made.defaults[argument.arg] = self.named_constant(argument.arg, keyword_default, self.eval(keyword_default))
        return made

    def _exec_ClassDef(self, node: ast.ClassDef) -> None:
        bases = tuple(self.force(self.eval(base)) for base in node.bases)
        made = Class(node, self.frame, bases, {})
        for statement in node.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                made.members[statement.name] = self.function(statement, made)
            elif isinstance(statement, ast.Assign):
                value = self.eval(statement.value)
                for target in statement.targets:
                    if isinstance(target, ast.Name) and _is_enumeration(bases):
                        made.members[target.id] = value if isinstance(value, Known) else Known(f"{node.name}.{target.id}")
                    elif isinstance(target, ast.Name):
                        made.members[target.id] = self.named_constant(target.id, statement.value, value)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None:
                made.members[statement.target.id] = self.named_constant(statement.target.id, statement.value, self.eval(statement.value))
        self._bind(node.name, made)

    # Conditions.

    # Blocks with a beginning and an end.


def _passed_over(machine: object, node: ast.stmt) -> None:
    """What is done in a statement that brings nothing about."""


def _loaded(target: ast.expr) -> ast.expr:
    """The same expression, read instead of written."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    if isinstance(target, ast.Subscript):
        return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target


def _decorator(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_enumeration(bases: Sequence[Value]) -> bool:
    """Whether a class lists the members of an enumeration: their numbers are names, never settings."""
    return any(isinstance(base, Opaque) and base.name.endswith(("Enum", "Flag")) for base in bases)
