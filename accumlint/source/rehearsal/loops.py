"""Loops: how many turns each gets, and the turns themselves."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.holding import used
from accumlint.source.rehearsal.iterate import MOST_TURNS, STOP, carries
from accumlint.source.rehearsal.names import COUNTER_NAMES
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import BREAK, Leave, Signal, State
from accumlint.source.rehearsal.unclear import goes_over, hang_on_turns
from accumlint.source.rehearsal.values import Function, Instance, Items, Known, Opaque, Plan, Root, Stream, Value
from accumlint.source.rehearsal.worlds import OUTER_TURNS
from accumlint.trace import Kind


class Loops(State):
    """Runs for and while loops."""

    __slots__ = ()

    def _exec_For(self, node: ast.For | ast.AsyncFor) -> Signal | None:
        source = self.force(self.eval(node.iter))
        entry = self.recorder.entries.get(node.lineno, 0)
        self.recorder.entries[node.lineno] = entry + 1
        generator, wrap = self._peel(source, node)
        if generator is not None:
            return self._consume(node, generator, wrap, entry)
        hang_on_turns(self, node, source)
        goes_over(self, source)
        bound = self._turns(node, source)
        self.prepares = not self.recorder.turns and not self._holds_events(node)
        plan = self.plan(source, node.iter, bound)
        self.prepares = False
        count = self._count(node, plan, source)
        if not self._holds_events(node):
            return self._abstract(node, plan, count, entry)
        signal = self._turn_all(node, plan, count, entry, source)
        if signal is not None and signal.kind in {"return", "raise"}:
            return signal
        if signal is not BREAK and node.orelse:
            return self.block(node.orelse)
        return None

    _exec_AsyncFor = _exec_For

    def _holds_events(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        return bool(self.index.kinds(node.body)) or self.index.holds(node, ast.Yield, ast.YieldFrom)

    def _turns(self, node: ast.For | ast.AsyncFor, source: Value) -> int | None:
        """How many turns a range of unknown length gets: K for the micro-loop, two for the loops around it."""
        if self._is_outer(node):
            return OUTER_TURNS
        kinds = self.index.kinds(node.body)
        if Kind.BACKWARD not in kinds:
            return None
        return self.world.batches if Kind.STEP in kinds else self.world.k

    def _learn_from_consumer(self, node: ast.For | ast.AsyncFor, root: Root | None) -> None:
        """A loop of a generator that yields batches is as long as the loop that takes them needs."""
        if root is not None and self.frame.yields is not None and root.kind in {"setting", "constant"}:
            self.yield_roots.append(root)
        if (
            root is None
            or not self.consumers
            or root.kind not in {"setting", "constant"}
            or not self.index.holds(node, ast.Yield, ast.YieldFrom)
        ):
            return
        consumer, knowledge = self.consumers[-1], self.world.knowledge
        kinds = self.index.kinds(consumer.body)
        if Kind.BACKWARD not in kinds or self._is_outer(consumer) or root.key in knowledge.accumulations:
            return
        if Kind.STEP not in kinds:
            knowledge.learn_accumulation(root)
        elif root.key not in knowledge.lengths and root.key not in knowledge.divisible:
            knowledge.learn_length(root)

    def _is_outer(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        """Whether the windows lie in a loop inside this one."""
        return self.index.has_inner_backward_loop(node) and not self.index.gates_outside_inner_loops(node)

    def _count(self, node: ast.For | ast.AsyncFor, plan: Plan, source: Value) -> int:
        kinds = self.index.kinds(node.body)
        inner = self._is_outer(node)
        knowledge = self.world.knowledge
        root = plan.root
        is_range = isinstance(source, Stream) and source.kind in {"range", "enumerate", "zip", "islice", "chunks"}
        if inner:
            return min(plan.count, OUTER_TURNS) if plan.open or plan.endless or root is not None else min(plan.count, 4)
        if (
            Kind.BACKWARD in kinds
            and Kind.STEP not in kinds
            and root is not None
            and (root.kind == "length" or isinstance(source, Items))
            and root.key not in knowledge.proven
            and not self._is_trial(node)
        ):
            knowledge.learn_accumulation(root)
        self._learn_from_consumer(node, root)
        if (
            Kind.BACKWARD in kinds
            and root is not None
            and is_range
            and root.kind in {"setting", "constant"}
            and root.key not in knowledge.proven
        ):
            if Kind.STEP in kinds:
                if self._means_window(node):
                    knowledge.learn_accumulation(root)
                elif root.key not in knowledge.lengths and root.key not in knowledge.divisible and root.key not in knowledge.accumulations:
                    knowledge.learn_length(root)
            elif not isinstance(node.iter, ast.Constant) and not self._is_trial(node):
                knowledge.learn_accumulation(root)
        if Kind.BACKWARD in kinds and plan.endless:
            return self.world.batches
        whole = self.index.once("literal periods", node, lambda _: _literal_periods(node)) if is_range and Kind.STEP in kinds else None
        if whole and root is not None and root.default is not None and root.default % whole == 0 and whole <= plan.count:
            return plan.count // whole * whole  # `for step in range(10)` with `step % 2`: there is no tail as it stands
        if Kind.BACKWARD not in kinds and (plan.open or plan.endless) and not self.index.holds(node, ast.Yield, ast.YieldFrom):
            return min(plan.count, 1 if not kinds else self.world.batches)
        return min(plan.count, MOST_TURNS)

    def _means_window(self, node: ast.For | ast.AsyncFor) -> bool:
        """`for _ in range(k): loss = … / k; …; step()` inside another loop: what is averaged over the turns was to be one update."""
        if (
            not self.recorder.turns
            or not isinstance(node.iter, ast.Call)
            or terminal(node.iter.func) != "range"
            or len(node.iter.args) != 1
        ):
            return False
        bound = node.iter.args[0]
        if not isinstance(bound, (ast.Name, ast.Attribute)) or isinstance(node.target, ast.Tuple):
            return False
        return self.index.once("averages over turns", node, lambda _: _averages_over(node.body, self.recorder.text(bound)))

    def _turn_all(self, node: ast.For | ast.AsyncFor, plan: Plan, count: int, entry: int, over: Value) -> Signal | None:
        endless = plan.endless or count < plan.count
        micro_loop = self._is_micro_loop(node, plan)
        if plan.root is not None and plan.root.key[0] in {"chunks", "strides"} and Kind.STEP not in self.index.kinds(node.body):
            self.pieces[node.lineno] = plan.root.text
        elif (
            isinstance(
                source := self.force(self.eval(node.iter)) if isinstance(node.iter, (ast.Name, ast.Attribute, ast.Subscript)) else None,
                Items,
            )
            and not source.open
        ) and (
            Kind.BACKWARD in self.index.kinds(node.body)
            and Kind.STEP not in self.index.kinds(node.body)
            and any(map(carries, source.items))
        ):
            self.pieces[node.lineno] = self.recorder.text(node.iter.value if isinstance(node.iter, ast.Subscript) else node.iter)
        dispatches = not plan.data and self.index.only_dispatches(node)
        parts, micro = self._goes_over_parts(node, plan), self._goes_backward(node)
        for at in range(count):
            turn = (
                self.recorder.turns[-1]
                if dispatches and self.recorder.turns
                else OpenTurn(node.lineno, at, entry, at == count - 1 and not endless, endless, source=over, parts=parts, micro=micro)
            )
            self.recorder.turns.append(turn)
            used(self, over, node.iter)
            try:
                if micro_loop:
                    self.recorder.new_data()
                self.assign(node.target, self._counted(node.target, plan.item(at), at))
                signal = self.block(node.body)
            finally:
                self.recorder.turns.pop()
            if signal is not None:
                if signal.kind == "break":
                    return BREAK
                if signal.kind in {"return", "raise"}:
                    return signal
        return None

    def _counted(self, target: ast.expr, item: Value, at: int) -> Value:
        """`for step, batch in progress`: an unknown iterable that gives a counter beside its data was enumerated."""
        if not isinstance(target, ast.Tuple) or len(target.elts) != 2 or terminal(target.elts[0]) not in COUNTER_NAMES:
            return item
        item = self.force(item)
        return Items([Known(at), item], "tuple") if isinstance(item, Opaque) and item.born else item

    def _is_trial(self, node: ast.For | ast.AsyncFor) -> bool:
        """Whether a loop clears the gradients of each turn and no step follows: it tries whether memory suffices, or warms up."""
        return Kind.ZERO in self.index.kinds(node.body) and Kind.STEP not in self.index.kinds(self.index.following(node))

    def _goes_over_parts(self, node: ast.For | ast.AsyncFor, plan: Plan) -> bool:
        """Whether each turn goes backward on a part of a batch: a piece, or what a stride cuts off; the step comes after all of them."""
        kinds = self.index.kinds(node.body)
        strided = isinstance(node.iter, ast.Call) and terminal(node.iter.func) == "range" and len(node.iter.args) == 3
        return Kind.BACKWARD in kinds and Kind.STEP not in kinds and (strided or node.lineno in self.pieces or self._is_counted(node, plan))

    def _is_counted(self, node: ast.For | ast.AsyncFor, plan: Plan) -> bool:
        """`for i in range(k)` over K, whose batches are perhaps the pieces of a list."""
        return isinstance(node.target, ast.Name) and plan.root is not None and plan.root.key in self.world.knowledge.accumulations

    def _is_micro_loop(self, node: ast.For | ast.AsyncFor, plan: Plan) -> bool:
        """Whether each turn is a micro-batch whatever data it takes; passes over one batch that use their number are not."""
        if plan.root is None or Kind.BACKWARD not in self.index.kinds(node.body):
            return False
        if plan.root.kind != "window" and plan.root.key not in self.world.knowledge.accumulations:
            return False
        if self.world.knowledge.is_accumulation_name(plan.root.text) or not isinstance(node.target, ast.Name):
            return True
        return not any(isinstance(part, ast.Name) and part.id == node.target.id for statement in node.body for part in walk(statement))

    def _abstract(self, node: ast.For | ast.AsyncFor, plan: Plan, count: int, entry: int) -> Signal | None:
        """A loop without events is run for its values; what it counts in an unknown number of turns is not known."""
        exact = not plan.open and not plan.endless and plan.count <= MOST_TURNS
        turns = plan.count if exact else min(plan.count, 2) if self._counts_windows(node, plan) else min(count, 1)
        for at in range(turns):
            self.recorder.turns.append(OpenTurn(node.lineno, at, entry, micro_batch=self.recorder.micro_batches))
            try:
                self.assign(node.target, plan.item(at))
                signal = self.block(node.body)
            finally:
                self.recorder.turns.pop()
            if signal is not None and signal.kind in {"return", "raise"}:
                return signal if exact else None
            if signal is BREAK:
                break
        if not exact:
            self._forget(node, plan)
        return None

    def _goes_backward(self, node: ast.For | ast.AsyncFor | ast.While) -> bool:
        """Whether each turn is a micro-batch, and not a window of some."""
        return Kind.BACKWARD in self.index.kinds(node.body) and not self.index.has_inner_backward_loop(node)

    def _counts_windows(self, node: ast.For | ast.AsyncFor, plan: Plan) -> bool:
        """Whether a loop outside of the micro-batches adds up what each of several data holds: a second turn makes it the window's."""
        if not plan.data or any(turn.micro for turn in self.recorder.turns):
            return False
        return self.index.once("adds up", node, lambda _: any(map(_adds_up, walk(node))))

    def _forget(self, node: ast.For | ast.AsyncFor, plan: Plan) -> None:
        """After a loop of unknown length: lists it filled are open, numbers it counted unknown."""
        for part in walk(node):
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in {"append", "extend"}:
                grown = self.force(self.eval(part.func.value))
                if isinstance(grown, Items):
                    grown.open = True
                    grown.data = True
                    root = plan.root or Root(("grown", node.lineno), "len", "length")
                    grown.length = Root(root.key, root.text, "length")
            elif isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name):
                current = self.frame.find(part.target.id)
                if isinstance(current, Known):
                    self.assign(part.target, self.opaque(("counted", part.target.id, part.lineno), part.target.id))

    # Generators of the source: the loop's body runs at each yield.
    def _peel(self, source: Value, node: ast.For | ast.AsyncFor) -> tuple[Stream | None, Callable[[int, Value], Value]]:
        source = self.force(source)
        if isinstance(source, Instance):
            method = source.cls.find("__iter__")
            if isinstance(method, Function) and self.index.is_generator(method.node):
                source = self.force(self.call_value(self.attribute(source, "__iter__", node.iter), []))
        if isinstance(source, Stream):
            if source.kind == "generator":
                return source, lambda at, value: value
            if source.kind == "enumerate":
                inner, wrap = self._peel(source.parts[0], node)
                start = self.number(source.start) if source.start is not None else Known(0)
                first = int(start.value) if start is not None else 0
                return inner, lambda at, value: Items([Known(first + at), wrap(at, value)], "tuple")
            if source.kind == "iterator" and source.taken == 0:
                return self._peel(source.parts[0], node)
            if source.kind == "zip" and source.parts:
                inner, wrap = self._peel(source.parts[0], node)
                if inner is not None:
                    others = [self.plan(part, node.iter) for part in source.parts[1:]]
                    return inner, lambda at, value: Items(
                        [wrap(at, value), *(plan.item(at % max(1, plan.count)) for plan in others)], "tuple"
                    )
        return None, lambda at, value: value

    def _consume(self, node: ast.For | ast.AsyncFor, generator: Stream, wrap: Callable[[int, Value], Value], entry: int) -> Signal | None:
        consumer = self.frame
        kinds = self.index.kinds(node.body)
        most = OUTER_TURNS if self._is_outer(node) else self.world.batches if Kind.BACKWARD in kinds else MOST_TURNS
        marker = object()
        at = 0
        finite, micro = not generator.endless, self._goes_backward(node)

        def body(value: Value) -> None:
            nonlocal at
            producer, inner = self.frame, self.consumers
            self.frame, self.consumers = consumer, []
            turn = OpenTurn(node.lineno, at, entry, last=finite and at == most - 1, endless=not finite, micro=micro)
            self.recorder.turns.append(turn)
            try:
                self.recorder.new_data()
                self.assign(node.target, wrap(at, value))
                at += 1
                signal = self.block(node.body)
            finally:
                self.recorder.turns.remove(turn)
                self.frame, self.consumers = producer, inner
            if signal is not None and signal.kind in {"break", "return", "raise"}:
                raise Leave(signal, marker)
            if at >= most:
                raise Leave(STOP, marker)

        assert generator.call is not None
        self.consumers.append(node)
        try:
            generator.call(body)
        except Leave as leave:
            self.frame = consumer
            if leave.owner is not marker:
                raise
            return leave.signal if leave.signal.kind in {"return", "raise"} else None
        finally:
            self.consumers.pop()
        return self.block(node.orelse) if node.orelse else None

    def _exec_While(self, node: ast.While) -> Signal | None:
        entry = self.recorder.entries.get(node.lineno, 0)
        self.recorder.entries[node.lineno] = entry + 1
        kinds = self.index.kinds(node.body)
        if self._is_outer(node):
            most = OUTER_TURNS
        elif Kind.BACKWARD in kinds:
            most = self.world.batches if Kind.STEP in kinds else self.world.k
        else:
            most = MOST_TURNS if self.index.holds(node, ast.Yield, ast.YieldFrom) else 2
        known_most = MOST_TURNS if Kind.BACKWARD in kinds else 64
        # `while batch is not None: yield batch` of a loader ends where the loop that takes its batches does.
        endless = isinstance(node.test, ast.Constant) or self.frame.yields is None or not self.index.holds(node, ast.Yield)
        at = 0
        while True:
            test = self.force(self.eval(node.test))
            known = isinstance(test, Known) and not isinstance(node.test, ast.Constant)
            if at == 0:
                self._learn_bound(test, kinds, node)
                hang_on_turns(self, node, test)
            if not self.truth(test, True, flips=False):
                break
            exact = known and not self._is_outer(node) and (bool(kinds) or not self._is_bound_by_data(test))
            if at >= (known_most if exact else most):
                return None
            self.recorder.turns.append(OpenTurn(node.lineno, at, entry, endless=endless, micro=self._goes_backward(node)))
            try:
                signal = self.block(node.body)
            finally:
                self.recorder.turns.pop()
            at += 1
            if signal is not None:
                if signal.kind == "break":
                    return None
                if signal.kind in {"return", "raise"}:
                    return signal
            if isinstance(test, Opaque):
                self.world.answers.pop(test.key, None)
        return self.block(node.orelse) if node.orelse else None

    def _is_bound_by_data(self, test: Value) -> bool:
        """`while at < len(tokens)`: the end is an open number that is not K."""
        gates = test.gates if isinstance(test, Known) else frozenset()
        return bool(gates) and not any(root.key in self.world.knowledge.accumulations for root in gates)

    def _learn_bound(self, test: Value, kinds: frozenset[Kind], node: ast.While) -> None:
        """`while n < total` with an open total: a length when the loop steps, K when it only goes backward."""
        if not isinstance(test, Known) or Kind.BACKWARD not in kinds or self._is_outer(node):
            return
        knowledge = self.world.knowledge
        for root in test.roots:
            if root.kind not in {"setting", "constant"} or root.key in knowledge.accumulations:
                continue
            if Kind.STEP not in kinds:
                knowledge.learn_accumulation(root)
            elif root.key not in knowledge.lengths and root.key not in knowledge.divisible:
                knowledge.learn_length(root)


def _adds_up(node: ast.AST) -> bool:
    """`n += …` and `n = n + …`."""
    if isinstance(node, ast.AugAssign):
        return True
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp) or not isinstance(node.value.op, ast.Add):
        return False
    return terminal(node.targets[0]) in {terminal(node.value.left), terminal(node.value.right)}


def _averages_over(statements: list[ast.stmt], text: str) -> bool:
    """Whether every turn goes backward on a loss that is divided by a number spelled like this, and steps."""
    calls = [part for statement in statements for part in walk(statement) if isinstance(part, ast.Call)]
    losses = [call.func.value for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "backward"]
    names = {part.id for loss in losses for part in walk(loss) if isinstance(part, ast.Name)}
    steps = any(
        isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and terminal(each.value.func) == "step" for each in statements
    )
    formed = [
        statement.value
        for statement in statements
        if isinstance(statement, ast.Assign) and any(isinstance(target, ast.Name) and target.id in names for target in statement.targets)
    ]
    again = (
        each for each in statements if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id in names
    )
    divided = [part for loss in (*losses, *formed) for part in walk(loss) if isinstance(part, ast.BinOp)]
    divisors = [part.right for part in divided if isinstance(part.op, ast.Div)]
    divisors += [each.value for each in again if isinstance(each.op, ast.Div)]
    return steps and any(ast.unparse(divisor) == text for divisor in divisors)


def _literal_periods(node: ast.For | ast.AsyncFor) -> int:
    """After how many turns all tests of the counter against a number in place are where they began; 0 where there are none."""
    counter = node.target.id if isinstance(node.target, ast.Name) else ""
    moduli = [
        part.right.value
        for statement in node.body
        for part in walk(statement)
        if isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Mod)
        and isinstance(part.right, ast.Constant)
        and type(part.right.value) is int
        and part.right.value > 1
        and any(isinstance(each, ast.Name) and each.id == counter for each in walk(part.left))
    ]
    return math.lcm(*moduli) if moduli else 0
