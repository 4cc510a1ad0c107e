"""Assignments: what a name, an attribute or an item is from now on."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from accumlint.source.reading.facts import OPTIMIZER_NAME, SCHEDULER_NAME, terminal
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.state import State
from accumlint.source.rehearsal.values import (
    Class,
    Instance,
    Items,
    Known,
    Mapping,
    Opaque,
    Root,
    Thing,
    Value,
    key_of,
)

is_updater = found_in(re.compile(f"{OPTIMIZER_NAME.pattern}|{SCHEDULER_NAME.pattern}", OPTIMIZER_NAME.flags))
COUNTS = re.compile(r"count|^(n|num)_|_(n|num|size)$|n?tokens$|^total", re.IGNORECASE)  # names of numbers of targets


class Assignments(State):
    """Carries out assignments."""

    __slots__ = ()

    def _named(self, target: ast.expr, node: ast.expr, value: Value) -> Value:
        name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
        if name and self.world.knowledge.is_accumulation_name(name):
            self.christen(name, value)
            if _is_quotient(node) and isinstance(value, Known) and value.root is None and value.value >= 1 and not self.recorder.turns:
                number = int(value.value)
                return self.rooted(number, Root(("constant", name, node.lineno), name, "constant", number))
        if name and isinstance(node, ast.Constant) and (self.index.is_open_constant(name, target) or self._is_first_k(name)):
            return self.named_constant(name, node, value)
        if name and isinstance(value, Opaque) and not value.text:
            value.text = name
        return value

    def _is_first_k(self, name: str) -> bool:
        """`accumulation_steps = 1`, which a branch that is not taken here would raise."""
        return name not in self.index.augmented and self.world.knowledge.is_accumulation_name(name)

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

    def _unpack(self, target: ast.Tuple | ast.List, value: Value) -> None:
        value = self.force(value)
        starred = next((at for at, one in enumerate(target.elts) if isinstance(one, ast.Starred)), None)
        if isinstance(value, Items) and starred is None and not value.open and len(value.items) == len(target.elts):
            for one, item in zip(target.elts, value.items, strict=False):
                self.assign(one, item)
            return
        if isinstance(value, Items) and starred is not None and len(value.items) >= len(target.elts) - 1:
            after = len(target.elts) - starred - 1
            for one, item in zip(target.elts[:starred], value.items, strict=False):
                self.assign(one, item)
            self.assign(target.elts[starred], Items(value.items[starred : len(value.items) - after]))
            for one, item in zip(target.elts[starred + 1 :], value.items[len(value.items) - after :], strict=False):
                self.assign(one, item)
            return
        if isinstance(value, Opaque) and value.forwards and any(COUNTS.search(terminal(one)) for one in target.elts):
            value.causes |= {"unclear-mean"}  # `loss, n_tokens = model(batch)`: who tells the number leaves the dividing to others
        for at, one in enumerate(target.elts):
            self.assign(one, self._part(value, at, one))

    def _part(self, value: Value, at: int, target: ast.expr) -> Value:
        """The part of an unknown tuple that a target takes; its name tells what nothing else does."""
        if isinstance(value, Opaque):
            text = target.id if isinstance(target, ast.Name) else f"{value.text}[{at}]"
            known = value.attributes.get(f"part {at}")
            if known is not None:
                return known
            made = self.opaque(("part", value.key, at), text, value, attached=value.attached, owner=value, name=text)
            if is_updater(text):
                made.forwards, made.attached, made.born = frozenset(), False, frozenset()  # what gave it is no forward then
            if not (value.forwards or value.born or value.causes):
                value.attributes[f"part {at}"] = made  # an object that is asked for again is the same one
            return made
        if isinstance(value, Items) and value.items:
            return value.items[min(at, len(value.items) - 1)]
        return self.opaque(("part", key_of(value), at), self.recorder.text(target))

    def _set_attribute(self, target: ast.Attribute, value: Value) -> None:
        owner = self.force(self.eval(target.value))
        if self.set_training_attribute(owner, target, value) or self._is_a_default(owner, value):
            return
        if isinstance(owner, (Instance, Thing, Opaque)):
            self.write(owner.attributes, target.attr, value)
        elif isinstance(owner, Class):
            self.write(owner.members, target.attr, value)
        elif isinstance(owner, Mapping):
            self.write(owner.items, target.attr, value)

    def _is_a_default(self, owner: Value, value: Value) -> bool:
        """Whether a module of the project only says what a setting is unless told otherwise: `_C.SOLVER.ACCUMULATE = False`."""
        top = self.frame.parent is None and self.frame.function is None and self.frame is not self.globals
        return top and isinstance(owner, Opaque) and isinstance(value, Known) and isinstance(value.value, bool)

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
        elif (
            isinstance(owner, Items)
            and isinstance(key, Known)
            and isinstance(key.value, int)
            and -len(owner.items) <= key.value < len(owner.items)
        ):
            owner.items[key.value] = value
        elif isinstance(owner, (Opaque, Thing)) and isinstance(key, Known):
            self.write(owner.attributes, f"[{key.value!r}]", value)
        if isinstance(owner, Opaque):
            _keep_loss(owner, self.force(value))


def _keep_loss(tensor: Opaque, value: Value) -> None:
    """`per_sample = torch.zeros(n); per_sample[i] = loss`: the tensor has a graph from then on, whatever its elements weigh."""
    if tensor.key[0] != "made" or not isinstance(value, Opaque) or not value.forwards or not value.attached:
        return
    tensor.forwards |= value.forwards
    tensor.attached, tensor.reduced = True, False
    tensor.weight = replace(value.weight, known=False) if value.weight is not None else tensor.weight


def _is_quotient(node: ast.expr) -> bool:
    """`batch // micro`: of constants that are numbers in place it is one all the same."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.FloorDiv))


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
