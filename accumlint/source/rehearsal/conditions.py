"""Conditions: which way a rehearsal goes, and what it notes of the way not taken."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.branches import LEAVING, seen
from accumlint.source.rehearsal.calls import SourceRaised
from accumlint.source.rehearsal.names import RANK_NAME
from accumlint.source.rehearsal.periods import clears_otherwise, is_modulus
from accumlint.source.rehearsal.skips import HANGS, returns_fresh
from accumlint.source.rehearsal.state import Frame, Signal, State
from accumlint.source.rehearsal.unclear import ask_of_sides, is_flag, may_be_agreed
from accumlint.source.rehearsal.values import (
    NONE,
    Context,
    Known,
    Opaque,
    Phi,
    Thing,
    Value,
    actor_of,
)
from accumlint.trace import Event, Guard, Kind

PERSONAL = ("loss", "data", "memory", "clock", "rank")
ABOUT_DATA = frozenset(PERSONAL) - {"rank"}


class Conditions(State):
    """Answers if statements."""

    __slots__ = ()

    def _rest_of(self, node: ast.If, rest: Sequence[ast.stmt]) -> Signal | None:
        """What follows an early `continue` happens under its condition."""
        if not self.index.kinds(rest) and not self.index.keeps_books(rest):
            return self.block(rest)
        with self.guarded(node, self.last_test, holds=False):
            return self.block(rest)

    @contextmanager
    def guarded(self, node: ast.If, test: Value, *, holds: bool) -> Iterator[None]:
        """Events in here happen under the condition."""
        self.recorder.guards.append(self._guard_of(node, test, holds))
        try:
            yield
        finally:
            self.recorder.guards.pop()

    def _guard_of(self, node: ast.If, test: Value, holds: bool) -> Guard:
        """A condition as events see it; a flag stands for the test that it was computed by."""
        origin: ast.AST = node.test
        if isinstance(test, Known) and test.origin is not None and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
            origin = test.origin
        cause = self._cause(test)
        if cause == "counter" and self.index.has_modulo(origin):
            cause = "gate"  # `i % 4 == 3`: K in place
        return Guard(self.recorder.place(origin), self.recorder.text(origin), cause, holds)

    def branch(self, node: ast.If) -> Signal | None:
        branch = seen(self.index, node)
        if branch.is_main:
            return self.block(node.body)
        asked = self.eval(node.test)
        test = self.force(asked)
        decides = asked.condition if isinstance(asked, Phi) else test
        if isinstance(decides, Opaque):
            self.asked[id(node)] = (self.frame.depth, decides)
        self._learn_gate(node, test)
        self.last_test = test
        known = self.sides.get(id(node))
        if known is None:
            known = self.sides[id(node)] = (node, set())
        sides = known[1]
        ask_of_sides(self, node, test)
        if isinstance(test, Opaque):
            sides.update((True, False))
            if branch.counts_down:
                return self._guarded(node, node.orelse, test, False)  # a run that is not resumed
            return self._unknown_branch(node, test)
        holds = self.truth(test)
        sides.update((True, False) if isinstance(test, Known) and (test.roots or test.gates) else (holds,))
        if holds and isinstance(test, Known) and branch.leaves == {"raise"} and self._is_open_length(test, node.test):
            holds = False  # the run that trains does not end here
        if holds and isinstance(test, Known) and branch.leaves == {"continue"} and self._skips_ahead(node, test):
            holds = False  # a run that is not resumed
        elif not holds and isinstance(test, Known) and self._gives_later(node, test):
            holds = True
        return self._guarded(node, node.body if holds else node.orelse, test, holds)

    def _skips_ahead(self, node: ast.If, test: Known) -> bool:
        """Whether a resumed run leaves out the batches before some number here: `if i < resume_step: continue`."""
        if test.roots & frozenset(self.world.knowledge.accumulations.values()) or not any(map(_is_below, walk(node.test))):
            return False
        after = self.index.following(node)
        trains = Kind.BACKWARD in self.index.kinds(after) or any(self.index.holds(each, ast.Yield) for each in after)
        return trains and Kind.BACKWARD not in self.index.kinds(node.body)

    def _gives_later(self, node: ast.If, test: Known) -> bool:
        """Whether a resumed run's loader gives batches from some number on: `if i >= passed_over: yield batch`."""
        if test.roots & frozenset(self.world.knowledge.accumulations.values()) or node.orelse or not self.index.holds(node, ast.Yield):
            return False
        compared = node.test
        return isinstance(compared, ast.Compare) and isinstance(compared.ops[0], (ast.Gt, ast.GtE)) and isinstance(compared.left, ast.Name)

    def _is_open_length(self, test: Known, node: ast.expr) -> bool:
        """Whether a test of what must not be is about the number of some things, as far as nobody knows it."""
        lengths = [root for root in test.roots if root.kind == "length"]
        if not lengths:
            return False
        if self.index.has_modulo(node):
            for root in lengths:
                self.world.knowledge.learn_divisible(root)
        return True

    def _learn_gate(self, node: ast.If, test: Value) -> None:
        """What an update is gated by is K."""
        gates = test.gates if isinstance(test, (Known, Opaque)) else frozenset()
        if not gates:
            return
        knowledge = self.world.knowledge
        wanted = [
            root for root in gates if root.key not in knowledge.proven and root.kind != "length" and root.key not in knowledge.lengths
        ]
        if not wanted:
            return
        guarded = self.gates_update(node.body) or self.gates_update(node.orelse)
        early = any(isinstance(part, ast.Continue) for part in node.body) and self.gates_update(self.index.following(node))
        if not (guarded or early or self._collects(node)) or clears_otherwise(self, node):
            return
        if any(root.key in knowledge.proven for root in gates):
            return
        moduli = [root for root in wanted if is_modulus(node.test, root.text)] or wanted
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
        if seen(self.index, node).quiet:
            return self.block(body)
        self.recorder.guards.append(self._guard_of(node, test, holds))
        try:
            return self.block(body)
        finally:
            self.recorder.guards.pop()

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
                        value.weight = replace(
                            value.weight, factors=tuple(replace(factor, guarded=True) for factor in value.weight.factors)
                        )

    def _unknown_branch(self, node: ast.If, test: Opaque) -> Signal | None:
        if "data" in test.causes:
            self._guard_counts(node.test)
        if test.causes & ABOUT_DATA or (test.causes and not self._answered(test)):
            return self._skip(node, test)
        branch = seen(self.index, node)
        kinds, other, leaves, other_leaves = branch.kinds, branch.other, branch.leaves, branch.other_leaves
        if self._asks_for_boundary(node, test):
            periods = [self.world.number(root) for root in test.gates if root.key in self.world.knowledge.accumulations]
            holds = (self.recorder.turns[-1].index + 1) % (periods[0] or self.world.k) == 0
        elif self._answered(test):
            holds = self.truth(test, flips=bool(kinds or other), weight=len(kinds | other))
        elif leaves or other_leaves:
            prefers = not leaves if leaves != other_leaves else len(kinds) >= len(other)
            if kinds and not other and not leaves & {"raise"} and not (leaves & {"continue", "break"}):
                prefers = True
            returns = "return" in leaves | other_leaves and self.index.once("returns", node, lambda _: _returns_value(node))
            if "raise" not in leaves | other_leaves and leaves and Kind.BACKWARD in kinds:
                prefers = True
            if leaves and Kind.BACKWARD in self.index.kinds(self.index.following(node)) - kinds - other:
                prefers = False  # `if only_evaluates: evaluate(); return`
            if leaves and kinds == {Kind.ZERO} and Kind.STEP in self.index.kinds(self.index.following(node)):
                prefers = False  # what throws gradients away is not what trains
            if ("raise" in leaves) is not ("raise" in other_leaves):
                prefers = "raise" in other_leaves
            holds = self.truth(test, prefers, flips=bool(kinds or other) or returns, weight=len(kinds | other))
        elif kinds or other:
            holds = self.truth(test, len(kinds) >= len(other), weight=len(kinds | other))
        elif branch.wraps_otherwise:
            holds = self.truth(test, False)
        elif branch.books:
            holds = self.truth(test, branch.own_books, flips=False)
        else:
            return self._both(node, test)
        return self._guarded(node, node.body if holds else node.orelse, test, holds)

    def _asks_for_boundary(self, node: ast.If, test: Opaque) -> bool:
        """`if every_n_iters(runner, k): step()`: a call nobody follows that is given K, or a count nobody follows modulo K."""
        if not self.recorder.turns or not self.gates_update(node.body) or node.orelse:
            return False
        remains = test.key[0] == "compare" and test.key[2][0] == "Mod"
        counted = test.gates if remains or self.index.has_modulo(node.test) else frozenset()
        known = self.world.knowledge.accumulations.values()
        handed = test.key[0] == "parameter"  # `def backward(self, loss, update): …; if update: step()`: whoever calls it knows
        roots = [root for root in known if handed or root in counted or self._mentions(node.test, root.text)]
        test.gates |= frozenset(roots)
        return bool(roots)

    def _mentions(self, test: ast.expr, text: str) -> bool:
        return self.index.once("mentions " + text, test, lambda _: _calls_with(test, text))

    def _answered(self, test: Opaque) -> bool:
        if test.negated is not None:
            return self._answered(test.negated)
        if test.conjunction:
            return all(self._answered(part) for part in test.conjunction[1:] if isinstance(part, Opaque))
        return test.key in self.world.answers or test.key in self.world.forced

    def _skip(self, node: ast.If, test: Opaque) -> Signal | None:
        """A condition on data: the normal path is the one that trains; the other one is only noted."""
        branch = seen(self.index, node)
        kinds, other, leaves, other_leaves = branch.kinds, branch.other, branch.leaves, branch.other_leaves
        rest = self.index.following(node)
        after = self.index.kinds(rest)
        if leaves == {"return"} and not (kinds or other) and self.index.once("returns fresh", node, lambda _: returns_fresh(node.body)):
            self._note_fresh_return(node, test)
        if not (kinds or other) and not (leaves or other_leaves):
            if not branch.books:
                return self._both(node, test)
            holds = branch.own_books
            return self._guarded(node, node.body if holds else node.orelse, test, holds)
        normal_holds = not leaves if bool(leaves) != bool(other_leaves) else len(kinds) >= len(other)
        discards = (kinds or other) == {Kind.ZERO} and not (leaves or other_leaves or (kinds and other))
        if discards:
            normal_holds = not kinds  # what throws gradients away is not what trains
        taken, left = (kinds, other) if normal_holds else (other, kinds)
        off = leaves if not normal_holds else other_leaves
        skipped = (taken - left) | (after if off else frozenset())
        kept, passed = (node.body, node.orelse) if normal_holds else (node.orelse, node.body)
        if not (skipped or off or discards):
            return self._guarded(node, kept, test, normal_holds)
        how = sorted(off)[0] if off else "branch"
        with self.recorder.passed_over(self.note_skip(node, test, skipped, how, passed, [*kept, *(rest if off else ())])):
            return self._guarded(node, kept, test, normal_holds)

    def _note_fresh_return(self, node: ast.If, test: Opaque) -> None:
        """`if not valid.any(): return torch.zeros((), requires_grad=True)`: a backward of that reaches no parameter."""
        guard = Guard(self.recorder.place(node.test), self.recorder.text(node.test), self._cause(test), True)
        options = frozenset({"agreed"} if test.agreed else ())
        skip = self.recorder.emit(Kind.SKIP, node.test, guard=guard, skipped=frozenset({Kind.BACKWARD}), leaves="branch", options=options)
        self.recorder.ends[skip.index] = skip.index + 1  # nothing, unless a backward goes through what is returned otherwise
        self.frame.hanging.append(skip.index)

    def note_skip(
        self, node: ast.If, test: Opaque, skipped: frozenset[Kind], leaves: str, body: Sequence[ast.stmt], lost: Sequence[ast.stmt]
    ) -> Event:
        """Notes the way that does not train: `body` runs on it, `lost` is left out."""
        options = {"agreed"} if test.agreed or may_be_agreed(self, test) else set()
        held = not skipped & {Kind.FORWARD, Kind.BACKWARD}  # only the update waits for it
        if self.index.once("deals out", node, lambda _: _deals_out(node.test)) or (held and is_flag(test)):
            options.add("agreed")
        if Kind.ZERO in self.index.kinds(body):
            options.add("zeroes")
        if self.index.once("counted", node, lambda _: advances(self.index, lost) and not advances(self.index, body)):
            options.add("counted")
        if self.index.once("presence", node, lambda _: is_presence(node.test, body, lost)):
            options.add("presence")
        if self.index.once("told to all", node, lambda _: tells_all(self.index.following(node))):
            options.add("told-to-all")
        if self.index.once("zero loss", node, lambda _: multiplies_by_zero(body)):
            options.add("zero-loss")
        guard = Guard(self.recorder.place(node.test), self.recorder.text(node.test), self._cause(test), True)
        leaving = body[-1] if body and isinstance(body[-1], LEAVING) else node.test
        if leaves == "return" and self.recorder.turns and self.index.ends_a_turn(node):
            leaves = "continue"
        return self.recorder.emit(Kind.SKIP, leaving, guard=guard, skipped=skipped, leaves=leaves, options=frozenset(options))

    def _both(self, node: ast.If, test: Opaque) -> Signal | None:
        """Neither side holds events: both are run, and what they set differently hangs on the condition."""
        outer = self.journal
        self.last_branch = node
        with self.supposing(test, True):
            first = self._attempt(node.body)
        with self.supposing(test, False):
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
            signal = self._block_that_may_raise(body)
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

    def _block_that_may_raise(self, body: Sequence[ast.stmt]) -> Signal | None:
        try:
            return self.block(body)
        except SourceRaised:  # in a function that it calls
            return Signal("raise")

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
            elif (
                test.causes & set(PERSONAL)
                and self._is_variable(store)
                and self._is_loss(then) is not self._is_loss(otherwise)
                and key not in {"_"}
            ):
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
            options = {"agreed"} if test.agreed else set()
            if multiplies_by_zero(node.body) or multiplies_by_zero(node.orelse):
                options.add("zero-loss")
            skipped = frozenset({Kind.BACKWARD})
            skip = self.recorder.emit(Kind.SKIP, node.test, guard=guard, skipped=skipped, leaves="branch", options=frozenset(options))
            self.recorder.ends[skip.index] = skip.index + 1  # nothing, unless a backward goes through this loss alone
            loss = then if self._is_loss(then) else otherwise
            assert isinstance(loss, Opaque)
            loss.causes |= {f"{HANGS}{skip.index}"}


def advances(index: Index, statements: Sequence[ast.stmt]) -> bool:
    """Whether statements advance a counter that something is compared with or divided by."""
    counters = {
        terminal(part.target)
        for each in statements
        for part in walk(each)
        if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Add)
    }
    return bool(counters & index.tested_names)


def _is_below(node: ast.AST) -> bool:
    """Whether a plain name is compared with an end that it has not reached."""
    if not isinstance(node, ast.Compare) or len(node.ops) != 1:
        return False
    below = isinstance(node.ops[0], (ast.Lt, ast.LtE)) and isinstance(node.left, ast.Name)
    return below or (isinstance(node.ops[0], (ast.Gt, ast.GtE)) and isinstance(node.comparators[0], ast.Name))


def _deals_out(test: ast.expr) -> bool:
    """Whether each rank takes its share of the batches by their numbers: `i % world_size == rank`."""
    for part in walk(test):
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], (ast.Eq, ast.NotEq)):
            for one, other in ((part.left, part.comparators[0]), (part.comparators[0], part.left)):
                if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod) and RANK_NAME.search(terminal(other)):
                    return True
    return False


def is_presence(test: ast.expr, *bodies: Sequence[ast.stmt]) -> bool:
    """Whether it is asked no more than whether there is the optimizer that a branch steps: `if optimizer: optimizer.step()`."""
    asked = test.left if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)) else test
    if not isinstance(asked, (ast.Name, ast.Attribute)):
        return False
    calls = (part.func for body in bodies for statement in body for part in walk(statement) if isinstance(part, ast.Call))
    return any(
        isinstance(function, ast.Attribute) and function.attr == "step" and ast.dump(function.value) == ast.dump(asked)
        for function in calls
    )


def tells_all(after: Sequence[ast.stmt]) -> bool:
    """Whether what one rank has computed is given to all ranks in the next statement: `dist.broadcast(value, src=0)`."""
    first = after[0] if after else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Call) and terminal(first.value.func).startswith("broadcast")


def multiplies_by_zero(body: Sequence[ast.stmt]) -> bool:
    products = [part for each in body for part in walk(each) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mult)]
    return any(isinstance(one, ast.Constant) and one.value == 0 for part in products for one in (part.left, part.right))


def _returns_value(node: ast.If) -> bool:
    return any(isinstance(part, ast.Return) and part.value is not None for part in walk(node))


def _same(first: Value, second: Value) -> bool:
    if isinstance(first, Known) and isinstance(second, Known):
        return type(first.value) is type(second.value) and bool(first.value == second.value)
    one, other = actor_of(first), actor_of(second)
    if one is not None and other is not None and one.role == other.role and isinstance(first, Thing) and isinstance(second, Thing):
        return one.wrapper == other.wrapper and first.inner is second.inner
    if isinstance(first, Context) and isinstance(second, Context):
        return first.kind == second.kind and first.models == second.models
    return isinstance(first, Opaque) and isinstance(second, Opaque) and first.key == second.key


def _calls_with(test: ast.expr, text: str) -> bool:
    """Whether a call in the test is given a number of that name."""
    name = text.rsplit(".", 1)[-1]
    calls = [part for part in walk(test) if isinstance(part, ast.Call)]
    return any(
        terminal(part) == name
        for call in calls
        for given in (*call.args, *(one.value for one in call.keywords))
        for part in walk(given)
        if isinstance(part, (ast.Name, ast.Attribute))
    )
