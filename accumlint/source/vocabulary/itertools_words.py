"""Python's itertools and functools, as training loops use them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import Function, Items, Known, Mapping, Opaque, Partial, Stream, Value
from accumlint.source.vocabulary.base import Handler

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call


def islice(state: Machine, call: Call) -> Value | None:
    if len(call.args) < 2:
        return None
    stop = call.args[2] if len(call.args) > 2 else call.args[1]
    return Stream("islice", (call.args[0],), stop=stop, text=state.recorder.text(call.node))


def cycle(state: Machine, call: Call) -> Value | None:
    return Stream("cycle", (state.force(call.args[0]),)) if call.args else None


def counted(state: Machine, call: Call) -> Value | None:
    return Stream("count", start=call.argument(0, "start")) if not call.receiver or call.path.startswith("itertools") else None


def chain(state: Machine, call: Call) -> Value | None:
    parts = [state.force(value) for value in call.args]
    if all(isinstance(part, Items) for part in parts):
        items = [part for part in parts if isinstance(part, Items)]
        return Items(
            [item for part in items for item in part.items], open=any(part.open for part in items), data=any(part.data for part in items)
        )
    parameters = [part for part in parts if isinstance(part, Stream) and part.kind == "parameters"]
    return parameters[0] if parameters and len(parameters) == 1 else Items(list(parameters)) if parameters else None


def partial(state: Machine, call: Call) -> Value | None:
    if not call.args:
        return None
    function = state.force(call.args[0])
    names: list[str] = []
    if isinstance(function, Function):
        names = [argument.arg for argument in function.node.args.posonlyargs + function.node.args.args][function.bound is not None :]
    names += [""] * len(call.args)
    literals = {keyword.arg: keyword.value for keyword in call.node.keywords}
    given = tuple(
        state.named_constant(name, node, value) for name, node, value in zip(names, call.node.args[1:], call.args[1:], strict=False)
    )
    return Partial(function, given, {name: state.named_constant(name, literals.get(name), value) for name, value in call.keywords.items()})


def repeat(state: Machine, call: Call) -> Value | None:
    times = state.number(call.args[1]) if len(call.args) > 1 else None
    count = int(times.value) if times is not None else state.world.batches
    return Items([call.args[0]] * max(0, min(count, 64))) if call.args else None


def namespace(state: Machine, call: Call) -> Value | None:
    made = Mapping({}, ("namespace", id(call.node)), "")
    literals = {keyword.arg: keyword.value for keyword in call.node.keywords}
    for name, value in call.keywords.items():
        made.items[name] = state.named_constant(name, literals.get(name), value)
    return made


def ceil(state: Machine, call: Call) -> Value | None:
    value = state.number(call.args[0]) if call.args else None
    if value is not None and call.path.startswith("math"):
        return Known((math.ceil if call.name == "ceil" else math.floor)(value.value), value.roots)
    return None


def is_finite(state: Machine, call: Call) -> Value | None:
    """`math.isfinite(x)`, `torch.isnan(x)`: a question about data or the loss."""
    value = state.force(call.args[0]) if call.args else state.force(call.receiver) if call.receiver is not None else None
    if not isinstance(value, Opaque):
        return None
    made = state.opaque((call.name, value.key), state.recorder.text(call.node), value)
    made.causes |= {"loss"} if value.forwards or not value.causes else frozenset()
    made.forwards, made.attached = frozenset(), False
    made.name = "norm" if value.name == "norm" else ""
    return made


def dataclass_field(state: Machine, call: Call) -> Value | None:
    """`field(default_factory=make)` of a dataclass: what it makes."""
    if "default_factory" in call.keywords:
        return state.call_value(call.keywords["default_factory"], [])
    return call.keywords.get("default")


def deque(state: Machine, call: Call) -> Value | None:
    return Items([])


FUNCTIONS: dict[str, Handler] = {
    "islice": islice,
    "cycle": cycle,
    "count": counted,
    "chain": chain,
    "partial": partial,
    "repeat": repeat,
    "SimpleNamespace": namespace,
    "Namespace": namespace,
    "ceil": ceil,
    "floor": ceil,
    "isfinite": is_finite,
    "isnan": is_finite,
    "isinf": is_finite,
    "deque": deque,
    "field": dataclass_field,
    "EasyDict": namespace,
    "DotDict": namespace,
}
METHODS: dict[str, Handler] = {"isfinite": is_finite, "isnan": is_finite, "isinf": is_finite}
