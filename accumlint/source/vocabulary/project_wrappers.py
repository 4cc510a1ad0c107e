"""A project's own wrappers, as `[tool.accumlint.wrappers]` names them: which calls are meant. What they do is told in `wrapper_events`.

`"mylib.amp.Scaler.__call__"` is an object of that class being called, `"mylib.amp.Scaler.finish"` one of its methods,
`"mylib.train.backward_and_step"` a function, however it was imported. An object is of a class where it was made by it, is
annotated with it, or carries its name (`native_scaler` for `NativeScaler`).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.values import NONE, Class, Function, Instance, Opaque, Value
from accumlint.source.vocabulary.base import last_name, receiver_of
from accumlint.source.vocabulary.wrapper_events import KINDS, carry_out, is_held
from accumlint.trace import Kind

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

Wrappers = tuple[tuple[str, tuple[str, ...]], ...]
SCALING = frozenset({"unscale", "update"})  # what only a gradient scaler does


class Wrapper(NamedTuple):
    """One entry of the configuration: `owner` is the last but one part of its name, "" where there is none."""

    path: str
    owner: str
    name: str
    actions: tuple[str, ...]

    @property
    def is_method(self) -> bool:
        return self.owner[:1].isupper() or self.name == "__call__"


@cache
def project_wrappers(wrappers: Wrappers) -> ProjectWrappers:
    """The vocabulary of a configuration's wrappers; the same for the same configuration."""
    return ProjectWrappers(wrappers)


@cache
def signs(wrappers: Wrappers) -> tuple[bytes, ...]:
    """Words of which a file that calls one of the wrappers holds at least one."""
    found: set[str] = set()
    for each in project_wrappers(wrappers).wrappers:
        found |= {each.owner, _snake(each.owner)} if each.name == "__call__" else {each.name}
    return tuple(sorted(word.encode() for word in found))


class ProjectWrappers:
    """A vocabulary; it is asked before all others, for nobody knows a project better than its configuration."""

    def __init__(self, wrappers: Wrappers) -> None:
        self.wrappers = tuple(_parsed(path, actions) for path, actions in wrappers)
        self._scalers = {each.owner for each in self.wrappers if each.is_method and SCALING & set(each.actions)}

    def before(self, state: Machine, call: Call) -> Value | None:
        """What the call of a wrapper that is not followed does."""
        if is_held(state, call):
            return NONE
        for each in self.wrappers:
            if _means(state, call, each):
                return self._done(state, call, each)
        made = next((each for each in self.wrappers if each.is_method and call.path and _same(call.path, _class_of(each))), None)
        if made is None:
            return None
        key = ("wrapper object", made.owner, call.node.lineno, call.node.col_offset, state.steps)
        value = state.opaque(key, state.recorder.text(call.node), name=made.owner)
        state.memory[key] = call
        return value

    def taken(self, state: Machine, call: Call) -> Value | None:
        """What a wrapper that could be followed does, as it is configured."""
        function = call.function
        if not isinstance(function, Function):
            return None
        owner = function.owner
        for each in self.wrappers:
            if each.name != function.name:
                continue
            if _is_or_derives(owner, each.owner) if owner is not None else not each.is_method:
                return self._done(state, call, each)
        return None

    def _done(self, state: Machine, call: Call, wrapper: Wrapper) -> Value:
        function = call.function
        bound = function.bound if isinstance(function, Function) else None
        owner = bound or (function if wrapper.name == "__call__" else receiver_of(call))
        return carry_out(state, call, wrapper.actions, owner, scales=wrapper.owner in self._scalers or bool(SCALING & set(wrapper.actions)))

    def recognise(self, index: Index, call: ast.Call) -> frozenset[Kind]:
        """The kinds of event that a call brings about, told without a rehearsal."""
        found: frozenset[Kind] = frozenset()
        for each in self.wrappers:
            if _looks_like(index, call, each):
                found |= frozenset(KINDS[action] for action in each.actions)
        return found


def _parsed(path: str, actions: Sequence[str]) -> Wrapper:
    *above, name = path.split(".")
    return Wrapper(path, above[-1] if above else "", name, tuple(actions))


def _class_of(wrapper: Wrapper) -> str:
    return wrapper.path.rpartition(".")[0]


def _same(written: str, configured: str) -> bool:
    """Whether two import paths mean the same: one may be relative, or lead through a package that passes the name on."""
    one, other = written.lstrip(".").split("."), configured.split(".")
    if one[-1] != other[-1]:
        return False
    short, long = sorted((one, other), key=len)
    return short == long[-len(short) :] or short[0] == long[0]


def _means(state: Machine, call: Call, wrapper: Wrapper) -> bool:
    if call.path and not wrapper.name.startswith("__") and _same(call.path, wrapper.path):
        return True
    if wrapper.name == "__call__":
        return _is_object(state, call.function, wrapper.owner)
    return call.name == wrapper.name and bool(wrapper.owner) and _is_object(state, receiver_of(call), wrapper.owner)


def _is_object(state: Machine, value: Value | None, cls: str) -> bool:
    """Whether a value is an object of a class: as it was made, or as its name tells."""
    value = state.force(value) if value is not None else None
    if isinstance(value, Instance):
        return _is_or_derives(value.cls, cls)
    if not isinstance(value, Opaque) or value.path or value.forwards:
        return False
    if value.key[0] == "wrapper object":
        return bool(value.key[1] == cls)
    return _goes_by(state.index, last_name(value), cls) or _goes_by(state.index, value.name, cls)


def _is_or_derives(cls: Class | None, name: str) -> bool:
    if cls is None:
        return False
    return name in {_own_name(one) for one in (cls, *cls.ancestry())}


def _own_name(value: Value) -> str:
    return value.node.name if isinstance(value, Class) else value.name if isinstance(value, Opaque) else ""


def _goes_by(index: Index, name: str, cls: str) -> bool:
    return bool(name) and (_squashed(name) == _squashed(cls) or name in _names_of(index, cls))


def _squashed(name: str) -> str:
    return name.replace("_", "").lower()


def _snake(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() and at else char.lower() for at, char in enumerate(name))


def _names_of(index: Index, cls: str) -> frozenset[str]:
    """The names that stand for objects of a class in a file: they are given one, or annotated with it."""
    return index.once(f"objects of {cls}", index.tree, lambda tree: frozenset(_find_names(tree, cls)))


def _find_names(tree: ast.AST, cls: str) -> set[str]:
    found: set[str] = set()
    for node in walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None and _names_class(node.annotation, cls):
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and (_names_class(node.annotation, cls) or _makes(node.value, cls)):
            found.add(terminal(node.target))
        elif isinstance(node, ast.Assign) and _makes(node.value, cls):
            found.update(terminal(target) for target in node.targets)
    return found


def _names_class(annotation: ast.expr, cls: str) -> bool:
    """`Scaler`, `amp.Scaler`, `"Scaler"`, `Scaler | None`, `Optional[Scaler]`."""
    return any(
        (isinstance(part, (ast.Name, ast.Attribute)) and terminal(part) == cls)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.rpartition(".")[2] == cls)
        for part in walk(annotation)
    )


def _makes(value: ast.expr | None, cls: str) -> bool:
    return isinstance(value, ast.Call) and terminal(value.func) == cls


def _looks_like(index: Index, call: ast.Call, wrapper: Wrapper) -> bool:
    name = terminal(call.func)
    if wrapper.name == "__call__":
        return _goes_by(index, name, wrapper.owner) and not _makes(call, wrapper.owner)
    if name != wrapper.name:
        return False
    if not wrapper.is_method:
        return True
    receiver = terminal(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    return _goes_by(index, receiver, wrapper.owner) or (receiver in {"self", "cls", "super"} and wrapper.owner in index.identifiers)
