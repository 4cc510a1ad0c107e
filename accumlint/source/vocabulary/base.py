"""How a framework tells the rehearsal what its calls do: names in, values and events out.

A vocabulary is a module with two tables, `FUNCTIONS` (by the last part of the name that is called) and `METHODS` (by the
method's name), and perhaps `construct(state, cls, call)` for classes of the source that derive from the framework's. A
handler answers None when the call is not its own; then the next one is asked.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from accumlint.source.rehearsal.values import Class, Function, Instance, Method, Opaque, Stream, Thing, Value, actor_of, make_actor
from accumlint.trace import Actor, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

Handler = Callable[["Machine", "Call"], Value | None]
MODEL_NAME = re.compile(
    r"model|(^|_)net(work)?(_|$)|(^|_)g(enerator)?$|(^|_)d(iscriminator)?$|encoder|decoder|unet|student|actor|critic|policy|module",
    re.IGNORECASE,
)
MODEL_USES = frozenset(
    {"parameters", "named_parameters", "train", "eval", "state_dict", "no_sync", "zero_grad", "require_backward_grad_sync"}
)


class Vocabulary:
    """The words of several frameworks together."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self.functions: dict[str, list[Handler]] = defaultdict(list)
        self.methods: dict[str, list[Handler]] = defaultdict(list)
        self.constructors: list[Callable[[Machine, Class, Call], Value | None]] = []
        for module in modules:
            for name, handler in module.FUNCTIONS.items():
                self.functions[name].append(handler)
            for name, handler in module.METHODS.items():
                self.methods[name].append(handler)
            if hasattr(module, "construct"):
                self.constructors.append(module.construct)
        self.taken: list[Handler] = [module.taken for module in modules if hasattr(module, "taken")]
        self.fallbacks: list[Handler] = [module.fallback for module in modules if hasattr(module, "fallback")]

    def call(self, state: Machine, call: Call) -> Value | None:
        function = call.function
        if call.receiver is None and isinstance(function, Opaque) and function.owner is not None:
            call.receiver = state.force(function.owner)
            call.name = function.name or call.name
        name = call.path.rsplit(".", 1)[-1] if call.path else call.name
        if call.path or call.receiver is None:
            found = _first(self.functions.get(name, ()), state, call)
            if found is not None:
                return found
        if call.receiver is not None:
            found = _first(self.methods.get(call.name, ()), state, call)
            if found is not None:
                return found
        return _first(self.fallbacks, state, call)

    def function(self, state: Machine, call: Call, function: Function) -> Value | None:
        """A function of the source that is better taken by its name than followed: a clipper written by hand."""
        return _first(self.taken, state, call) if self.taken else None

    def construct(self, state: Machine, cls: Class, call: Call) -> Value | None:
        for constructor in self.constructors:
            found = constructor(state, cls, call)
            if found is not None:
                return found
        return None


def _first(handlers: Iterable[Handler], state: Machine, call: Call) -> Value | None:
    for handler in handlers:
        found = handler(state, call)
        if found is not None:
            return found
    return None


def last_name(value: Value | None) -> str:
    """The identifier that a value goes by in the source."""
    if isinstance(value, Opaque):
        text = value.text.rstrip(")(")
        return text.rsplit(".", 1)[-1].split("[")[0] if "[" not in text else (value.name or text.rsplit(".", 1)[-1])
    if isinstance(value, Thing):
        return value.actor.name
    return ""


def role_of(state: Machine, value: Value | None) -> Role | None:
    """What an object is: by construction, by use, and last by name."""
    actor = actor_of(value)
    if actor is not None:
        return actor.role
    if not isinstance(value, Opaque) or value.forwards or value.path:
        return None
    name = last_name(value)
    used = state.index.usage.get(name, set())
    if SCALER_NAME.search(name) or "unscale_" in used or {"scale", "update", "step"} <= used:
        return Role.SCALER
    if SCHEDULER_NAME.search(name) and not OPTIMIZER_NAME.fullmatch(name) and "zero_grad" not in used:
        return Role.SCHEDULER
    if OPTIMIZER_NAME.search(name) or "param_groups" in used or ({"step", "zero_grad"} <= used and not used & {"parameters", "train"}):
        return Role.OPTIMIZER
    if "get_last_lr" in used:
        return Role.SCHEDULER
    if MODEL_NAME.search(name) or len(used & MODEL_USES) >= 2:
        return Role.MODEL
    return None


def as_actor(state: Machine, value: Value | None, role: Role) -> Actor | None:
    """The actor that a value is in this role; an object known only by name becomes one."""
    actor = actor_of(value)
    if actor is not None:
        return actor
    if isinstance(value, Opaque):
        value.actor = make_actor(role, value.text or role.value, known=False)
        if role is Role.MODEL:
            value.actor = replace(value.actor, wrapper=Wrapper.NONE)
        return value.actor
    if isinstance(value, Instance):
        value.actor = make_actor(role, value.cls.node.name)
        return value.actor
    return None


def raw_module(value: Value | None) -> Value | None:
    """The module behind any wrappers."""
    while isinstance(value, Thing) and value.inner is not None and value.actor.role is Role.MODEL:
        value = value.inner
    return value


def modules_of(value: Value | None) -> frozenset[int]:
    """The uids of a module and of the modules it is made of."""
    value = raw_module(value)
    found: set[int] = set()
    actor = actor_of(value)
    if actor is not None:
        found.add(actor.uid)
    if isinstance(value, Instance):
        for part in value.attributes.values():
            inner = actor_of(part)
            if inner is not None and inner.role is Role.MODEL and part is not value:
                found.add(inner.uid)
    return frozenset(found)


def parameters_owner(value: Value | None) -> Value | None:
    """The module whose parameters an argument like `model.parameters()` names."""
    if isinstance(value, Stream) and value.kind == "parameters" and value.parts:
        return value.parts[0]
    return None


def receiver_of(call: Call) -> Value | None:
    if isinstance(call.function, Method):
        return call.function.receiver
    return call.receiver
