"""Expressions: what they come to in a rehearsal."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from accumlint.source.rehearsal.arithmetic import combine, count
from accumlint.source.rehearsal.names import BUILTINS
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import Call, Frame, State
from accumlint.source.rehearsal.values import (
    FALSE,
    NO_ROOTS,
    NONE,
    TRUE,
    Builtin,
    Class,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Mapping,
    Method,
    Opaque,
    Phi,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.trace import Kind, Role
from accumlint.weight import Quantity

LARGEST_NUMBER = 10**9
BATCH_COUNTS = frozenset({"num_batches", "n_batches", "num_batches_per_epoch", "batches_per_epoch"})  # of a loader: its length

ABOUT_TENSOR = frozenset({"requires_grad", "is_cuda", "is_leaf", "is_sparse", "dtype", "device", "ndim", "layout"})  # the same on every rank

COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Expressions(State):
    """Evaluates expressions."""

    def eval(self, node: ast.expr) -> Value:
        self.tick()
        handler = getattr(self, f"_eval_{type(node).__name__}", None)
        return self._unknown(node) if handler is None else handler(node)

    def _unknown(self, node: ast.AST) -> Value:
        return self.opaque(("node", id(node)), self.recorder.text(node))

    def _eval_Constant(self, node: ast.Constant) -> Value:
        value = node.value
        if value is None:
            return NONE
        if value is True:
            return TRUE
        if value is False:
            return FALSE
        return Known(value)

    def _eval_Name(self, node: ast.Name) -> Value:
        found = self.frame.find(node.id)
        if found is not None:
            return found
        if node.id in BUILTINS:
            return Builtin(node.id)
        made = self.opaque(("name", node.id), node.id, name=node.id)
        self.globals.names[node.id] = made
        return made

    def _eval_Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.eval(node.value), node.attr, node)

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        value = self.force(value)
        if isinstance(value, Instance):
            return self._instance_attribute(value, name, node)
        if isinstance(value, Class):
            found = value.find(name)
            return found if found is not None else self.opaque((".", ("object", value.uid), name), f"{value.node.name}.{name}", name=name)
        if isinstance(value, Mapping):
            found = value.items.get(name)
            if found is not None:
                return found
            if name in {"get", "items", "keys", "values", "pop", "setdefault", "update", "copy"}:
                return Method(value, name)
            made = self.opaque((".", value.key, name), f"{value.text}.{name}", name=name)
            value.items[name] = made
            return made
        if isinstance(value, Thing):
            return self._thing_attribute(value, name)
        if isinstance(value, Opaque):
            return self.opaque_attribute(value, name)
        return Method(value, name)

    def opaque_attribute(self, value: Opaque, name: str) -> Value:
        known = value.attributes.get(name)
        if known is not None:
            return known
        if name == "requires_grad" and value.forwards and value.attached:
            return TRUE
        text = f"{value.text}.{name}" if value.text else name
        if name in BATCH_COUNTS and "loader" in value.text.lower():
            root = Root(("len", value.key), text, "length")
            length = self.world.number(root)
            if length is not None:
                return Known(length, frozenset({root}), root)
        made = self.opaque((".", value.key, name), text, value, name=name, owner=value)
        made.path = f"{value.path}.{name}" if value.path else ""
        if value.weight is not None and name in {"data", "T"}:
            made.weight, made.reduced = value.weight, value.reduced
        if name == "grad" or value.name == "grad":
            made.name = "grad"
        elif name == "shape":
            made.forwards, made.born = frozenset(), frozenset()
        elif name in ABOUT_TENSOR:
            made.forwards, made.born, made.causes = frozenset(), frozenset(), frozenset()
        value.attributes[name] = made
        return made

    def _thing_attribute(self, thing: Thing, name: str) -> Value:
        known = thing.attributes.get(name)
        if known is not None:
            return known
        if name in {"module", "_orig_mod"} and thing.inner is not None:
            return thing.inner
        if name == "require_backward_grad_sync":
            return thing.sync
        made = self.opaque((".", ("object", thing.actor.uid), name), f"{thing.actor.name}.{name}", name=name, owner=thing)
        thing.attributes[name] = made
        return made

    def _instance_attribute(self, instance: Instance, name: str, node: ast.AST) -> Value:
        known = instance.attributes.get(name)
        if known is not None:
            return known
        found = instance.cls.find(name)
        if isinstance(found, Function):
            if "property" in found.decorators or "cached_property" in found.decorators:
                return self.call_value(bind(found, instance), [])
            if "staticmethod" in found.decorators:
                return found
            return bind(found, instance.cls if "classmethod" in found.decorators else instance)
        if found is not None:
            return found
        made = self.opaque((".", ("object", instance.uid), name), f"self.{name}", name=name, owner=instance)
        if instance.actor is None or instance.actor.role is not Role.MODEL:
            instance.attributes[name] = made
        else:
            instance.attributes.setdefault(name, made)
        return made

    def _eval_Subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.eval(node.value), self.eval(node.slice), node)

    def _eval_Slice(self, node: ast.Slice) -> Value:
        parts = [self.eval(part) if part is not None else NONE for part in (node.lower, node.upper, node.step)]
        if all(isinstance(part, Known) for part in parts):
            values = [part.value for part in parts if isinstance(part, Known)]
            if all(value is None or isinstance(value, int) for value in values):
                return Known(slice(*values), frozenset().union(*(part.roots for part in parts if isinstance(part, Known))))
        return self.opaque(("slice", *self.key(*parts)), self.recorder.text(node), *parts)

    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        value, key = self.force(value), self.force(key)
        if isinstance(value, Items):
            return self._items_item(value, key, node)
        if isinstance(value, Mapping):
            return self._mapping_item(value, key, node)
        if isinstance(value, Known) and isinstance(key, Known):
            try:
                return Known(value.value[key.value])
            except Exception:
                return self._unknown(node)
        if isinstance(value, Opaque):
            return self._opaque_item(value, key, node)
        if isinstance(value, Thing):
            return self.attribute(value, str(key.value), node) if isinstance(key, Known) else self._unknown(node)
        if isinstance(value, Stream) and value.kind == "chunks":
            label = ("chunk", value.uid, key_of(key))
            return self.opaque(label, self.recorder.text(node), born=self.take(node, label), causes=frozenset({"data"}))
        return self.opaque(("[]", key_of(value), key_of(key)), self.recorder.text(node), key)

    def _items_item(self, value: Items, key: Value, node: ast.AST) -> Value:
        if isinstance(key, Known) and isinstance(key.value, (int, slice)) and not isinstance(key.value, bool):
            if value.open and value.items:
                if isinstance(key.value, slice):
                    return Items(list(value.items), value.kind, open=True, length=None, data=value.data)
                sample = value.items[0]
                return self.again(sample, node, ("item", value.uid, key.value))
            try:
                got = value.items[key.value]
            except (IndexError, ValueError, TypeError):
                return self._unknown(node)
            return Items(got, value.kind) if isinstance(got, list) else got
        if value.items:
            return self.again(value.items[0], node, ("item", value.uid, key_of(key)))
        return self._unknown(node)

    def again(self, sample: Value, node: ast.AST, key: tuple[Any, ...]) -> Value:
        """One more item of an open list of batches: like the sample, but new data."""
        if isinstance(sample, Opaque) and (sample.born or not sample.actor):
            return self.opaque(key, sample.text, born=self.take(node, key), causes=sample.causes | {"data"})
        if isinstance(sample, Items):
            return Items([self.again(part, node, (*key, at)) for at, part in enumerate(sample.items)], sample.kind)
        return sample

    def _mapping_item(self, value: Mapping, key: Value, node: ast.AST) -> Value:
        name = key.value if isinstance(key, Known) else ("?", key_of(key))
        try:
            found = value.items.get(name)
        except TypeError:
            return self._unknown(node)
        if found is None:
            samples = list(value.items.values())
            if samples and value.text == "" and not isinstance(key, Known):
                return samples[0]
            found = self.opaque(("[]", value.key, name), f"{value.text}[{name!r}]", name=str(name))
            value.items[name] = found
        return found

    def _opaque_item(self, value: Opaque, key: Value, node: ast.AST) -> Value:
        if value.name == "shape":
            made = count(self, Quantity.INPUTS, ("[]", value.key, key_of(key)), node, value)
            made.agreed = made.agreed or (isinstance(key, Known) and key.value == 0)
            return made
        label = key.value if isinstance(key, Known) else None
        if isinstance(label, str) or (isinstance(label, int) and not isinstance(label, bool) and not value.born):
            known = value.attributes.get(f"[{label!r}]")
            if known is None:
                known = self.opaque(("[]", value.key, repr(label)), f"{value.text}[{label!r}]", value, name=str(label), owner=value)
                value.attributes[f"[{label!r}]"] = known
            return known
        made = self.opaque(("[]", value.key, key_of(key)), self.recorder.text(node), value, key, weight=value.weight, reduced=False)
        made.agreed = made.agreed or (value.key[0] == "size" and isinstance(key, Known) and key.value == 0)
        if self.recorder.turns and not value.forwards and value.quantity is None and not self.fixed(key):
            made.born = self.take(node, made.key)
            made.causes |= {"data"}
        return made

    @staticmethod
    def fixed(key: Value) -> bool:
        """Whether an index is a constant in place, so that it takes no new data turn after turn."""
        if isinstance(key, Items):
            return all(Expressions.fixed(part) for part in key.items)
        return isinstance(key, Known) and not key.roots and (not isinstance(key.value, slice) or key.value.start in {None, 0, 1, -1} or key.value.stop is None)

    def take(self, node: ast.AST, key: tuple[Any, ...] | None = None) -> frozenset[int]:
        raise NotImplementedError

    def _eval_Tuple(self, node: ast.Tuple) -> Value:
        return self._sequence(node.elts, "tuple")

    def _eval_List(self, node: ast.List) -> Value:
        return self._sequence(node.elts, "list")

    def _eval_Set(self, node: ast.Set) -> Value:
        return self._sequence(node.elts, "set")

    def _sequence(self, elements: list[ast.expr], kind: str) -> Value:
        items: list[Value] = []
        opened = False
        for element in elements:
            if isinstance(element, ast.Starred):
                inner = self.force(self.eval(element.value))
                if isinstance(inner, Items):
                    items.extend(inner.items)
                    opened = opened or inner.open
                else:
                    items.append(inner)
                    opened = True
            else:
                items.append(self.eval(element))
        return Items(items, kind, open=opened and kind == "list")

    def _eval_Dict(self, node: ast.Dict) -> Value:
        made = Mapping({}, ("dict", id(node)), "")
        for key, value in zip(node.keys, node.values):
            got = self.eval(value)
            if key is None:
                inner = self.force(got)
                if isinstance(inner, Mapping):
                    made.items.update(inner.items)
                continue
            name = self.force(self.eval(key))
            if isinstance(name, Known):
                made.items[name.value] = self.named_constant(str(name.value), value, got)
            else:
                made.items[("?", key_of(name))] = got
        return made

    def named_constant(self, name: str, node: ast.AST | None, value: Value) -> Value:
        """A plain number that gets a name stays open: it may turn out to be K."""
        if isinstance(node, (ast.List, ast.Tuple)) and isinstance(value, Items) and len(value.items) == 1 and self.world.knowledge.is_accumulation_name(name):
            return Items([self.named_constant(name, node.elts[0], value.items[0])], value.kind)  # a schedule of one K
        if isinstance(node, ast.Constant) and isinstance(value, Known) and type(value.value) is int and value.value >= 1 and value.root is None:
            return self.rooted(value.value, Root(("constant", name, node.lineno), name, "constant", value.value))
        return value

    def _eval_BinOp(self, node: ast.BinOp) -> Value:
        return combine(self, type(node.op), self.eval(node.left), self.eval(node.right), node)

    def _eval_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.force(self.eval(node.operand))
        if isinstance(node.op, ast.Not):
            if isinstance(value, (Opaque,)):
                return self.opaque(("not", value.key), f"not {value.text}", value, negated=value)
            answer = self.boolean(not self.truth(value), value)
            return Known(answer.value, answer.roots, None, answer.gates, value.origin) if isinstance(value, Known) and value.origin is not None else answer
        if isinstance(value, Known) and isinstance(value.value, (int, float)):
            return Known(-value.value if isinstance(node.op, ast.USub) else +value.value if isinstance(node.op, ast.UAdd) else ~int(value.value), value.roots)
        if isinstance(value, Opaque):
            return self.opaque(
                ("unary", type(node.op).__name__, value.key), self.recorder.text(node), value, weight=value.weight, reduced=value.reduced,
                attached=value.attached, quantity=value.quantity, scaler=value.scaler,
            )  # fmt: skip
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
            ("and" if conjunction else "or", *self.key(*unknown)), self.recorder.text(node), *unknown, gates=gates,
            conjunction=(Known("and" if conjunction else "or"), *unknown),
        )  # fmt: skip

    def _eval_Compare(self, node: ast.Compare) -> Value:
        left = self.force(self.eval(node.left))
        result: Value = TRUE
        for op, right_node in zip(node.ops, node.comparators):
            right = self.force(self.eval(right_node))
            result = self._compare(op, left, right, node)
            if isinstance(result, Known) and not result.value:
                return result
            left = right
        return result

    def _compare(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        if isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(right, Known) and right.value is None):
            return self._identity(op, left, right, node)
        if isinstance(op, (ast.In, ast.NotIn)):
            return self._membership(op, left, right, node)
        counter = isinstance(left, Known) and isinstance(left.value, int)
        if isinstance(right, Opaque) and counter:
            right = self.number(right, role="bound") or right
        elif isinstance(left, Opaque) and isinstance(right, Known) and right.roots:
            left = self.number(left, role="bound") or left
        elif isinstance(left, Opaque) and isinstance(right, Known) and self._is_accumulation(left):
            left = self.number(left, role="bound") or left
        if isinstance(left, Known) and isinstance(right, Known):
            return self._compare_known(op, left, right, node)
        if isinstance(left, Items) and isinstance(right, Items) and not left.open and not right.open:
            if len(left.items) != len(right.items):
                return self.boolean(isinstance(op, ast.NotEq))
        return self._compare_unknown(op, left, right, node)

    def _is_accumulation(self, value: Opaque) -> bool:
        return self.world.knowledge.is_accumulation_name(value.text)

    def _compare_known(self, op: ast.cmpop, left: Known, right: Known, node: ast.Compare) -> Value:
        try:
            answer = bool(COMPARE[type(op)](left.value, right.value))
        except Exception:
            return self._unknown(node)
        gates = left.gates | right.gates
        moving = not any(isinstance(part, ast.Constant) for part in (node.left, *node.comparators))
        for side, other in ((left, right), (right, left)) if moving else ():
            # An upper bound (`step < total`) gates nothing; a test for arrival (`==`, `>=`) may be the boundary.
            if side.root is not None and side.root.kind != "length" and other.root is None and isinstance(op, (ast.Eq, ast.NotEq, ast.GtE, ast.Gt, ast.Lt)):
                gates |= {side.root}
        return Known(answer, left.roots | right.roots, None, gates, node)

    def _compare_unknown(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        flipped = {ast.NotEq: ("==", True), ast.Eq: ("==", False), ast.GtE: ("<", True), ast.Lt: ("<", False), ast.Gt: (">", False), ast.LtE: (">", True)}
        name, negative = flipped[type(op)]
        gates = NO_ROOTS
        counter = isinstance(left, Known) and isinstance(left.value, int)
        if counter and isinstance(right, Opaque) and not right.born and not right.forwards:
            gates = frozenset({Root(right.key, right.text)})
            # The counter moves while the setting stays: one answer for the place, not one for each turn.
            key: tuple[Any, ...] = ("compare", name, node.lineno, right.key)
        else:
            key = ("compare", name, *self.key(left, right))
        text = self.recorder.text(node)
        if gates and not any(isinstance(part, ast.Constant) for part in (node.left, *node.comparators)):
            # A counter against an unknown end: it has not arrived there yet.
            assert isinstance(left, Known)
            return Known(isinstance(op, (ast.Lt, ast.LtE, ast.NotEq)), left.roots, None, left.gates | gates, node)
        base = self.opaque(key, text, left, right)
        if base.born or "data" in base.causes:
            base.causes |= self._selects(left, right)
        base.gates |= gates
        if isinstance(left, Opaque) and left.quantity is Quantity.INPUTS and isinstance(right, Known) and right.value == 0:
            base.agreed = False  # whether there is anything at all differs from rank to rank, unlike the size of a batch
        if not negative:
            return base
        return self.opaque(("not", key), text, base, negated=base, gates=base.gates)

    @staticmethod
    def _selects(left: Value, right: Value) -> frozenset[str]:
        """A comparison of data selects some of it: a different number each time, and perhaps none."""
        positions = any(isinstance(side, Opaque) and "positions" in side.causes for side in (left, right))
        constant = isinstance(right, Known) and positions
        if constant:
            return frozenset()
        return frozenset({"compared"}) if positions else frozenset({"compared", "filtered"})

    def _identity(self, op: ast.cmpop, left: Value, right: Value, node: ast.Compare) -> Value:
        positive = isinstance(op, (ast.Is, ast.Eq))
        if isinstance(right, Known) and isinstance(left, Known):
            return self.boolean((left.value == right.value) is positive)
        if isinstance(right, Known) and right.value is None:
            if isinstance(left, Opaque):
                if left.name == "grad" or left.forwards or left.born or actor_of(left) is not None or _is_moved(left):
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
        base = self.opaque(("in", *self.key(left, right)), self.recorder.text(node), left, right)
        return base if positive else self.opaque(("not", base.key), base.text, base, negated=base)

    def _eval_IfExp(self, node: ast.IfExp) -> Value:
        test = self.force(self.eval(node.test))
        if isinstance(test, Opaque) and test.key not in self.world.answers and not test.negated and not test.conjunction:
            return Phi(test, self.eval(node.body), self.eval(node.orelse))
        return self.eval(node.body if self.truth(test) else node.orelse)

    def _eval_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.eval(node.value)
        self.assign(node.target, value)
        return value

    def _eval_Starred(self, node: ast.Starred) -> Value:
        return self.eval(node.value)

    def _eval_Await(self, node: ast.Await) -> Value:
        return self.eval(node.value)

    def _eval_JoinedStr(self, node: ast.JoinedStr) -> Value:
        return self.opaque(("text", id(node)), "text")

    def _eval_Yield(self, node: ast.Yield) -> Value:
        value = self.eval(node.value) if node.value is not None else NONE
        if self.frame.yields is not None:
            self.frame.yields(value)
        return NONE

    def _eval_YieldFrom(self, node: ast.YieldFrom) -> Value:
        value = self.eval(node.value)
        if self.frame.yields is not None:
            for one in self.each(value, node):
                self.frame.yields(one)
        return NONE

    def _eval_Lambda(self, node: ast.Lambda) -> Value:
        return Function(node, self.frame)

    def _eval_ListComp(self, node: ast.ListComp) -> Value:
        return self._comprehension(node, node.elt, "list")

    def _eval_SetComp(self, node: ast.SetComp) -> Value:
        return self._comprehension(node, node.elt, "set")

    def _eval_GeneratorExp(self, node: ast.GeneratorExp) -> Value:
        return self._comprehension(node, node.elt, "list")

    def _eval_DictComp(self, node: ast.DictComp) -> Value:
        pair = self.index.once("pair", node, lambda _: ast.copy_location(ast.Tuple([node.key, node.value], ast.Load()), node))
        values = self._comprehension(node, pair, "list")
        made = Mapping({}, ("dict", id(node)), "")
        for item in values.items if isinstance(values, Items) else ():
            if isinstance(item, Items):
                key = self.force(item.items[0])
                made.items[key.value if isinstance(key, Known) else ("?", key_of(key))] = item.items[1]
        return made

    def _comprehension(self, node: Any, element: ast.expr, kind: str) -> Value:
        """Runs a comprehension in a frame of its own; a filter that cannot be answered lets its items pass."""
        outer = self.frame
        self.frame = Frame(parent=outer, function=outer.function, depth=outer.depth, yields=outer.yields)
        found = Items([], kind)
        try:
            self._generate(list(node.generators), element, found)
        finally:
            self.frame = outer
        return found

    def _generate(self, generators: list[ast.comprehension], element: ast.expr, found: Items) -> None:
        if not generators:
            found.items.append(self.eval(element))
            return
        first, rest = generators[0], generators[1:]
        source = self.force(self.eval(first.iter))
        opened, length = self.openness(source, first.iter)
        trains = Kind.BACKWARD in self.index.kinds(element)
        for at, value in enumerate(self.each(source, first.iter, 1 if opened and not trains else None)):
            if trains:
                if Kind.STEP not in self.index.kinds(element):
                    self.pieces[first.iter.lineno] = self.recorder.text(first.iter)
                self.recorder.turns.append(OpenTurn(first.iter.lineno, at, 0))
                self.recorder.new_data()
            self.assign(first.target, value)
            answers = [self.force(self.eval(test)) for test in first.ifs]
            if all(not isinstance(answer, Known) or answer.value for answer in answers):
                self._generate(rest, element, found)
            if trains:
                self.recorder.turns.pop()
            if first.ifs and any(isinstance(answer, Opaque) for answer in answers):
                found.open = True
        found.open = found.open or opened
        if length is not None and not first.ifs and not rest:
            found.length = length
        if found.open and found.length is None:
            found.length = Root(("items", first.iter.lineno, first.iter.col_offset), "len", "length")
        found.data = found.open or (isinstance(source, (Items,)) and source.data)

    def openness(self, value: Value, node: ast.AST) -> tuple[bool, Root | None]:
        """Whether an iterable's length is not fixed by the code, and the open number that it is."""
        raise NotImplementedError

    def _eval_Call(self, node: ast.Call) -> Value:
        receiver: Value | None = None
        if isinstance(node.func, ast.Attribute):
            receiver = self.force(self.eval(node.func.value))
            function: Value = self.force(self.method(receiver, node.func.attr, node.func))
            name = node.func.attr
        else:
            function = self.force(self.eval(node.func))
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(function, "name", "")
        args: list[Value] = []
        spread = False
        for arg in node.args:
            if isinstance(arg, ast.Starred):
                inner = self.force(self.eval(arg.value))
                if isinstance(inner, Items) and not inner.open:
                    args.extend(inner.items)
                else:
                    args.append(inner)
                    spread = True
            else:
                args.append(self.eval(arg))
        keywords: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.eval(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, Mapping):
                keywords.update({key: one for key, one in value.items.items() if isinstance(key, str)})
                spread = spread or bool(value.text)
            else:
                spread = True
        path = function.path if isinstance(function, Opaque) else ""
        return self.call(Call(node, name, path, function, receiver, args, keywords, spread))

    def method(self, receiver: Value, name: str, node: ast.AST) -> Value:
        """What `receiver.name` is when it is about to be called."""
        if isinstance(receiver, (Thing, Context, Stream, Items, Known, Phi)):
            if isinstance(receiver, Thing) and name in {"module", "_orig_mod"} and receiver.inner is not None:
                return receiver.inner
            known = receiver.attributes.get(name) if isinstance(receiver, Thing) else None
            return known if known is not None else Method(receiver, name)
        return self.attribute(receiver, name, node)


def _is_moved(value: Opaque) -> bool:
    """Whether a value is the result of a tensor's own method (`x.cuda()`), which is never None."""
    return value.key[0] == "call" and value.name in {"cuda", "to", "cpu", "float", "long", "half", "contiguous", "pin_memory"}


def bind(function: Function, receiver: Value) -> Function:
    return Function(function.node, function.closure, receiver, function.owner, function.decorators, function.defaults)
