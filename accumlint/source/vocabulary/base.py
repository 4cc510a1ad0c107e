"""How a framework tells the rehearsal what its calls do: names in, values and events out.

A vocabulary is a module with any of these names; a handler answers None when the matter is not its own, and the next is asked.

    PACKAGES    the packages that make it a framework's: it is asked only about programs that import one of them, before torch's own
    SIGNS       identifiers that show the framework as well as an import does (helpers that are handed its objects)
    shown       (index): whether the program shows the framework where no word does: by the way in which objects are used
    FUNCTIONS   handlers of calls by the last part of the name that is called
    METHODS     handlers of calls by the method's name
    ATTRIBUTES  what an attribute that nobody has set is, by name: (state, owner) -> value
    DECORATORS  what a decorator makes of a function of the source, by the decorator's last name: (state, decorator, function) -> value
    KINDS       calls, by name, that bring about events though no word of torch says so: what must not be passed over as idle
    LOOPS       names of calls that run a whole loop over data, micro-batches and updates
    LAUNCHERS   names of calls that call the function they are given first: `fabric.launch(main)`
    TRACKED     names whose calls matter to the events though they bring about none (the making of engines and wrappers)
    SIEVE       words without which no file holds a loop of this framework, where the usual ones are missing
    construct   (state, cls, call): an object of a class of the source that derives from the framework's
    entries     (index): the functions of the source that the framework itself calls, and how
    before      handler asked about every call before all others
    taken, fallback   handlers asked about every function of the source, and about every call that nobody took
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from accumlint.source.reading.facts import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, UNASKED, FunctionNode
from accumlint.source.reading.index import Index
from accumlint.source.rehearsal.values import Class, Function, Instance, Method, Opaque, Stream, Thing, Value, actor_of, make_actor
from accumlint.trace import Actor, Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

Handler = Callable[["Machine", "Call"], Value | None]
Attribute = Callable[["Machine", Value], Value | None]
Decorator = Callable[["Machine", ast.expr, Function], Value | None]
MODEL_NAME = re.compile(
    r"model|(^|_)net(work)?(_|$)|(^|_)g(enerator)?$|(^|_)d(iscriminator)?$|encoder|decoder|unet|student|actor|critic|policy|module",
    re.IGNORECASE,
)
MODEL_USES = frozenset(
    {"parameters", "named_parameters", "train", "eval", "state_dict", "no_sync", "zero_grad", "require_backward_grad_sync"}
)


@dataclass(frozen=True)
class Entry:
    """A function of the source that a framework calls: no loop of the source leads to it. `drive` plays the framework's loop."""

    function: FunctionNode
    drive: Callable[[Machine, Function], None]


class Vocabulary:
    """The words of several frameworks together."""

    def __init__(self, modules: Iterable[object]) -> None:
        self.functions: dict[str, list[Handler]] = defaultdict(list)
        self.methods: dict[str, list[Handler]] = defaultdict(list)
        self.attributes: dict[str, list[Attribute]] = defaultdict(list)
        self.decorators: dict[str, list[Decorator]] = defaultdict(list)
        self.kinds: dict[str, frozenset[Kind]] = {}
        self.loops: frozenset[str] = frozenset()
        self.launchers: frozenset[str] = frozenset()
        self.tracked: frozenset[str] = frozenset()
        self.names: dict[object, str] = {}  # of the frameworks, by their handlers
        self.modules = tuple(modules)
        for module in self.modules:
            self._take(module)
        self.constructors: list[Callable[[Machine, Class, Call], Value | None]] = self._all("construct")
        self.before: list[Handler] = self._all("before")
        self.taken: list[Handler] = self._all("taken")
        self.fallbacks: list[Handler] = self._all("fallback")

    def _take(self, module: object) -> None:
        tables = (
            ("FUNCTIONS", self.functions),
            ("METHODS", self.methods),
            ("ATTRIBUTES", self.attributes),
            ("DECORATORS", self.decorators),
        )
        for table, known in tables:
            for name, handler in getattr(module, table, {}).items():
                known[name].append(handler)
                if hasattr(module, "PACKAGES"):
                    self.names[handler] = described(module)[0]
        self.kinds |= {name: frozenset(kinds) for name, kinds in getattr(module, "KINDS", {}).items() if name not in self.kinds}
        self.loops |= frozenset(getattr(module, "LOOPS", ()))
        self.launchers |= frozenset(getattr(module, "LAUNCHERS", ()))
        self.tracked |= frozenset(getattr(module, "TRACKED", ()))

    def _all(self, name: str) -> list[Any]:
        return [getattr(module, name) for module in self.modules if hasattr(module, name)]

    def entries(self, index: Index) -> Iterator[Entry]:
        """The functions that the frameworks call."""
        for module in self.modules:
            if hasattr(module, "entries"):
                yield from (self._named(each, module) for each in module.entries(index))

    @staticmethod
    def _named(entry: Entry, module: object) -> Entry:
        def drive(state: Machine, function: Function) -> None:
            state.frameworks.add(described(module)[0])
            entry.drive(state, function)

        return replace(entry, drive=drive)

    def attribute(self, state: Machine, owner: Value, name: str) -> Value | None:
        """What an attribute that nobody has set is."""
        for handler in self.attributes.get(name, ()):
            found = handler(state, owner)
            if found is not None:
                self._note(state, handler)
                return found
        return None

    def decorate(self, state: Machine, name: str, decorator: ast.expr, function: Function) -> Value | None:
        """What a decorator of a framework makes of a function."""
        for handler in self.decorators.get(name, ()):
            found = handler(state, decorator, function)
            if found is not None:
                self._note(state, handler)
                return found
        return None

    def call(self, state: Machine, call: Call) -> Value | None:
        function = call.function
        if call.receiver is None and isinstance(function, Opaque) and function.owner is not None:
            call.receiver = state.force(function.owner)
            call.name = function.name or call.name
        name = call.path.rsplit(".", 1)[-1] if call.path else call.name
        found = self._first(self.before, state, call) if self.before else None
        if found is not None:
            return found
        if call.path or call.receiver is None:
            known = self.functions.get(name)
            found = self._first(known, state, call) if known else None
            if found is not None:
                return found
        if call.receiver is not None:
            known = self.methods.get(call.name)
            found = self._first(known, state, call) if known else None
            if found is not None:
                return found
        return self._first(self.fallbacks, state, call)

    def _first(self, handlers: Iterable[Handler], state: Machine, call: Call) -> Value | None:
        for handler in handlers:
            found = handler(state, call)
            if found is not None:
                if handler in self.names:
                    self._note(state, handler)
                return found
        return None

    def _note(self, state: Machine, handler: object) -> None:
        """Remembers that a framework took part."""
        name = self.names.get(handler)
        if name is not None:
            state.frameworks.add(name)

    def at_first(self, state: Machine, call: Call) -> Value | None:
        """What those say that are asked before all others."""
        return self._first(self.before, state, call)

    def function(self, state: Machine, call: Call, function: Function) -> Value | None:
        """A function of the source that is better taken by its name than followed: a clipper written by hand."""
        return self._first(self.taken, state, call) if self.taken else None

    def construct(self, state: Machine, cls: Class, call: Call) -> Value | None:
        for constructor in self.constructors:
            found = constructor(state, cls, call)
            if found is not None:
                return found
        return None


def described(module: object) -> tuple[str, str]:
    """The name of a vocabulary's framework, with the versions that it is about, and what is told of it."""
    name, _, rest = (module.__doc__ or "").partition("\n")[0].partition(": ")
    return name, rest


def last_name(value: Value | None) -> str:
    """The identifier that a value goes by in the source."""
    if isinstance(value, Opaque):
        return _last_name(value.text, value.name)
    if isinstance(value, Thing):
        return value.actor.name
    return ""


@lru_cache(8_192)
def _last_name(text: str, name: str) -> str:
    text = text.rstrip(")(")
    last = text.rsplit(".", 1)[-1]
    return last if "[" not in text else (name or last)


def role_of(state: Machine, value: Value | None) -> Role | None:
    """What an object is: by construction, by use, and last by name."""
    actor = actor_of(value)
    if actor is not None:
        return actor.role
    if not isinstance(value, Opaque) or value.forwards or value.path:
        return None
    name = last_name(value)
    known: Role | None = state.index.roles.get(name, UNASKED)
    if known is UNASKED:
        known = state.index.roles[name] = _role_by_name(name, state.index.usage.get(name, set()))
    return known


def _role_by_name(name: str, used: Set[str]) -> Role | None:
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
