"""Comparisons and the logic of conditions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import every, walk
from accumlint.source.rehearsal.counts import GROWN, selects
from accumlint.source.rehearsal.lengths import note_bound
from accumlint.source.rehearsal.names import RANK_NAME
from accumlint.source.rehearsal.state import State
from accumlint.source.rehearsal.unclear import hang_on_calls
from accumlint.source.rehearsal.values import (
    NO_ROOTS,
    NONE,
    TRUE,
    Items,
    Known,
    Mapping,
    Opaque,
    Phi,
    Root,
    Value,
    actor_of,
    key_of,
)
from accumlint.weight import Quantity

COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}
PLAIN = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript)

FLIPPED: dict[type[ast.cmpop], tuple[str, bool]] = {
    ast.NotEq: ("==", True),
    ast.Eq: ("==", False),
    ast.GtE: ("<", True),
    ast.Lt: ("<", False),
    ast.Gt: (">", False),
    ast.LtE: (">", True),
}  # the comparison that each is, and whether it is that one's opposite


class Comparisons(State):
    """Compares values, and joins and inverts answers."""

    __slots__ = ()

    def _eval_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.force(self.eval(node.operand))
        if isinstance(node.op, ast.Not):
            if isinstance(value, (Opaque,)):
                return self.opaque(("not", value.key), f"not {value.text}", value, negated=value)
            answer = self.boolean(not self.truth(value), value)
            return (
                Known(answer.value, answer.roots, None, answer.gates, value.origin)
                if isinstance(value, Known) and value.origin is not None
                else answer
            )
        if isinstance(value, Known) and isinstance(value.value, (int, float)):
            return Known(
                -value.value if isinstance(node.op, ast.USub) else +value.value if isinstance(node.op, ast.UAdd) else ~int(value.value),
                value.roots,
            )
        if isinstance(value, Opaque):
            return self.opaque(
                ("unary", type(node.op).__name__, value.key),
                self.recorder.text(node),
                value,
                weight=value.weight,
                reduced=value.reduced,
                attached=value.attached,
                quantity=value.quantity,
                scaler=value.scaler,
            )
        return self._unknown(node)

    def _eval_BoolOp(self, node: ast.BoolOp) -> Value:
        conjunction = isinstance(node.op, ast.And)
        gates = NO_ROOTS
        roots = NO_ROOTS
        unknown: list[Value] = []
        last: Value = NONE
        for part in node.values:
            last = self.force(self.eval(part))
            if isinstance(last, Opaque):
                gates |= last.gates
                if not unknown:
                    hang_on_calls(self, node, last)
                unknown.append(last)
                continue
            if isinstance(last, Known):
                gates |= last.gates
                roots |= last.roots
            if self.truth(last) is not conjunction:
                return Known(last.value, roots, None, gates, node) if isinstance(last, Known) else last
        if not unknown:
            return Known(last.value, roots, None, gates, node) if isinstance(last, Known) and gates else last
        if len(unknown) == 1 and isinstance(unknown[0], Opaque):
            only = unknown[0]
            only.gates |= gates
            return only
        return self.opaque(
            ("and" if conjunction else "or", *self.key(*unknown)),
            self.recorder.text(node),
            *unknown,
            gates=gates,
            conjunction=(Known("and" if conjunction else "or"), *unknown),
        )

    def _eval_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) > 1 and all(isinstance(part, PLAIN) for part in node.comparators[:-1]):
            return self._eval_BoolOp(self.index.once("pairs", node, lambda _: _in_pairs(node)))
        left = self.eval(node.left)
        if left.__class__ is Phi:
            left = self.force(left)
        result: Value = TRUE
        for op, right_node in zip(node.ops, node.comparators, strict=False):
            right = self.eval(right_node)
            if right.__class__ is Phi:
                right = self.force(right)
            result = self._compare(op, left, right, node)
            if isinstance(result, Known) and not result.value:
                return result
            left = right
        return result

    def _a_number(self, value: Value, node: ast.Compare) -> Value:
        missing = isinstance(value, Known) and value.value is None
        return self.opaque(("open", id(node)), self.recorder.text(node)) if missing else value

    def _compare(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        if isinstance(op, ORDER):  # what Python compares with is no None: a default that a caller replaces
            left, right = (self._a_number(side, node) for side in (left, right))
        elif isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(right, Known) and right.value is None):
            return self._identity(op, left, right, node)
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._membership(op, left, right, node)
        counter = isinstance(left, Known) and isinstance(left.value, int)
        if isinstance(left, Known) and counter and isinstance(op, (ast.Eq, ast.GtE, ast.Gt)):
            note_bound(self, left, right)
        if isinstance(right, Opaque) and counter:
            right = self.number(right, role="bound") or right
        elif isinstance(left, Opaque) and isinstance(right, Known) and (right.roots or self._is_accumulation(left)):
            left = self.number(left, role="bound") or left
        if isinstance(left, Known) and isinstance(right, Known):
            return self._compare_known(op, left, right, node)
        if self._is_counter_behind(left, right, node):
            return self._compare_unknown(MIRRORED.get(type(op), type(op))(), right, left, node)
        if isinstance(left, Items) and isinstance(right, Items) and not (left.open or right.open) and len(left.items) != len(right.items):
            return self.boolean(isinstance(op, ast.NotEq))
        return self._compare_unknown(op, left, right, node)

    def _is_counter_behind(self, left: Value, right: Value, node: ast.Compare) -> bool:
        """Whether a setting is compared with a counter, `max_steps < step`, which says the same as `step > max_steps`."""
        counter = isinstance(right, Known) and type(right.value) is int and right.root is None
        return (
            counter
            and bool(self.recorder.turns)
            and isinstance(left, Opaque)
            and not (left.born or left.forwards or left.causes or left.quantity is not None)
            and not any(isinstance(part, ast.Constant) for part in (node.left, *node.comparators))
        )

    def _is_accumulation(self, value: Opaque) -> bool:
        knowledge = self.world.knowledge
        return value.key in knowledge.accumulations or knowledge.is_accumulation_name(value.text)

    def _compare_known(self, op: ast.cmpop, left: Known, right: Known, node: ast.Compare) -> Value:
        try:
            answer = bool(COMPARE[type(op)](left.value, right.value))
        except Exception:
            return self._unknown(node)
        gates = left.gates | right.gates
        moving = not any(isinstance(part, ast.Constant) for part in (node.left, *node.comparators))
        for side, other in ((left, right), (right, left)) if moving else ():
            # An upper bound (`step < total`) gates nothing; a test for arrival (`==`, `>=`) may be the boundary.
            if (
                side.root is not None
                and side.root.kind != "length"
                and other.root is None
                and isinstance(op, (ast.Eq, ast.NotEq, ast.GtE, ast.Gt, ast.Lt))
            ):
                gates |= {side.root}
        return Known(answer, left.roots | right.roots, None, gates, node)

    def _compare_unknown(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        grown = left.attributes.get(GROWN) if isinstance(left, Opaque) and isinstance(op, (ast.Gt, ast.GtE)) else None
        if isinstance(grown, Known) and self.index.once("fills up", node, self._fills_up):
            self.recorder.fact("windows-by-size", node)
            size = Root(key_of(right), self.recorder.text(node.comparators[0]), "length")
            return Known(grown.value >= self.world.k, gates=frozenset({size}))
        name, negative = FLIPPED[type(op)]
        gates = NO_ROOTS
        counter = isinstance(left, Known) and isinstance(left.value, int)
        if counter and isinstance(right, Opaque) and not right.born and not right.forwards:
            gates = frozenset({Root(right.key, right.text)})
            # The counter moves while the setting stays: one answer for the place, not one for each turn.
            key: tuple[Any, ...] = ("compare", name, node.lineno, right.key)
        else:
            key = ("compare", name, *self.key(left, right))
        text = self.recorder.text(node)
        if gates and any(RANK_NAME.search(terminal(part)) for part in (node.left, *node.comparators)):
            gates = NO_ROOTS  # which of the ranks this is: the counter passes it on some
        if gates and not any(isinstance(part, ast.Constant) for part in (node.left, *node.comparators)):
            # A counter against an unknown end: it has not arrived there yet.
            assert isinstance(left, Known)
            return Known(isinstance(op, (ast.Lt, ast.LtE, ast.NotEq)), left.roots, None, left.gates | gates, node)
        base = self.opaque(key, text, left, right)
        base.forwards = frozenset()  # a comparison has no graph
        if base.born or "data" in base.causes:
            base.causes |= selects(self, left, right, node.comparators[0])
        base.gates |= gates
        if isinstance(left, Opaque) and left.quantity is Quantity.INPUTS and isinstance(right, Known) and right.value == 0:
            base.agreed = False  # whether there is anything at all differs from rank to rank, unlike the size of a batch
        if not negative:
            return base
        return self.opaque(("not", key), text, base, negated=base, gates=base.gates)

    def _fills_up(self, node: ast.AST) -> bool:
        """Whether an update is made, and the number set back to zero, where it has reached some size."""
        branches = (
            one for one in every(self.index.tree, ast.If) if isinstance(one, ast.If) and any(part is node for part in walk(one.test))
        )
        for branch in branches:
            back = {terminal(one.targets[0]) for one in branch.body if isinstance(one, ast.Assign) and _is_zero(one.value)}
            if isinstance(node, ast.Compare) and terminal(node.left) in back and self.gates_update(branch.body):
                return True
        return False

    def _identity(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        positive = isinstance(op, (ast.Is, ast.Eq))
        if isinstance(right, Known) and isinstance(left, Known):
            return self.boolean((left.value == right.value) is positive)
        if isinstance(right, Known) and right.value is None:
            if isinstance(left, Opaque):
                if (
                    left.name == "grad"
                    or left.forwards
                    or left.born
                    or left.quantity is not None
                    or actor_of(left) is not None
                    or _is_moved(left)
                ):
                    return self.boolean(not positive)
                base = self.opaque(("none", left.key), f"{left.text} is None", left)
                return base if positive else self.opaque(("not", base.key), f"{left.text} is not None", left, negated=base)
            return self.boolean(not positive)
        if left is right:
            return self.boolean(positive)
        if isinstance(left, Opaque) or isinstance(right, Opaque):
            return self._compare_unknown(ast.Eq() if positive else ast.NotEq(), left, right, node)
        return self.boolean(not positive)

    def _membership(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        positive = isinstance(op, ast.In)
        if isinstance(left, Known):
            if isinstance(right, Mapping) and right.text == "":
                return self.boolean((left.value in right.items) is positive)
            if isinstance(right, Items) and not right.open and all(isinstance(one, Known) for one in right.items):
                return self.boolean(any(isinstance(one, Known) and one.value == left.value for one in right.items) is positive)
            if isinstance(right, Known) and isinstance(right.value, str) and isinstance(left.value, str):
                return self.boolean((left.value in right.value) is positive)
        wanted = key_of(right)
        known = self.world.constant(key_of(left)) if wanted[0] == "items" else None
        if known is not None:
            return self.boolean((known in wanted[1:]) is positive)
        base = self.opaque(("in", *self.key(left, right)), self.recorder.text(node), left, right)
        return base if positive else self.opaque(("not", base.key), base.text, base, negated=base)


def _is_zero(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


def _in_pairs(node: ast.Compare) -> ast.BoolOp:
    """`a < b < c` as `a < b and b < c`."""
    sides = [node.left, *node.comparators]
    pairs: list[ast.expr] = [
        ast.copy_location(ast.Compare(left, [op], [right]), node) for left, op, right in zip(sides, node.ops, sides[1:], strict=False)
    ]
    return ast.copy_location(ast.BoolOp(ast.And(), pairs), node)


def _is_moved(value: Opaque) -> bool:
    """Whether a value is the result of a tensor's own method (`x.cuda()`), which is never None."""
    return value.key[0] == "call" and value.name in {"cuda", "to", "cpu", "float", "long", "half", "contiguous", "pin_memory"}
