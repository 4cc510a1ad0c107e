"""Statements: what happens when a rehearsal comes to them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accumlint.source.reading.index import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.arithmetic import combine
from accumlint.source.rehearsal.state import BREAK, CONTINUE, Frame, Leave, Signal, State
from accumlint.source.rehearsal.values import (
    NONE,
    Class,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Mapping,
    Opaque,
    Phi,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.trace import Guard, Kind

PERSONAL = ("loss", "data", "memory", "clock", "rank")
LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


class Statements(State):
    """Runs statements."""

    def block(self, statements: Sequence[ast.stmt]) -> Signal | None:
        for at, statement in enumerate(statements):
            if self.relevance.idle(statement):
                continue
            signal = self.statement(statement, statements[at + 1 :])
            if signal is not None:
                return signal
            if isinstance(statement, ast.If) and _leaves(statement.body) == {"continue"} and not statement.orelse:
                return self._rest_of(statement, statements[at + 1 :])
        return None

    def _rest_of(self, node: ast.If, rest: Sequence[ast.stmt]) -> Signal | None:
        """What follows an early `continue` happens under its condition."""
        if not self.index.kinds(rest):
            return self.block(rest)
        with self.guarded(node, self.last_test, holds=False):
            return self.block(rest)

    @contextmanager
    def guarded(self, node: ast.If, test: Value, *, holds: bool) -> Iterator[None]:
        """Events in here happen under the condition; a flag stands for the test that it was computed by."""
        origin: ast.AST = node.test
        if isinstance(test, Known) and test.origin is not None and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
            origin = test.origin
        cause = self._cause(test)
        if cause == "counter" and self.index.has_modulo(origin):
            cause = "gate"  # `i % 4 == 3`: K in place
        self.recorder.guards.append(Guard(self.recorder.place(origin), self.recorder.text(origin), cause, holds))
        try:
            yield
        finally:
            self.recorder.guards.pop()

    def statement(self, node: ast.stmt, rest: Sequence[ast.stmt] = ()) -> Signal | None:
        self.tick()
        if isinstance(node, ast.If):
            return self.branch(node, rest)
        handler = getattr(self, f"_exec_{type(node).__name__}", None)
        if handler is None:
            return None
        result = handler(node)
        return result if isinstance(result, Signal) else None

    def _exec_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.eval(node.value)

    def _exec_Assign(self, node: ast.Assign) -> None:
        value = self.eval(node.value)
        self._sum_kept(node)
        for target in node.targets:
            if isinstance(value, Items) and isinstance(node.value, ast.Tuple) and isinstance(target, ast.Tuple) and len(target.elts) == len(node.value.elts):
                given = [self._named(one, its, item) for one, its, item in zip(target.elts, node.value.elts, value.items)]
                value = replace(value, items=given) if len(given) == len(value.items) else value
            self.assign(target, self._named(target, node.value, value))

    def _exec_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self._named(node.target, node.value, self.eval(node.value)))

    def _named(self, target: ast.expr, node: ast.expr, value: Value) -> Value:
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
        if name:
            self.christen(name, value)
        if name and isinstance(node, ast.Constant) and self.index.is_open_constant(name):
            return self.named_constant(name, node, value)
        if name and isinstance(value, Opaque) and not value.text:
            value.text = name
        return value

    def named_constant(self, name: str, node: ast.AST | None, value: Value) -> Value:
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value)
        elif isinstance(target, ast.Attribute):
            self._set_attribute(target, value)
        elif isinstance(target, ast.Subscript):
            self._set_item(target, value)

    def _bind(self, name: str, value: Value) -> None:
        frame = self.frame
        if name in frame.declared_global:
            frame = self.globals
        elif name in frame.declared_nonlocal and frame.parent is not None:
            outer = frame.parent
            while outer.parent is not None and name not in outer.names:
                outer = outer.parent
            frame = outer
        self.write(frame.names, name, value)

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        value = self.force(value)
        starred = next((at for at, one in enumerate(target.elts) if isinstance(one, ast.Starred)), None)
        if isinstance(value, Items) and starred is None and not value.open and len(value.items) == len(target.elts):
            for one, item in zip(target.elts, value.items):
                self.assign(one, item)
            return
        if isinstance(value, Items) and starred is not None and len(value.items) >= len(target.elts) - 1:
            after = len(target.elts) - starred - 1
            for one, item in zip(target.elts[:starred], value.items):
                self.assign(one, item)
            self.assign(target.elts[starred], Items(value.items[starred : len(value.items) - after]))
            for one, item in zip(target.elts[starred + 1 :], value.items[len(value.items) - after :]):
                self.assign(one, item)
            return
        for at, one in enumerate(target.elts):
            self.assign(one, self._part(value, at, one))

    def _part(self, value: Value, at: int, target: ast.expr) -> Value:
        """The part of an unknown tuple that a target takes; its name tells what nothing else does."""
        if isinstance(value, Opaque):
            text = target.id if isinstance(target, ast.Name) else f"{value.text}[{at}]"
            made = self.opaque(("part", value.key, at), text, value, attached=value.attached, owner=value, name=text)
            return made
        if isinstance(value, Items) and value.items:
            return value.items[min(at, len(value.items) - 1)]
        return self.opaque(("part", key_of(value), at), self.recorder.text(target))

    def _set_attribute(self, target: ast.Attribute, value: Value) -> None:
        owner = self.force(self.eval(target.value))
        if self.set_training_attribute(owner, target, value):
            return
        if isinstance(owner, (Instance, Thing, Opaque)):
            self.write(owner.attributes, target.attr, value)
        elif isinstance(owner, Class):
            self.write(owner.members, target.attr, value)
        elif isinstance(owner, Mapping):
            self.write(owner.items, target.attr, value)

    def set_training_attribute(self, owner: Value, target: ast.Attribute, value: Value) -> bool:
        """Assignments that are events: the sync flag, `.grad = …`. Returns whether it was one."""
        raise NotImplementedError

    def scale_gradient(self, target: ast.expr, op: type[ast.operator], value: Value, node: ast.AST) -> bool:
        """`p.grad /= n`: an event. Returns whether it was one."""
        raise NotImplementedError

    def _set_item(self, target: ast.Subscript, value: Value) -> None:
        owner = self.force(self.eval(target.value))
        key = self.force(self.eval(target.slice))
        if isinstance(owner, Mapping):
            self.write(owner.items, key.value if isinstance(key, Known) and _hashable(key.value) else ("?", key_of(key)), value)
        elif isinstance(owner, Items) and isinstance(key, Known) and isinstance(key.value, int) and -len(owner.items) <= key.value < len(owner.items):
            owner.items[key.value] = value
        elif isinstance(owner, (Opaque, Thing)) and isinstance(key, Known):
            self.write(owner.attributes, f"[{key.value!r}]", value)

    def _exec_AugAssign(self, node: ast.AugAssign) -> None:
        value = self.eval(node.value)
        if self.scale_gradient(node.target, type(node.op), value, node):
            return
        current = self.force(self.eval(self.index.once("loaded", node.target, lambda one: _loaded(node.target))))
        if isinstance(current, Items) and isinstance(value, Items) and isinstance(node.op, ast.Add):
            current.items.extend(value.items)
            return
        if isinstance(current, Opaque) and isinstance(node.op, ast.Add) and self._is_counter(current, value):
            current = Known(0)
        result = combine(self, type(node.op), current, value, node)
        self.retained_sum(node, current, value, result)
        self.assign(node.target, result)

    def _sum_kept(self, node: ast.Assign) -> None:
        """`total = total + loss` is `total += loss`."""
        target, value = node.targets[0], node.value
        if not (isinstance(target, ast.Name) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
            return
        if isinstance(value.left, ast.Name) and value.left.id == target.id:
            self.retained_sum(node, self.eval(value.left), self.eval(value.right), NONE)

    def retained_sum(self, node: ast.AST, current: Value, value: Value, result: Value) -> None:
        """A loss with its graph added to a running sum."""

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
        self._bind(node.name, self.function(node, None))

    _exec_AsyncFunctionDef = _exec_FunctionDef

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Class | None) -> Value:
        made = Function(node, self.frame, owner=owner, decorators=tuple(_decorator(one) for one in node.decorator_list))
        arguments = node.args
        named = arguments.posonlyargs + arguments.args
        for argument, default in zip(named[len(named) - len(arguments.defaults) :], arguments.defaults):
            made.defaults[argument.arg] = self.named_constant(argument.arg, default, self.eval(default))
        for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults):
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

    def _exec_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            path = alias.name if alias.asname else alias.name.split(".")[0]
            self._bind(name, self.opaque(("import", path), name, path=path, name=name))

    def _exec_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            path = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            self._bind(name, self.opaque(("import", path), name, path=path, name=alias.name))

    # Conditions.
    def branch(self, node: ast.If, rest: Sequence[ast.stmt]) -> Signal | None:
        if _is_main_guard(node.test):
            return self.block(node.body)
        test = self.force(self.eval(node.test))
        self._learn_gate(node, test, rest)
        self.last_test = test
        if isinstance(test, Opaque):
            return self._unknown_branch(node, test, rest)
        holds = self.truth(test)
        if holds and _leaves(node.body) == {"raise"} and isinstance(test, Known) and self._is_open_length(test, node.test):
            holds = False  # the run that trains does not end here
        return self._guarded(node, node.body if holds else node.orelse, test, holds)

    def _is_open_length(self, test: Known, node: ast.expr) -> bool:
        """Whether a test of what must not be is about the number of some things, as far as nobody knows it."""
        lengths = [root for root in test.roots if root.kind == "length"]
        if not lengths:
            return False
        if self.index.has_modulo(node):
            for root in lengths:
                self.world.knowledge.learn_divisible(root)
        return True

    def _learn_gate(self, node: ast.If, test: Value, rest: Sequence[ast.stmt]) -> None:
        """What an update is gated by is K."""
        gates = test.gates if isinstance(test, (Known, Opaque)) else frozenset()
        knowledge = self.world.knowledge
        wanted = [root for root in gates if root.key not in knowledge.proven and root.kind != "length" and root.key not in knowledge.lengths]
        if not wanted:
            return
        guarded = self.gates_update(node.body) or self.gates_update(node.orelse)
        early = any(isinstance(part, ast.Continue) for part in node.body) and self.gates_update(self.index.following(node))
        if not (guarded or early or self._collects(node)):
            return
        if any(root.key in knowledge.proven for root in gates):
            return
        moduli = [root for root in wanted if _is_modulus(node.test, root.text)] or wanted
        knowledge.learn_accumulation(moduli[0])

    def _collects(self, node: ast.If) -> bool:
        """`if len(buffer) == k: update(buffer)`, or `if len(buffer) < k: continue` before it."""
        if not self.index.counts_collected(node.test):
            return False
        kinds = self.index.kinds(node.body)
        if any(isinstance(part, ast.Continue) for part in node.body):
            kinds = self.index.kinds(self.index.following(node))
        return {Kind.BACKWARD, Kind.STEP} <= kinds

    def _guarded(self, node: ast.If, body: Sequence[ast.stmt], test: Value, holds: bool) -> Signal | None:
        if not body:
            return None
        if not self.index.kinds(node):
            return self.block(body)
        with self.guarded(node, test, holds=holds):
            return self.block(body)

    @staticmethod
    def _cause(test: Value) -> str:
        if isinstance(test, Known):
            return "gate" if test.gates or test.roots else "counter"
        if isinstance(test, Opaque):
            for cause in PERSONAL:
                if cause in test.causes:
                    return "data" if cause == "loss" else cause
            return "gate" if test.gates else "setting"
        return "unknown"

    def _guard_counts(self, test: ast.expr) -> None:
        """A count that was asked about is no longer divided by unseen."""
        for part in walk(test):
            if isinstance(part, ast.Name):
                value = self.frame.find(part.id)
                if isinstance(value, Opaque) and value.quantity is not None:
                    value.guarded = True
                    if value.weight is not None:
                        value.weight = replace(value.weight, factors=tuple(replace(factor, guarded=True) for factor in value.weight.factors))

    def _unknown_branch(self, node: ast.If, test: Opaque, rest: Sequence[ast.stmt]) -> Signal | None:
        if "data" in test.causes:
            self._guard_counts(node.test)
        if test.causes & set(PERSONAL) - {"rank"} or (test.causes and not self._answered(test)):
            return self._skip(node, test, rest)
        kinds, other = self.index.kinds(node.body), self.index.kinds(node.orelse)
        leaves, other_leaves = _leaves(node.body), _leaves(node.orelse)
        if self._asks_for_boundary(node, test):
            holds = (self.recorder.turns[-1].index + 1) % self.world.k == 0
        elif self._answered(test):
            holds = self.truth(test)
        elif leaves or other_leaves:
            prefers = not leaves if leaves != other_leaves else len(kinds) >= len(other)
            if kinds and not other and not leaves & {"raise"} and not (leaves & {"continue", "break"}):
                prefers = True
            returns = "return" in leaves | other_leaves and self.index.once("returns", node, lambda _: _returns_value(node))
            if "raise" not in leaves | other_leaves and leaves and Kind.BACKWARD in kinds:
                prefers = True
            if ("raise" in leaves) is not ("raise" in other_leaves):
                prefers = "raise" in other_leaves
            holds = self.truth(test, prefers, flips=bool(kinds or other) or returns, weight=len(kinds | other))
        elif kinds or other:
            holds = self.truth(test, len(kinds) >= len(other), weight=len(kinds | other))
        else:
            return self._both(node, test)
        return self._guarded(node, node.body if holds else node.orelse, test, holds)

    def _asks_for_boundary(self, node: ast.If, test: Opaque) -> bool:
        """`if every_n_iters(runner, k): step()`: a call nobody follows that is given K tells where the window ends."""
        if not self.recorder.turns or not self.gates_update(node.body) or node.orelse:
            return False
        roots = [root for root in self.world.knowledge.accumulations.values() if self.index.once("mentions " + root.text, node.test, lambda _: _calls_with(node.test, root.text))]
        test.gates |= frozenset(roots)
        return bool(roots)

    def _answered(self, test: Opaque) -> bool:
        if test.negated is not None:
            return self._answered(test.negated)
        if test.conjunction:
            return all(self._answered(part) for part in test.conjunction[1:] if isinstance(part, Opaque))
        return test.key in self.world.answers or test.key in self.world.forced

    def _skip(self, node: ast.If, test: Opaque, rest: Sequence[ast.stmt]) -> Signal | None:
        """A condition on data: the normal path is the one that trains; the other one is only noted."""
        kinds, other = self.index.kinds(node.body), self.index.kinds(node.orelse)
        leaves, other_leaves = _leaves(node.body), _leaves(node.orelse)
        rest = self.index.following(node)
        after = self.index.kinds(rest)
        if not (kinds or other) and not (leaves or other_leaves):
            return self._both(node, test)
        if bool(leaves) != bool(other_leaves):
            normal_holds = not leaves
        else:
            normal_holds = len(kinds) >= len(other)
        taken, left = (kinds, other) if normal_holds else (other, kinds)
        off = leaves if not normal_holds else other_leaves
        skipped = (taken - left) | (after if off else frozenset())
        if skipped or off:
            kept = node.body if normal_holds else node.orelse
            self.note_skip(node, test, skipped, sorted(off)[0] if off else "branch", node.orelse if normal_holds else node.body, [*kept, *(rest if off else ())])
        return self._guarded(node, node.body if normal_holds else node.orelse, test, normal_holds)

    def note_skip(self, node: ast.If, test: Opaque, skipped: frozenset[Kind], leaves: str, body: Sequence[ast.stmt], lost: Sequence[ast.stmt]) -> None:
        """Notes the way that does not train: `body` runs on it, `lost` is left out."""
        options = {"agreed"} if test.agreed else set()
        if Kind.ZERO in self.index.kinds(body):
            options.add("zeroes")
        if self.index.once("counted", node, lambda _: self._counts(lost) and not self._counts(body)):
            options.add("counted")
        if self.index.once("zero loss", node, lambda _: _multiplies_by_zero(body)):
            options.add("zero-loss")
        guard = Guard(self.recorder.place(node.test), self.recorder.text(node.test), self._cause(test), True)
        leaving = body[-1] if body and isinstance(body[-1], LEAVING) else node.test
        self.recorder.emit(Kind.SKIP, leaving, guard=guard, skipped=skipped, leaves=leaves, options=frozenset(options))

    def _counts(self, statements: Sequence[ast.stmt]) -> bool:
        """Whether statements advance a counter that something is compared with or divided by."""
        counters = {terminal(part.target) for each in statements for part in walk(each) if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Add)}
        return bool(counters & self.index.tested_names)

    def _both(self, node: ast.If, test: Opaque) -> Signal | None:
        """Neither side holds events: both are run, and what they set differently hangs on the condition."""
        outer = self.journal
        self.last_branch = node
        first = self._attempt(node.body)
        second = self._attempt(node.orelse)
        self.journal = outer
        self.last_branch = node
        if first[1] is not None and second[1] is not None:
            self._apply(first[0])
            return first[1]
        if first[1] is not None:
            self._apply(second[0])
            return None
        if second[1] is not None:
            self._apply(first[0])
            return None
        self._join(test, first[0], second[0])
        return None

    def _attempt(self, body: Sequence[ast.stmt]) -> tuple[dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]], Signal | None]:
        """Runs a block and takes its assignments back; returns them."""
        outer, self.journal = self.journal, []
        try:
            signal = self.block(body)
            changes: dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]] = {}
            for store, key, _ in self.journal:
                if key in store:
                    changes[(id(store), key)] = (store, key, store[key])
        finally:
            for store, key, old in reversed(self.journal):
                if old is None:
                    store.pop(key, None)
                else:
                    store[key] = old
            self.journal = outer
        return changes, signal

    def _apply(self, changes: dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]]) -> None:
        for store, key, value in changes.values():
            self.write(store, key, value)

    def _join(
        self,
        test: Opaque,
        first: dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]],
        second: dict[tuple[int, Any], tuple[dict[Any, Value], Any, Value]],
    ) -> None:
        for place in {**first, **second}:
            store, key, _ = first.get(place) or second[place]
            old = store.get(key)
            then = first[place][2] if place in first else old
            otherwise = second[place][2] if place in second else old
            if then is None or otherwise is None:
                self.write(store, key, then or otherwise or NONE)
            elif test.causes & set(PERSONAL) and self._is_variable(store) and self._is_loss(then) is not self._is_loss(otherwise) and key not in {"_"}:
                self._note_lost_graph(test, then, otherwise)
                self.write(store, key, then if self._is_loss(then) else otherwise)
            elif then is otherwise or _same(then, otherwise):
                self.write(store, key, then)
            else:
                self.write(store, key, Phi(test, then, otherwise))

    def _is_variable(self, store: dict[Any, Value]) -> bool:
        """Whether names are kept here: entries of a dict of losses or metrics are not what is backpropagated."""
        frame: Frame | None = self.frame
        while frame is not None:
            if frame.names is store:
                return True
            frame = frame.parent
        return False

    @staticmethod
    def _is_loss(value: Value) -> bool:
        return isinstance(value, Opaque) and bool(value.forwards) and value.weight is not None

    def _note_lost_graph(self, test: Opaque, then: Value, otherwise: Value) -> None:
        """On one side the loss has a graph, on the other it does not: there the backward reaches no parameter."""
        other = otherwise if self._is_loss(then) else then
        if isinstance(other, Opaque) and not other.forwards and self.last_branch is not None:
            node = self.last_branch
            guard = Guard(self.recorder.place(node.test), self.recorder.text(node.test), self._cause(test), True)
            options = frozenset({"agreed"}) if test.agreed else frozenset()
            self.recorder.emit(Kind.SKIP, node.test, guard=guard, skipped=frozenset({Kind.BACKWARD}), leaves="branch", options=options)

    # Blocks with a beginning and an end.
    def _exec_With(self, node: ast.With | ast.AsyncWith) -> Signal | None:
        return self._with_items(node, list(node.items))

    _exec_AsyncWith = _exec_With

    def _with_items(self, node: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> Signal | None:
        if not items:
            return self.block(node.body)
        first, rest = items[0], items[1:]
        value = self.force(self.eval(first.context_expr))
        if isinstance(value, Stream) and value.kind == "generator":
            return self._with_generator(node, first, rest, value)
        return self.within(value, first, lambda: self._with_items(node, rest))

    def within(self, value: Value, item: ast.withitem, body: Any) -> Signal | None:
        """Runs a with body inside a context."""
        raise NotImplementedError

    def _with_generator(self, node: ast.With | ast.AsyncWith, item: ast.withitem, rest: list[ast.withitem], value: Stream) -> Signal | None:
        """A context manager made of a generator: the body runs at its yield."""
        caller = self.frame
        marker = object()
        left: list[Signal | None] = [None]

        def body(yielded: Value) -> None:
            maker, outer = self.frame, self.managing
            self.frame = caller
            try:
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, yielded)
                self.managing = []
                left[0] = self._with_items(node, rest)
            finally:
                self.frame, self.managing = maker, outer

        assert value.call is not None
        self.managing.append(item.context_expr)
        try:
            value.call(body)
        except Leave as leave:
            if leave.owner is not marker:
                raise
        finally:
            self.managing.pop()
        return left[0]

    def _exec_Try(self, node: ast.Try) -> Signal | None:
        handlers = [handler for handler in node.handlers if self._swallows(handler)]
        kinds = self.index.kinds(node.body)
        # Around the step alone gradients are reduced already: what overflows there does so on every rank.
        if handlers and Kind.BACKWARD in kinds and (self.recorder.turns or not any(self.index.reaches_backward_in_loop(one) for one in node.body)):
            self._note_exception(handlers[0], kinds)
        try:
            signal = self.block(node.body)
        finally:
            if node.finalbody:
                self.block(node.finalbody)
        if signal is not None and signal.kind == "raise" and node.handlers:
            signal = self.block(node.handlers[0].body)
        elif signal is None and node.orelse:
            signal = self.block(node.orelse)
        return signal

    _exec_TryStar = _exec_Try

    def _swallows(self, handler: ast.ExceptHandler) -> bool:
        name = self.recorder.text(handler.type) if handler.type is not None else ""
        if any(word in name for word in ("Stop", "Interrupt", "Import", "Exhaust", "Empty", "EOF", "End", "Key", "Index", "Attribute", "Type", "File", "Name", "Overflow")):
            return False
        return not self.index.once("reraises", handler, lambda _: _reraises(handler))

    def _note_exception(self, handler: ast.ExceptHandler, kinds: frozenset[Kind]) -> None:
        raises = any(isinstance(part, ast.Raise) for part in handler.body)
        if raises:
            return
        text = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
        guard = Guard(self.recorder.place(handler), text, "exception", True)
        leaves = sorted(_leaves(handler.body))
        self.recorder.emit(Kind.SKIP, handler, guard=guard, skipped=kinds, leaves=leaves[0] if leaves else "except")

    def _exec_Match(self, node: ast.Match) -> Signal | None:
        subject = self.force(self.eval(node.subject))
        for case in node.cases:
            answer = self._matches(case, subject)
            if answer:
                return self.block(case.body)
        return None

    def _matches(self, case: ast.match_case, subject: Value) -> bool:
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            if pattern.name is not None:
                self._bind(pattern.name, subject)
            return case.guard is None or self.truth(self.eval(case.guard))
        if isinstance(pattern, ast.MatchValue):
            wanted = self.force(self.eval(pattern.value))
            if isinstance(wanted, Known) and isinstance(subject, Known):
                return bool(wanted.value == subject.value)
            test = self.opaque(("match", key_of(subject), key_of(wanted)), f"{getattr(subject, 'text', 'value')} == {self.recorder.text(pattern.value)}", subject)
            kinds = self.index.kinds(case.body)
            return self.truth(test, bool(kinds), flips=bool(kinds), weight=len(kinds))
        if isinstance(pattern, ast.MatchSingleton) and isinstance(subject, Known):
            return subject.value is pattern.value
        test = self.opaque(("match", key_of(subject), case.pattern.lineno), self.recorder.text(case.pattern), subject)
        return self.truth(test, True, flips=bool(self.index.kinds(case.body)))


def _leaves(body: Sequence[ast.stmt]) -> set[str]:
    """How a block leaves the path at its end, if every way through it does."""
    if not body:
        return set()
    last = body[-1]
    if isinstance(last, LEAVING):
        return {type(last).__name__.lower()}
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in {"sys.exit", "exit", "quit", "os._exit"}:
        return {"raise"}
    if isinstance(last, ast.If) and last.orelse:
        first, second = _leaves(last.body), _leaves(last.orelse)
        return first | second if first and second else set()
    return set()


def _multiplies_by_zero(body: Sequence[ast.stmt]) -> bool:
    products = [part for each in body for part in walk(each) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)]
    return any(isinstance(one, ast.Constant) and one.value == 0 for part in products for one in (part.left, part.right))


def _reraises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler always ends the run: what it raises only under a condition of its own does not count."""
    return any(
        isinstance(part, ast.Raise)
        or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and ast.unparse(part.value.func) in {"exit", "sys.exit", "os._exit"})
        for part in handler.body
    )


def _returns_value(node: ast.If) -> bool:
    return any(isinstance(part, ast.Return) and part.value is not None for part in walk(node))


def _loaded(target: ast.expr) -> ast.expr:
    """The same expression, read instead of written."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(target.id, ast.Load()), target)
    if isinstance(target, ast.Attribute):
        return ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target)
    if isinstance(target, ast.Subscript):
        return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)
    return target


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Known) and isinstance(second, Known):
        return type(first.value) is type(second.value) and bool(first.value == second.value)
    one, other = actor_of(first), actor_of(second)
    if one is not None and other is not None and one.role == other.role and isinstance(first, Thing) and isinstance(second, Thing):
        return one.wrapper == other.wrapper and first.inner is second.inner
    if isinstance(first, Context) and isinstance(second, Context):
        return first.kind == second.kind and first.models == second.models
    return isinstance(first, Opaque) and isinstance(second, Opaque) and first.key == second.key


def _decorator(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_enumeration(bases: Sequence[Value]) -> bool:
    """Whether a class lists the members of an enumeration: their numbers are names, never settings."""
    return any(isinstance(base, Opaque) and base.name.endswith(("Enum", "Flag")) for base in bases)


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"


def _calls_with(test: ast.expr, text: str) -> bool:
    """Whether a call in the test is given a number of that name."""
    name = text.rsplit(".", 1)[-1]
    calls = [part for part in ast.walk(test) if isinstance(part, ast.Call)]
    return any(terminal(part) == name for call in calls for given in (*call.args, *(one.value for one in call.keywords)) for part in ast.walk(given) if isinstance(part, (ast.Name, ast.Attribute)))


def _is_modulus(test: ast.expr, text: str) -> bool:
    return any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and text in ast.unparse(part.right) for part in walk(test))
