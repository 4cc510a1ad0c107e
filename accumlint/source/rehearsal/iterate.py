"""What a loop goes over: how many turns, and what each turn is given."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from accumlint.source.reading.facts import terminal
from accumlint.source.rehearsal.state import Leave, Signal, State, unshifted
from accumlint.source.rehearsal.unclear import is_told
from accumlint.source.rehearsal.values import (
    EACH_OF,
    Instance,
    Items,
    Key,
    Known,
    Mapping,
    Opaque,
    Plan,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    fresh_uid,
    key_of,
)
from accumlint.trace import Kind, Role

DEEPEST_BATCH = 4  # how far a batch is looked for in what a list was made from

MOST_TURNS = 16
PIECE = 4  # samples in a piece of a batch
STOP = Signal("stop")
FILES = (("import", "os"), ("import", "glob"))
HEADS = 2  # turns of a loop over the parts of an output
SETTINGS = re.compile(
    r"^(\w+_)?(args?|opts?|options|config|cfg|conf|hparams|settings)[.\[]|(^|_)(num_\w+|config|cfg|args)\.(items|values|keys)\(\)$",
    re.IGNORECASE,
)
OPTIMIZERS = re.compile(r"(optim(izer)?s?|schedulers?)(\.(items|values)\(\))?$", re.IGNORECASE)  # what is stepped is no data


class Iteration(State):
    """Plans for everything that can be iterated."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._data: dict[Any, int] = {}
        self.prepares = False  # a loop before the training is planned: where it goes over settings, its items are no data

    def take(self, node: ast.AST, key: tuple[Any, ...] | None = None) -> frozenset[int]:
        """Marks that new data was taken here; the same key is the same data."""
        number = fresh_uid() if key is None else self._data.setdefault(key, fresh_uid())
        self.recorder.new_data()
        if self.recorder.turns:
            self.recorder.turns[-1].taken.add(number)
        return frozenset({number})

    def datum(self, node: ast.AST, text: str, key: tuple[Any, ...] | None = None) -> Opaque:
        """A new batch."""
        born = self.take(node, key)
        self.recorder.emit(Kind.DATA, node, data=tuple(born))
        (number,) = born
        return self.opaque(("data", number), text, born=born, causes=frozenset({"data"}))

    def plan(self, value: Value, node: ast.AST, bound: int | None = None) -> Plan:
        """How to go over a value. `bound` is how many turns a loop with an unknown range makes."""
        value = self.force(value)
        if isinstance(value, Items):
            return self._plan_items(value, node)
        if isinstance(value, Stream):
            return self._plan_stream(value, node, bound)
        if isinstance(value, Known) and isinstance(value.value, (str, bytes, tuple)):
            known = value.value[:MOST_TURNS]
            return Plan(len(known), lambda at: Known(known[at]))
        if isinstance(value, Mapping):
            keys = list(value.items)[:MOST_TURNS]
            return Plan(len(keys), lambda at: Known(keys[at]) if not isinstance(keys[at], tuple) else self.opaque(("key", keys[at]), "key"))
        if isinstance(value, Instance):
            return self._plan_instance(value, node)
        return self._plan_unknown(value, node)

    def _plan_instance(self, value: Instance, node: ast.AST) -> Plan:
        method = value.cls.find("__iter__")
        if method is not None:
            inner = self.force(self.call_value(self.attribute(value, "__iter__", node), []))
            if inner is not value and not isinstance(inner, Instance):
                return self.plan(inner, node)
        return self._plan_unknown(value, node)

    def _plan_unknown(self, value: Value, node: ast.AST) -> Plan:
        text = value.text if isinstance(value, Opaque) else ""
        root = self.length_root(value, text)
        if isinstance(value, Opaque) and is_told(self, value.key):
            self.world.knowledge.learn_divisible(root)
        count = self.world.number(root) or self.world.batches
        actor = actor_of(value)
        if actor is not None and actor.role in {Role.PARAMETERS, Role.MODEL, Role.OPTIMIZER}:
            return Plan(1, lambda at: self.element(value, node))
        if isinstance(value, Opaque) and not value.born and OPTIMIZERS.search(text):
            return Plan(1, lambda at: self.element(value, node))
        if isinstance(value, Opaque) and value.forwards:  # the heads of an output, the parts of a loss: their number is no K
            return Plan(HEADS, lambda at: self.item(value, Known(at), node), open=True)
        settings = self.prepares and SETTINGS.search(text)
        if isinstance(value, Opaque) and not (value.causes or value.born) and (settings or _lists_files(value.key)):
            return Plan(count, lambda at: self.opaque(("setting", value.key, at), f"item of {text}"), open=True, root=root)
        return Plan(count, lambda at: self.datum(node, text and f"batch of {text}"), open=True, root=root, data=True)

    def element(self, value: Value, node: ast.AST) -> Value:
        """The one element that stands for all of something that is not data."""
        if isinstance(value, Opaque):
            if value.element is None:
                value.element = self.opaque(("element", value.key), f"{value.text}[…]", value, actor=value.actor, owner=value)
            return value.element
        return self.opaque(("element", key_of(value)), self.recorder.text(node), actor=actor_of(value), owner=value)

    def length_root(self, value: Value, text: str = "") -> Root:
        if isinstance(value, (Items, Thing)) and value.length is not None:
            return value.length
        key = _of_any_batch(_of_whole(key_of(value)))
        return Root(("len", key[:2] if key[0] == "made" else key), f"len({text})" if text else "len", "length")

    def _plan_items(self, value: Items, node: ast.AST) -> Plan:
        if not value.open:
            return Plan(len(value.items), lambda at: self._fixed_item(value, at, node), data=value.data)
        items = value.items
        if value.heads and items:
            return Plan(HEADS, lambda at: self.again_at(items[at % len(items)], node), open=True)
        root = self.length_root(value)
        count = self.world.number(root) or self.world.batches
        return Plan(
            count,
            lambda at: self.again_at(items[at % len(items)], node) if items else self.datum(node, "batch"),
            open=True,
            root=root,
            data=True,
        )

    def _fixed_item(self, value: Items, at: int, node: ast.AST) -> Value:
        item = value.items[at]
        if value.data and at > 0 and not carries(item):
            return self.again_at(item, node)
        if carries(item):
            return self._retake(item, node)
        return item

    def _retake(self, item: Value, node: ast.AST) -> Value:
        """A batch taken from a list of batches: data that was already fetched begins a micro-batch where it is used."""
        self.recorder.new_data()
        return item

    def again_at(self, item: Value, node: ast.AST) -> Value:
        """Another batch like the sample."""
        if isinstance(item, Items):
            return Items([self.again_at(part, node) for part in item.items], item.kind, open=item.open, data=item.data)
        if isinstance(item, Mapping) and carries(item):
            return Mapping({key: self.again_at(part, node) for key, part in item.items.items()}, item.key, item.text)
        if isinstance(item, Opaque) and actor_of(item) is None and not item.forwards:
            made = self.datum(node, item.text)
            made.quantity, made.weight = item.quantity, item.weight
            return made
        return item

    def _plan_stream(self, value: Stream, node: ast.AST, bound: int | None) -> Plan:
        kind = value.kind
        if kind == "range":
            return self._plan_range(value, node, bound)
        if kind == "enumerate":
            return self._plan_enumerate(value, node)
        if kind == "zip":
            return self._plan_zip(value, node)
        if kind == "islice":
            return self._plan_islice(value, node)
        if kind == "iterator":
            inner = self.plan(value.parts[0], node)
            offset = value.taken
            return Plan(
                max(0, inner.count - offset), lambda at: self._advance(value, inner, at), inner.open, inner.endless, inner.root, inner.data
            )
        if kind == "cycle":
            inner = self.plan(value.parts[0], node)
            return Plan(MOST_TURNS, lambda at: inner.item(at % max(1, inner.count)), endless=True, data=inner.data)
        if kind == "count":
            first = self._first(value.start)
            return Plan(MOST_TURNS, lambda at: Known(first + at), endless=True)
        if kind == "chunks":
            return self._plan_chunks(value, node)
        if kind == "parameters":
            return Plan(1, lambda at: self.element_of_parameters(value))
        if kind == "generator":
            collected, ended = self.collect(value)
            return Plan(len(collected), lambda at: collected[at], open=not ended, endless=not ended, data=True)
        if kind == "map":
            inner = self.plan(value.parts[1], node)
            return Plan(
                inner.count, lambda at: self.call_value(value.parts[0], [inner.item(at)]), inner.open, inner.endless, inner.root, inner.data
            )
        return self._plan_unknown(value, node)

    def element_of_parameters(self, value: Stream) -> Value:
        owner = value.parts[0] if value.parts else None
        return self.opaque(("parameter", value.uid), "p", actor=actor_of(owner), owner=value)

    def _advance(self, stream: Stream, inner: Plan, at: int) -> Value:
        item = inner.item(stream.taken)
        stream.taken += 1
        return item

    def _plan_range(self, value: Stream, node: ast.AST, bound: int | None) -> Plan:
        numbers = [None if part is None else self.number(part, role="bound") for part in (value.start, value.stop, value.step)]
        start = int(numbers[0].value) if numbers[0] is not None else self._first(value.start)
        stop_root = self._bounding(numbers[1]) if numbers[1] is not None else None
        if value.step is not None and (numbers[2] is None or numbers[2].roots or (numbers[2].value > 1 and self._is_size(value.stop))):
            return self._plan_strides(value)
        step = int(numbers[2].value) if numbers[2] is not None and numbers[2].value else 1
        if numbers[1] is None or (value.start is not None and numbers[0] is None):
            count = bound if bound is not None else self.world.batches
            root = (
                replace(unshifted(value.stop)[0], kind="length")
                if isinstance(value.stop, Opaque)
                else Root(key_of(value.stop), "", "length")
                if value.stop is not None
                else None
            )
            return Plan(count, lambda at: Known(start + at * step), open=True, root=root)
        count = max(0, len(range(start, int(numbers[1].value), step)))
        self._size_pieces(numbers[1], count)
        return Plan(
            count,
            lambda at: Known(start + at * step),
            open=stop_root is not None and stop_root.key not in self.world.knowledge.accumulations,
            root=stop_root,
        )

    def _size_pieces(self, stop: Known, count: int) -> None:
        """`range((size - 1) // micro + 1)`: of the two settings it is known how they go together, so that the last piece is known."""
        for kind, *parts in (root.key for root in stop.roots):
            if kind == "//" and len(parts) == 2:
                whole, micro = parts
                whole = whole[1] if whole[0] == "Sub" and whole[2] == ("known", "1") else whole
                self.sizes.setdefault(micro, PIECE)
                self.sizes.setdefault(whole, PIECE * count)

    def _first(self, start: Value | None) -> int:
        """The number that counting begins with: in a run that is not resumed, `updates * k + 1` is one, but `epoch_done + 1` none."""
        if start is None:
            return 0
        known, start = self.number(start), self.force(start)
        if known is not None:
            return int(known.value)
        root, offset = unshifted(start) if isinstance(start, Opaque) else (None, 0)
        return max(0, offset) if root is not None and root.key[0] == "Mult" else 0

    def _is_size(self, stop: Value | None) -> bool:
        """Whether a range ends where a batch does: `range(0, x.size(0), 8)`."""
        end = self.force(stop) if stop is not None else None
        return isinstance(end, Opaque) and bool(end.causes & {"data"} or end.born)

    def _bounding(self, stop: Known) -> Root | None:
        """The open number that ends a range, also as `n + 1`."""
        if stop.root is not None or len(stop.roots) != 1:
            return stop.root
        (root,) = stop.roots
        number = self.world.number(root)
        return root if number is not None and abs(stop.value - number) <= 1 else None

    def _plan_chunks(self, value: Stream, node: ast.AST) -> Plan:
        """`batch.chunk(n)`: as many pieces as it says; `batch.split(size)`: K of them."""
        number = value.stop if isinstance(value.stop, Known) else None
        count = self.world.k if number is None else min(int(number.value), MOST_TURNS)
        root = number.root if number is not None and number.root is not None else Root(("chunks", value.uid), value.text, "window")
        return Plan(count, lambda at: self._chunk(value, node, at), data=True, root=root)

    def _chunk(self, value: Stream, node: ast.AST, at: int) -> Value:
        """A piece of a batch, or of features that were computed without a graph before."""
        made = self.datum(node, value.text, ("chunk", value.uid, at))
        whole = self.force(value.parts[0]) if value.parts else made
        made.causes |= {cause for cause in getattr(whole, "causes", ()) if cause.startswith("cached:")}
        return made

    def _plan_strides(self, value: Stream) -> Plan:
        """`range(0, size, micro)`: K pieces of one batch."""
        stride, end = self.force(value.step) if value.step is not None else None, self.force(value.stop) if value.stop is not None else None
        size, pieces = 4, self.world.k
        if isinstance(stride, Known) and isinstance(stride.value, int) and stride.value > 0:
            size = stride.value
            if isinstance(end, Known) and isinstance(end.value, int) and 2 <= -(-end.value // size) <= MOST_TURNS:
                pieces = -(-end.value // size)
        for part, number in ((stride, size), (end, size * pieces)):
            if isinstance(part, Opaque):
                self.sizes[part.key] = number
        root = Root(("strides", value.uid), value.text or "range", "window")
        return Plan(pieces, lambda at: Known(at * size, frozenset({root})), root=root, data=True)

    def _plan_enumerate(self, value: Stream, node: ast.AST) -> Plan:
        inner = self.plan(value.parts[0], node)
        first = self._first(value.start)
        return Plan(
            inner.count, lambda at: Items([Known(first + at), inner.item(at)], "tuple"), inner.open, inner.endless, inner.root, inner.data
        )

    def _plan_zip(self, value: Stream, node: ast.AST) -> Plan:
        plans = [self.plan(part, node) for part in value.parts]
        if not plans:
            return Plan(0, lambda at: Known(None))
        finite = [plan for plan in plans if not plan.endless] or plans
        fixed = [plan for plan in finite if not plan.open] or finite
        shortest = min(fixed, key=lambda plan: plan.count)
        sources = [self.force(part) for part in value.parts]
        cut = not shortest.open and any(isinstance(source, Stream) and source.kind == "range" for source in sources)
        return Plan(
            shortest.count,
            lambda at: Items(
                [self._sliced(one, plan, at, node) if cut else plan.item(at) for one, plan in zip(sources, plans, strict=True)], "tuple"
            ),
            shortest.open,
            all(plan.endless for plan in plans),
            shortest.root,
            any(plan.data for plan in plans),
        )

    def _plan_islice(self, value: Stream, node: ast.AST) -> Plan:
        source = self.force(value.parts[0])
        inner = self.plan(source, node)
        stop = self.number(value.stop, role="bound") if value.stop is not None else None
        count = (self.world.k if isinstance(value.stop, Opaque) else inner.count) if stop is None else int(stop.value)
        exhausted = inner.count if not inner.endless else count
        return Plan(
            min(count, exhausted),
            lambda at: self._sliced(source, inner, at, node),
            root=stop.root if stop is not None else None,
            data=inner.data,
        )

    def _sliced(self, source: Value, inner: Plan, at: int, node: ast.AST) -> Value:
        """Slicing the loader itself begins at its first batch each time; slicing an iterator goes on."""
        if isinstance(source, Thing) and inner.data and "shuffled" not in source.actor.options:
            return self.datum(node, "batch", ("first batches", key_of(source), at))
        return inner.item(at)

    def collect(self, stream: Stream) -> tuple[list[Value], bool]:
        """The values a user's generator yields, at most two windows and a tail; and whether it ended by itself."""
        found: list[Value] = []
        most = self.world.batches
        marker = object()

        def keep(value: Value) -> None:
            found.append(value)
            if len(found) > most:  # one more than needed tells whether it ends there
                raise Leave(STOP, marker)

        assert stream.call is not None
        try:
            stream.call(keep)
        except Leave as leave:
            if leave.owner is not marker:
                raise
            return found[:most], False
        return found, True

    def each(self, value: Value, node: ast.AST, limit: int | None = None) -> list[Value]:
        plan = self.plan(value, node)
        return [plan.item(at) for at in range(min(plan.count, limit or MOST_TURNS))]

    def openness(self, value: Value, node: ast.AST) -> tuple[bool, Root | None]:
        value = self.force(value)
        if isinstance(value, Stream) and value.kind == "range":
            # A named constant bounds the data: how much data there is stays open, unless the name is K's.
            stop = self.number(value.stop, role="bound") if value.stop is not None else None
            if stop is None:
                return True, Root(key_of(value.stop), getattr(value.stop, "text", ""), "length") if value.stop is not None else None
            accumulations = self.world.knowledge.accumulations
            if any(root.key in accumulations for root in stop.roots):
                return False, None
            if stop.root is not None:
                return True, Root(stop.root.key, stop.root.text, "length")
            turns = number_of_strides(node) if stop.roots else None
            count = self.force(self.eval(turns)) if turns is not None else None
            if isinstance(count, Known) and count.root is not None:
                return True, Root(count.root.key, count.root.text, "length")
            return False, None
        plan = self.plan(value, node) if not (isinstance(value, Stream) and value.kind == "generator") else None
        return (True, None) if plan is None else (plan.open or plan.endless, plan.root)

    def next_of(self, value: Value, node: ast.AST) -> Value:
        """`next(iterator)`: the next item, new data unless the items are known."""
        value = self.force(value)
        if isinstance(value, Stream):
            if value.kind == "generator":
                if not value.parts:
                    collected, _ = self.collect(value)
                    value.parts = tuple(collected)
                items = value.parts
                value.taken += 1
                return self.again_at(items[(value.taken - 1) % len(items)], node) if items else self.datum(node, "batch")
            if value.kind == "iterator":
                inner = self.plan(value.parts[0], node)
                value.taken += 1
                source = self.force(value.parts[0])
                if isinstance(source, Thing) and source.actor.role is Role.LOADER and "shuffled" not in source.actor.options:
                    return self.datum(node, "batch", ("batch", source.actor.uid, value.taken - 1))
                if inner.data or not inner.count:
                    return inner.item((value.taken - 1) % max(1, inner.count)) if inner.count else self.datum(node, "batch")
                return inner.item((value.taken - 1) % inner.count)
            plan = self.plan(value, node)
            value.taken += 1
            return plan.item((value.taken - 1) % plan.count) if plan.count else self.datum(node, "batch")
        if isinstance(value, Instance) and value.cls.find("__next__") is not None:
            return self.call_value(self.attribute(value, "__next__", node), [])
        return self.datum(node, "batch")


def number_of_strides(node: ast.AST) -> ast.expr | None:
    """The k of `range(start, start + k * stride, stride)`."""
    if not isinstance(node, ast.Call) or terminal(node.func) != "range" or len(node.args) != 3:
        return None
    start, stop, stride = node.args
    if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add) and ast.unparse(stop.left) == ast.unparse(start):
        stop = stop.right
    elif not (isinstance(start, ast.Constant) and start.value == 0):
        return None
    if not isinstance(stop, ast.BinOp) or not isinstance(stop.op, ast.Mult):
        return None
    sides = {ast.unparse(stop.left): stop.right, ast.unparse(stop.right): stop.left}
    return sides.get(ast.unparse(stride))


def _lists_files(key: Key) -> bool:
    """Whether a value is what a module of the operating system gave: names of files, the same on every rank."""
    return key[0] == "call" and any(part in key[1] for part in FILES if isinstance(key[1], tuple))


def carries(item: Value) -> bool:
    """Whether an item of a list is data."""
    if isinstance(item, Items):
        return any(carries(part) for part in item.items)
    if isinstance(item, Mapping):
        return any(carries(part) for part in item.items.values())
    return isinstance(item, Opaque) and bool(item.born) and not item.forwards


def _of_whole(key: Key) -> Key:
    """`d` for `d.items()` and for `{k: f(v) for k, v in d.items()}`, which are as long."""
    if key[0] == EACH_OF:
        return _of_whole(key[1])
    view = key[1] if len(key) == 2 and key[0] == "call" else ()
    if isinstance(view, tuple) and len(view) == 3 and view[0] == "method" and view[2] in {"items", "values", "keys"}:
        return _of_whole(view[1])
    return key


def _of_any_batch(key: Any, depth: int = 0) -> Any:
    """A key without the number of the batch: what is cut from each of them has one length, as a setting has one value."""
    if not isinstance(key, tuple) or depth > DEEPEST_BATCH:
        return key
    return key[:1] if key[:1] == ("data",) else tuple(_of_any_batch(each, depth + 1) for each in key)
