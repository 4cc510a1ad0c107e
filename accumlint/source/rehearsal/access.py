"""Attributes and items: what is inside a value."""

from __future__ import annotations

import ast
from typing import Any

from accumlint.source.reading.shifted import drops_the_first, name_of
from accumlint.source.rehearsal.arithmetic import SELECTED
from accumlint.source.rehearsal.counts import count
from accumlint.source.rehearsal.state import State
from accumlint.source.rehearsal.unclear import hang_on
from accumlint.source.rehearsal.values import (
    TRUE,
    Class,
    Function,
    Instance,
    Items,
    Key,
    Known,
    Mapping,
    Method,
    Module,
    Opaque,
    Phi,
    Root,
    Stream,
    Thing,
    Value,
    key_of,
)
from accumlint.trace import SHIFTED, Role
from accumlint.weight import Quantity

MOST_PIECES = 64
BATCH_COUNTS = frozenset({"num_batches", "n_batches", "num_batches_per_epoch", "batches_per_epoch"})  # of a loader: its length
ABOUT_TENSOR = frozenset(
    {"requires_grad", "is_cuda", "is_leaf", "is_sparse", "dtype", "device", "ndim", "layout"}
)  # the same on every rank


class Access(State):
    """Looks into values."""

    __slots__ = ()

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        if value.__class__ is Phi:
            value = self.force(value)
        if isinstance(value, Opaque):  # the most frequent one
            return self.opaque_attribute(value, name)
        if isinstance(value, Instance):
            return self._instance_attribute(value, name, node)
        if isinstance(value, Class):
            found = value.find(name)
            if isinstance(found, Function) and "classmethod" in found.decorators:
                return bind(found, value)
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
        return self.module_attribute(value, name) if isinstance(value, Module) else Method(value, name)

    def opaque_attribute(self, value: Opaque, name: str) -> Value:
        known = value.attributes.get(name)
        if known is None:
            known = self.framework_attribute(value, name)
        if known is not None:
            return known
        if name == "requires_grad" and value.forwards and value.attached:
            return TRUE
        whole = value.text
        text = f"{whole}.{name}" if whole else name
        if name in BATCH_COUNTS and "loader" in value.text.lower():
            root = Root(("len", value.key), text, "length")
            length = self.world.number(root)
            if length is not None:
                return Known(length, frozenset({root}), root)
        made = self.opaque((".", value.key, name), text, value)
        made.name, made.owner = name, value
        if value.path:
            made.path = f"{value.path}.{name}"
        if value.weight is not None and name in {"data", "T"}:
            made.weight, made.reduced = value.weight, value.reduced
        if name == "grad" or value.name == "grad":
            made.name = "grad"
        elif name == "shape":
            made.forwards, made.born = frozenset(), frozenset()
        elif name in ABOUT_TENSOR:
            made.forwards, made.born, made.causes = frozenset(), frozenset(), frozenset()
        if not value.attributes:
            self.holders.append(value)
        value.attributes[name] = made
        return made

    def _thing_attribute(self, thing: Thing, name: str) -> Value:
        known = thing.attributes.get(name)
        if known is None:
            known = self.framework_attribute(thing, name)
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
        if found is None:
            found = self.framework_attribute(instance, name)
        if found is not None:
            return found
        made = self.opaque((".", ("object", instance.uid), name), f"self.{name}", name=name, owner=instance)
        if instance.actor is None or instance.actor.role is not Role.MODEL:
            instance.attributes[name] = made
        else:
            instance.attributes.setdefault(name, made)
        return made

    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        if value.__class__ is Phi:
            value = self.force(value)
        if key.__class__ is Phi:
            key = self.force(key)
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
                    return self._piece(value, key, node)
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

    def _piece(self, value: Items, key: Known, node: ast.AST) -> Items:
        """A slice of a list of unknown length: of K where the numbers are made of it, `batches[u * k : (u + 1) * k]`."""
        start, stop = key.value.start or 0, key.value.stop
        by_k = any(root.key in self.world.knowledge.accumulations for root in key.roots)
        if by_k and isinstance(start, int) and isinstance(stop, int) and key.value.step is None and 0 <= start < stop:
            sample = value.items[0]
            pieces = [self.again(sample, node, ("piece", value.uid, at)) for at in range(start, min(stop, start + MOST_PIECES))]
            return Items(pieces, value.kind, data=value.data)
        wide = [root for root in key.roots if root.kind in {"setting", "constant"} and self.world.number(root) == self._width(key.value)]
        length = wide[0] if len(wide) == 1 else None  # `batches[at : at + k]`
        return Items(list(value.items), value.kind, open=True, length=length, data=value.data)

    @staticmethod
    def _width(part: slice) -> int | None:
        start = part.start or 0
        return part.stop - start if isinstance(start, int) and isinstance(part.stop, int) else None

    def again(self, sample: Value, node: ast.AST, key: tuple[Any, ...]) -> Value:
        """One more item of an open list of batches: like the sample, but new data."""
        if isinstance(sample, Opaque) and not _is_of_a_setting(sample.key) and (sample.born or not sample.actor):
            return self.opaque(key, sample.text, born=self.take(node, key), causes=sample.causes | {"data"}, name=sample.name)
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
                hang_on(self, [one.node for one in samples if isinstance(one, Function)], key, self.recorder.text(node))
                return samples[0]
            sample = next((one for at, one in value.items.items() if isinstance(at, tuple) and at[:1] == ("?",)), None)
            like = sample if value.text and isinstance(sample, Opaque) and not sample.forwards else None
            found = self.opaque(("[]", value.key, name), f"{value.text}[{name!r}]", like, name=str(name))
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
        if isinstance(key, Opaque) and "compared" in key.causes:
            made.causes |= {SELECTED}
        if isinstance(node, ast.Subscript) and drops_the_first(node.slice):
            made.causes |= {f"{SHIFTED}{name_of(node.value)}"}
        if value.path.endswith(".__dict__"):
            made.path = f"{value.path}.{made.text}"  # one of a module's names, `models.__dict__[args.arch]`: a class or a function
        if self.recorder.turns and not value.forwards and value.quantity is None and not self.fixed(key):
            made.born = self.take(node, made.key)
            made.causes |= {"data"}
        return made

    @staticmethod
    def fixed(key: Value) -> bool:
        """Whether an index is a constant in place, so that it takes no new data turn after turn."""
        if isinstance(key, Items):
            return all(Access.fixed(part) for part in key.items)
        return (
            isinstance(key, Known)
            and not key.roots
            and (not isinstance(key.value, slice) or key.value.start in {None, 0, 1, -1} or key.value.stop is None)
        )


def bind(function: Function, receiver: Value) -> Function:
    return Function(function.node, function.closure, receiver, function.owner, function.decorators, function.defaults)


def is_of_forward(value: Opaque) -> bool:
    """Whether a value is what a model returned, or a part of that, and not what an unfollowed function made of it."""
    source: Value | None = value
    while isinstance(source, Opaque) and source.key[0] in {"part", "[]", "."} and source.owner is not None:
        source = source.owner
    return isinstance(source, Opaque) and source.key[0] == "forward"


def moves(value: Value) -> bool:
    """Whether an argument is a plain number that is not a setting: an index that picks out a part."""
    return isinstance(value, Known) and type(value.value) is int and value.root is None


def _is_of_a_setting(key: Key) -> bool:
    """Whether a value is an item of a setting or of a list of files, or a part of one: `f.name for f in os.scandir(folder)`."""
    current: object = key
    while isinstance(current, tuple) and current:
        if current[0] == "setting":
            return True
        current = current[1] if len(current) > 1 else None
    return False
