"""Python's own functions and the methods of its containers, as far as training loops use them."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from accumlint.source.reading.windows import is_window
from accumlint.source.reading.words import DDP_NAMES, FSDP_NAMES
from accumlint.source.rehearsal.arithmetic import combine, is_tensor
from accumlint.source.rehearsal.counts import count, guard
from accumlint.source.rehearsal.hints import is_part
from accumlint.source.rehearsal.values import (
    FALSE,
    NONE,
    TRUE,
    Class,
    Function,
    Instance,
    Items,
    Known,
    Mapping,
    Method,
    Opaque,
    Partial,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.trace import Role, Wrapper
from accumlint.weight import Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.calls import Calls
    from accumlint.source.rehearsal.state import Call


def _range(state: Calls, call: Call) -> Value:
    args = call.args
    if len(args) == 1:
        return Stream("range", stop=args[0], text=state.recorder.text(call.node))
    if len(args) >= 2:
        start = args[0]
        from_zero = isinstance(start, Known) and start.value == 0
        return Stream(
            "range",
            start=None if from_zero else start,
            stop=args[1],
            step=args[2] if len(args) > 2 else None,
            text=state.recorder.text(call.node),
        )
    return state.unknown_call(call)


def _enumerate(state: Calls, call: Call) -> Value:
    return Stream("enumerate", (call.args[0],), start=call.argument(1, "start")) if call.args else state.unknown_call(call)


def _zip(state: Calls, call: Call) -> Value:
    return Stream("zip", tuple(call.args))


def _map(state: Calls, call: Call) -> Value:
    return Stream("map", (call.args[0], call.args[1])) if len(call.args) == 2 else state.unknown_call(call)


def _iter(state: Calls, call: Call) -> Value:
    if not call.args:
        return state.unknown_call(call)
    source = state.force(call.args[0])
    return source if isinstance(source, Stream) and source.kind in {"generator", "iterator"} else Stream("iterator", (source,))


def _next(state: Calls, call: Call) -> Value:
    return state.next_of(call.args[0], call.node) if call.args else state.unknown_call(call)


def _len(state: Calls, call: Call) -> Value:
    value = state.force(call.args[0]) if call.args else NONE
    text = state.recorder.text(call.node)
    if isinstance(value, Items):
        return _items_length(state, value, text)
    if isinstance(value, Known):
        try:
            return Known(len(value.value))
        except TypeError:
            return state.unknown_call(call)
    if isinstance(value, Mapping) and not value.text:
        return Known(len(value.items))
    if isinstance(value, Stream) and value.kind == "chunks" and isinstance(value.stop, Known):
        return value.stop
    if isinstance(value, Stream) and value.kind == "chunks":
        return Known(state.world.k, frozenset({Root(("chunks", value.uid), text, "window")}))
    if isinstance(value, Opaque) and value.born and is_window(state.index, call.node.args[0] if call.node.args else None):
        return Known(state.world.k, frozenset({Root(("window", value.key), text, "window")}))
    if isinstance(value, Opaque) and value.key[0] != "made" and (value.born or value.forwards or "data" in value.causes):
        return count(state, Quantity.INPUTS, ("len", value.key), call.node, value)
    if isinstance(value, Instance):
        method = value.cls.find("__len__")
        if isinstance(method, Function):
            return state.call_value(state.attribute(value, "__len__", call.node), [])
    root = value.length if isinstance(value, Thing) and value.length is not None else Root(state.length_root(value).key, text, "length")
    number = state.world.number(root)
    return Known(number, frozenset({root}), root) if number is not None else state.unknown_call(call)


def _items_length(state: Calls, value: Items, text: str) -> Value:
    if value.open:
        root = value.length or Root(("len", ("object", value.uid)), text, "length")
        number = state.world.number(root) or state.world.batches
        return Known(number, frozenset({root}), root)
    if value.length is not None:
        return Known(len(value.items), frozenset({value.length}), value.length)
    if value.data or any(isinstance(state.force(item), (Opaque, Items)) for item in value.items):
        return Known(len(value.items), frozenset({Root(("window", value.uid), text, "window")}))
    return Known(len(value.items))


def _min_max(state: Calls, call: Call) -> Value:
    values = [state.force(value) for value in call.args]
    if len(values) == 1 and isinstance(values[0], Items):
        values = [state.force(item) for item in values[0].items]
    numbers = [state.number(value, role="bound" if key_of(value) in state.sizes else "") for value in values]
    if values and all(number is not None for number in numbers):
        known = [number for number in numbers if number is not None]
        chosen = (min if call.name == "min" else max)(known, key=lambda one: one.value)
        return Known(
            chosen.value,
            frozenset().union(*(one.roots for one in known)),
            chosen.root if len({one.root for one in known if one.root}) == 1 else None,
        )
    unknown = [value for value, number in zip(values, numbers, strict=False) if number is None and isinstance(value, Opaque)]
    counted = next((value for value in unknown if value.quantity is not None or value.weight is not None), None)
    if counted is not None and call.name == "max":
        return guard(state, counted, call.node)
    settings = [value for value in unknown if not is_tensor(value)]
    if call.name == "max" and len(settings) == 1 and len(unknown) == 1:
        return settings[0]
    return state.unknown_call(call)


def _sum(state: Calls, call: Call) -> Value:
    source = state.force(call.args[0]) if call.args else NONE
    if isinstance(source, (Items, Stream)):
        items = [state.force(value) for value in state.each(source, call.node)]
        total: Value = state.force(call.args[1]) if len(call.args) > 1 else Known(0)
        for item in items:
            total = combine(state, ast.Add, total, item, call.node)
        counts = [item for item in items if isinstance(item, Opaque) and item.quantity in {Quantity.UNITS, Quantity.INPUTS}]
        if counts and isinstance(total, Opaque):
            inputs = all(item.quantity is Quantity.INPUTS for item in counts)
            return count(state, Quantity.INPUTS if inputs else Quantity.WINDOW_UNITS, ("sum", id(call.node)), call.node, *counts)
        return total
    return state.unknown_call(call)


def _int(state: Calls, call: Call) -> Value:
    value = state.force(call.args[0]) if call.args else Known(0)
    if isinstance(value, Known) and isinstance(value.value, (int, float, Fraction)):
        try:
            return Known(int(value.value) if call.name == "int" else value.value, value.roots, value.root, value.gates)
        except (OverflowError, ValueError):
            return state.unknown_call(call)
    if isinstance(value, Known) and call.name == "float" and str(value.value).lstrip("+-").lower() in {"inf", "infinity"}:
        return Known(float(value.value))
    if isinstance(value, Opaque):
        return _same_value(state, value, call)
    return state.unknown_call(call)


def _same_value(state: Calls, value: Opaque, call: Call) -> Value:
    """A number is the same number as int or float; from a tensor it comes without its graph."""
    if not value.forwards and not value.attached:
        return value
    made = state.opaque(
        (call.name, value.key),
        state.recorder.text(call.node),
        value,
        quantity=value.quantity,
        guarded=value.guarded,
        weight=None,
        reduced=True,
    )
    made.forwards = frozenset()
    return made


def _bool(state: Calls, call: Call) -> Value:
    value = state.force(call.args[0]) if call.args else FALSE
    return state.boolean(state.truth(value), value) if isinstance(value, Known) else value


def _round(state: Calls, call: Call) -> Value:
    value = state.force(call.args[0]) if call.args else NONE
    if isinstance(value, Known) and isinstance(value.value, (int, float, Fraction)):
        return Known(round(value.value), value.roots, value.root, value.gates)
    return value if isinstance(value, Opaque) and not is_tensor(value) else state.unknown_call(call)


def _abs(state: Calls, call: Call) -> Value:
    value = state.force(call.args[0]) if call.args else NONE
    return (
        Known(abs(value.value), value.roots)
        if isinstance(value, Known) and isinstance(value.value, (int, float, Fraction))
        else state.unknown_call(call)
    )


def _sequence(state: Calls, call: Call) -> Value:
    kind = call.name if call.name in {"list", "tuple", "set"} else "list"
    if not call.args:
        return Items([], kind)
    source = state.force(call.args[0])
    if isinstance(source, Items):
        return Items(list(source.items), kind, source.open, source.length, data=source.data)
    if isinstance(source, Stream) and source.kind == "generator":
        return _collected(state, source, kind, call)
    if kind == "set" and isinstance(source, Opaque) and not (source.born or source.forwards or source.causes):
        return state.opaque(("set", source.key), source.text, source)  # of numbers of steps, or of names: no batch of data
    opened, root = state.openness(source, call.node)
    ranged = isinstance(source, Stream) and source.kind == "range"
    items = state.each(source, call.node, 1 if opened else None)
    if opened and root is None:
        root = Root(("items", call.node.lineno, call.node.col_offset), "len", "length")
    return Items(items, kind, opened, root, data=not ranged and bool(items) and opened)


def _collected(state: Calls, source: Stream, kind: str, call: Call) -> Value:
    """`list(generator)`: as long as the loop that yields, which may be K."""
    outer, state.yield_roots = state.yield_roots, []
    items, ended = state.collect(source)
    roots, state.yield_roots = state.yield_roots, outer
    accumulations = state.world.knowledge.accumulations
    if ended and (not roots or all(root.key in accumulations for root in roots)):
        return Items(items, kind, data=True)
    root = (
        Root(roots[0].key, roots[0].text, "length") if roots else Root(("items", call.node.lineno, call.node.col_offset), "len", "length")
    )
    return Items(items[:1], kind, True, root, data=True)


def _dict(state: Calls, call: Call) -> Value:
    made = Mapping({}, ("dict", id(call.node)), "")
    literals = {keyword.arg: keyword.value for keyword in call.node.keywords}
    if call.args:
        first = state.force(call.args[0])
        if isinstance(first, Mapping):
            made.items.update(first.items)
    for name, value in call.keywords.items():
        made.items[name] = state.named_constant(name, literals.get(name), value)
    return made


def _getattr(state: Calls, call: Call) -> Value:
    name = state.force(call.args[1]) if len(call.args) > 1 else NONE
    if not isinstance(name, Known) or not isinstance(name.value, str):
        return state.unknown_call(call)
    owner = state.force(call.args[0])
    parts = isinstance(owner, Thing) and owner.wrapped_by is not None and is_part(name.value)
    if isinstance(owner, (Thing, Items, Stream)) and not parts:
        return state.method(owner, name.value, call.node)
    return state.attribute(owner, name.value, call.node)


def _setattr(state: Calls, call: Call) -> Value:
    if len(call.args) == 3:
        name = state.force(call.args[1])
        owner = state.force(call.args[0])
        if isinstance(name, Known) and isinstance(owner, (Instance, Thing, Opaque)):
            state.write(owner.attributes, name.value, call.args[2])
    return NONE


def _hasattr(state: Calls, call: Call) -> Value:
    owner, name = (state.force(call.args[0]), state.force(call.args[1])) if len(call.args) == 2 else (NONE, NONE)
    if isinstance(name, Known):
        actor = actor_of(owner)
        if name.value in {"no_sync", "module", "require_backward_grad_sync"} and actor is not None and actor.known:
            return state.boolean(actor.wrapper is not Wrapper.NONE)
        if isinstance(owner, Instance):
            return state.boolean(name.value in owner.attributes or owner.cls.find(str(name.value)) is not None)
    return _of_its_type(state, call)


def _isinstance(state: Calls, call: Call) -> Value:
    if len(call.args) != 2:
        return state.unknown_call(call)
    value, wanted = state.force(call.args[0]), state.force(call.args[1])
    classes = wanted.items if isinstance(wanted, Items) else [wanted]
    answers = [_is_instance(value, state.force(cls)) for cls in classes]
    if any(answer is True for answer in answers):
        return TRUE
    if all(answer is False for answer in answers):
        return FALSE
    return _of_its_type(state, call)


def _of_its_type(state: Calls, call: Call) -> Value:
    """An open question about what something is, which all ranks answer alike, whatever data it holds."""
    answer = state.unknown_call(call)
    if isinstance(answer, Opaque) and answer.causes:
        answer.causes = frozenset({"type"})
    return answer


def _is_instance(value: Value, cls: Value) -> bool | None:
    if isinstance(value, Instance) and isinstance(cls, Class):
        return value.cls is cls or cls in value.cls.ancestry()
    if isinstance(value, Thing) and isinstance(cls, Opaque):
        name = cls.name or cls.text.rsplit(".", 1)[-1]
        if value.actor.role is Role.MODEL and name in DDP_NAMES:
            return value.actor.wrapper is Wrapper.DDP
        if value.actor.role is Role.MODEL and name in FSDP_NAMES:
            return value.actor.wrapper is Wrapper.FSDP1
    if isinstance(value, Opaque) and value.born and getattr(cls, "path", "") == "torch.Tensor":
        return True  # what is taken for data behaves as a tensor; what else a batch may be is no question of its values
    if isinstance(value, (Items, Mapping, Thing)) and not isinstance(cls, Class):
        name = getattr(cls, "name", "")
        return {
            "list": isinstance(value, Items) and value.kind == "list",
            "tuple": isinstance(value, Items) and value.kind == "tuple",
            "dict": isinstance(value, Mapping),
        }.get(name)
    return None


def _print(state: Calls, call: Call) -> Value:
    return NONE


def _super(state: Calls, call: Call) -> Value:
    frame = state.frame
    function = frame.function
    while function is not None and function.bound is None and frame.parent is not None:
        frame = frame.parent
        function = frame.function
    if function is None or function.owner is None or function.bound is None:
        return state.unknown_call(call)
    members: dict[str, Value] = {}
    for base in reversed(function.owner.ancestry()):
        if isinstance(base, Class):
            members.update(base.members)
    attributes = {
        name: Function(one.node, one.closure, function.bound, one.owner, one.decorators, one.defaults)
        for name, one in members.items()
        if isinstance(one, Function)
    }
    made = state.opaque(("super", key_of(function.bound)), "super()", name="super")
    made.attributes.update(attributes)
    for name in ("__init__", "train", "eval", "to"):
        made.attributes.setdefault(name, Partial(state.opaque(("super", name), f"super().{name}"), (), {}))
    return made


def _reversed(state: Calls, call: Call) -> Value:
    source = state.force(call.args[0]) if call.args else NONE
    if isinstance(source, Items):
        return Items(list(reversed(source.items)), source.kind, source.open, source.length, data=source.data)
    if isinstance(source, Stream) and source.kind == "range":
        items = state.each(source, call.node)
        return Items(list(reversed(items)))
    return state.unknown_call(call)


def _any_all(state: Calls, call: Call) -> Value:
    source = state.force(call.args[0]) if call.args else NONE
    if isinstance(source, Items) and not source.open:
        items = [state.force(item) for item in source.items]
        if all(isinstance(item, Known) for item in items):
            return state.boolean((any if call.name == "any" else all)(bool(item.value) for item in items if isinstance(item, Known)))
        return state.opaque((call.name, *state.key(*items)), state.recorder.text(call.node), *items)
    return state.unknown_call(call)


def _sorted(state: Calls, call: Call) -> Value:
    source = state.force(call.args[0]) if call.args else NONE
    return source if isinstance(source, Items) else state.unknown_call(call)


def _divmod(state: Calls, call: Call) -> Value:
    if len(call.args) != 2:
        return state.unknown_call(call)
    first, second = call.args
    return Items([combine(state, op, first, second, call.node) for op in (ast.FloorDiv, ast.Mod)], "tuple")


BUILTIN_CALLS: dict[str, Callable[[Any, Any], Value]] = {
    "range": _range,
    "enumerate": _enumerate,
    "zip": _zip,
    "map": _map,
    "iter": _iter,
    "next": _next,
    "len": _len,
    "min": _min_max,
    "max": _min_max,
    "sum": _sum,
    "int": _int,
    "float": _int,
    "bool": _bool,
    "round": _round,
    "abs": _abs,
    "list": _sequence,
    "tuple": _sequence,
    "set": _sequence,
    "dict": _dict,
    "getattr": _getattr,
    "setattr": _setattr,
    "hasattr": _hasattr,
    "isinstance": _isinstance,
    "print": _print,
    "super": _super,
    "reversed": _reversed,
    "any": _any_all,
    "all": _any_all,
    "sorted": _sorted,
    "divmod": _divmod,
}


def call_method_of_plain(state: Calls, method: Method, call: Call) -> Value | None:
    """Methods of lists, dicts and strings."""
    receiver = method.receiver
    if isinstance(receiver, Items):
        return _list_method(state, receiver, method.name, call)
    if isinstance(receiver, Mapping):
        return _dict_method(state, receiver, method.name, call)
    if isinstance(receiver, Known) and isinstance(receiver.value, str) and method.name in {"lower", "upper", "strip"} and not call.args:
        return Known(getattr(receiver.value, method.name)())
    return None


def _list_method(state: Calls, items: Items, name: str, call: Call) -> Value | None:
    if name == "append" and call.args:
        value = state.force(call.args[0])
        items.items.append(value)
        items.data = (
            items.data
            or (isinstance(value, Opaque) and bool(value.born) and not value.forwards)
            or (isinstance(value, Items) and value.kind == "tuple")
        )
        return NONE
    if name == "extend" and call.args:
        more = state.force(call.args[0])
        if isinstance(more, Items):
            items.items.extend(more.items)
            items.open = items.open or more.open
        else:
            items.items.extend(state.each(more, call.node))
            items.open = True
        return NONE
    if name == "clear":
        items.items.clear()
        items.open = False
        return NONE
    if name in {"pop", "popleft"} and items.items:
        at = state.force(call.args[0]) if call.args else Known(-1 if name == "pop" else 0)
        if items.open or not isinstance(at, Known) or not isinstance(at.value, int):
            return items.items[0]
        return items.items.pop(at.value) if -len(items.items) <= at.value < len(items.items) else items.items.pop()
    if name == "copy":
        return Items(list(items.items), items.kind, items.open, items.length, data=items.data)
    return None


def _dict_method(state: Calls, mapping: Mapping, name: str, call: Call) -> Value | None:
    if name in {"get", "pop", "setdefault"} and call.args:
        key = state.force(call.args[0])
        if isinstance(key, Known) and key.value in mapping.items:
            return mapping.items[key.value]
        if mapping.text == "" and len(call.args) > 1:
            return call.args[1]
        if mapping.text == "" and isinstance(key, Known):
            return NONE
        return state.item(mapping, key, call.node)
    if name == "values" and mapping.text == "":
        return Items(list(mapping.items.values()))
    if name == "keys" and mapping.text == "":
        return Items([Known(key) for key in mapping.items])
    if name == "items" and mapping.text == "":
        return Items([Items([Known(key), value], "tuple") for key, value in mapping.items.items()])
    if name == "update":
        for one in call.args:
            inner = state.force(one)
            if isinstance(inner, Mapping):
                mapping.items.update(inner.items)
        mapping.items.update(call.keywords)
        return NONE
    return None
