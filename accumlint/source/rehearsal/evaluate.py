"""Expressions: what they come to in a rehearsal."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from accumlint.source.rehearsal.access import Access
from accumlint.source.rehearsal.arithmetic import combine
from accumlint.source.rehearsal.compare import Comparisons
from accumlint.source.rehearsal.names import BUILTINS
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import Call, Frame
from accumlint.source.rehearsal.unclear import ask_for_sync, hang_on, hang_on_calls
from accumlint.source.rehearsal.values import (
    EACH_OF,
    FALSE,
    NONE,
    TRUE,
    Builtin,
    Context,
    Function,
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
    key_of,
)
from accumlint.source.rehearsal.worlds import MOST_STEPS, OutOfSteps
from accumlint.trace import Kind

NAME = ast.Name
HANDLERS: dict[type[ast.expr], Callable[[Any, Any], Value]] = {}  # of the one interpreter there is


class Expressions(Access, Comparisons):
    """Evaluates expressions."""

    __slots__ = ()

    def eval(self, node: ast.expr) -> Value:
        self.steps = steps = self.steps + 1
        if steps > MOST_STEPS:
            raise OutOfSteps
        kind = node.__class__
        if kind is NAME:  # the commonest
            found = self.frame.names.get(node.id)  # type: ignore[attr-defined]
            if found is not None:
                return found
        handler = HANDLERS.get(kind)
        if handler is None:
            handler = HANDLERS[kind] = getattr(type(self), f"_eval_{kind.__name__}", Expressions._unknown)
        return handler(self, node)

    def _eval_Constant(self, node: ast.Constant) -> Value:
        found = self.index.constants.get(id(node))
        if found is None:
            value = node.value
            found = NONE if value is None else TRUE if value is True else FALSE if value is False else Known(value)
            self.index.constants[id(node)] = found
        return found

    def _eval_Name(self, node: ast.Name) -> Value:
        found = self.frame.find(node.id)
        if found is not None:
            return found
        if node.id in BUILTINS:
            return Builtin(node.id)
        made = self.opaque(("name", node.id), node.id, name=node.id)
        self.frame.top.names[node.id] = made
        return made

    def _eval_Attribute(self, node: ast.Attribute) -> Value:
        value = self.eval(node.value)
        return self.opaque_attribute(value, node.attr) if isinstance(value, Opaque) else self.attribute(value, node.attr, node)

    def _eval_Subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.eval(node.value), self.eval(node.slice), node)

    def _eval_Slice(self, node: ast.Slice) -> Value:
        parts = [self.eval(part) if part is not None else NONE for part in (node.lower, node.upper, node.step)]
        if all(isinstance(part, Known) for part in parts):
            values = [part.value for part in parts if isinstance(part, Known)]
            if all(value is None or isinstance(value, int) for value in values):
                return Known(slice(*values), frozenset().union(*(part.roots for part in parts if isinstance(part, Known))))
        return self.opaque(("slice", *self.key(*parts)), self.recorder.text(node), *parts)

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
        for key, value in zip(node.keys, node.values, strict=False):
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
        if (
            isinstance(node, (ast.List, ast.Tuple))
            and isinstance(value, Items)
            and len(value.items) == 1
            and self.world.knowledge.is_accumulation_name(name)
        ):
            return Items([self.named_constant(name, node.elts[0], value.items[0])], value.kind)  # a schedule of one K
        if (
            isinstance(node, ast.Constant)
            and isinstance(value, Known)
            and type(value.value) is int
            and value.value >= 1
            and value.root is None
        ):
            return self.rooted(value.value, Root(("constant", name, node.lineno), name, "constant", value.value))
        return value

    def _eval_BinOp(self, node: ast.BinOp) -> Value:
        return combine(self, type(node.op), self.eval(node.left), self.eval(node.right), node)

    def _eval_IfExp(self, node: ast.IfExp) -> Value:
        test = self.force(self.eval(node.test))
        if Kind.SYNC_OFF in self.index.kinds(node):
            ask_for_sync(self, test)
        hang_on_calls(self, node, test)
        asked, body, orelse = test, node.body, node.orelse
        nothing = isinstance(body, ast.Constant) and not body.value
        if nothing and isinstance(test, Opaque) and isinstance(test.negated, Opaque):  # `None if args.clip <= 0 else args.clip`
            asked, body, orelse = test.negated, orelse, body
        if isinstance(asked, Opaque) and asked.key not in self.world.answers and not asked.negated and not asked.conjunction:
            with self.supposing(asked, True):
                then = self.eval(body)
            with self.supposing(asked, False):
                otherwise = self.eval(orelse)
            chosen = [one.node for one in (then, otherwise) if isinstance(one, Function)]
            if chosen and self.recorder.turns:
                hang_on(self, chosen, asked, self.recorder.text(node))
            return Phi(asked, then, otherwise)
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
        self.kept_frames.append(self.frame)
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
        unknown = isinstance(values, Items) and values.open  # keys that nobody knows, `{k: v.to(device) for k, v in batch.items()}`
        made = Mapping({}, ("dict", id(node)), self.recorder.text(node.generators[0].iter) if unknown else "")
        if isinstance(values, Items) and unknown and values.length is not None and values.length.key[0] == "len":
            made.key = (EACH_OF, values.length.key[1], id(node))
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

    def _eval_Call(self, node: ast.Call) -> Value:
        receiver: Value | None = None
        called = node.func
        if isinstance(called, ast.Attribute):
            receiver = self.eval(called.value)
            if receiver.__class__ is Phi:
                receiver = self.force(receiver)
            name = called.attr
            function = self.method(receiver, name, called)
            if function.__class__ is Phi:
                function = self.force(function)
        else:
            function = self.force(self.eval(called))
            name = called.id if isinstance(called, ast.Name) else getattr(function, "name", "")
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
        if isinstance(receiver, Opaque):  # the most frequent one
            return self.opaque_attribute(receiver, name)
        if isinstance(receiver, (Thing, Context, Stream, Items, Known, Phi)):
            if isinstance(receiver, Thing) and name in {"module", "_orig_mod"} and receiver.inner is not None:
                return receiver.inner
            known = receiver.attributes.get(name) if isinstance(receiver, Thing) else None
            return known if known is not None else Method(receiver, name)
        return self.attribute(receiver, name, node)
