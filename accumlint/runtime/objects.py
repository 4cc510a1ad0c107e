"""The objects that take part in a run, by number, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from accumlint.runtime.places import user_frames
from accumlint.runtime.turns import takes_snapshots
from accumlint.trace import Role, Wrapper

MAX_TRIES = 3


@dataclass(slots=True)
class Entry:
    """One object as the report shows it. `owns` are the ids of the parameters that a module or optimizer holds."""

    uid: int
    role: str
    name: str
    type: str
    wrapper: str = Wrapper.NONE.value
    base: int | None = None
    options: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    owns: frozenset[int] = frozenset()
    tries: int = 0  # how often its name was looked for


@dataclass(slots=True)
class WrapperInfo:
    """A data-parallel wrapper. `sync()` reads its flag at this moment."""

    uid: int
    kind: Wrapper
    options: frozenset[str]
    sync: Callable[[], bool]
    module: Callable[[], Any]


class Objects:
    """Gives every object a number that it keeps; an object that is gone never hands its number on."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._known: dict[int, tuple[Any, int]] = {}
        self._wrappers: dict[int, WrapperInfo] = {}
        self._inside: dict[int, tuple[Any, WrapperInfo]] = {}

    def uid(self, thing: Any, role: Role, *, name: str = "", **fields: Any) -> int:
        known = self._known.get(id(thing))
        if known is not None and known[0]() is thing:
            self._rename(thing, self.entries[known[1]])
            return known[1]
        number = len(self.entries)
        self._known[id(thing)] = (_hold(thing), number)
        entry = Entry(number, role.value, name or _name_of(thing) or type(thing).__name__, type(thing).__name__, **fields)
        self.entries.append(entry)
        return number

    def _rename(self, thing: Any, entry: Entry) -> None:
        """An object that was met while it was being made has no name yet."""
        if entry.name == entry.type and entry.tries < MAX_TRIES:
            entry.tries += 1
            entry.name = _name_of(thing) or entry.name

    def known(self, thing: Any) -> int | None:
        """The number of an object that has one."""
        held = self._known.get(id(thing))
        return held[1] if held is not None and held[0]() is thing else None

    def entry(self, uid: int) -> Entry:
        return self.entries[uid]

    def models(self) -> Iterable[Any]:
        """The modules that still exist."""
        for holds, uid in tuple(self._known.values()):
            thing = holds()
            if thing is not None and self.entries[uid].role == Role.MODEL.value:
                yield thing

    def register_wrapper(self, module: Any, kind: Wrapper, inner: Any, options: frozenset[str], sync: Callable[[], bool]) -> WrapperInfo:
        base = None if inner is module else self.uid(inner, Role.MODEL, owns=parameters_of(inner))
        uid = self.uid(module, Role.MODEL)
        entry = self.entry(uid)
        entry.wrapper, entry.base, entry.options, entry.owns = kind.value, base, sorted(options), parameters_of(module)
        if base is not None and self.entry(base).name == self.entry(base).type:
            self.entry(base).name = entry.name
        info = WrapperInfo(uid, kind, options, sync, _hold(module))
        self._wrappers[id(module)] = info
        if base is not None:
            for part in inner.modules():
                self._inside[id(part)] = (_hold(part), info)
        return info

    def drop_wrapper(self, module: Any) -> None:
        """The module is part of another wrapper now, whose flag is the one that counts."""
        self._wrappers.pop(id(module), None)

    def wrapper_of(self, module: Any) -> WrapperInfo | None:
        """The wrapper that a module is."""
        info = self._wrappers.get(id(module))
        return info if info is not None and info.module() is module else None

    def wrapper_around(self, module: Any) -> WrapperInfo | None:
        """The wrapper whose inner module this is, or is part of."""
        held = self._inside.get(id(module))
        return held[1] if held is not None and held[0]() is module and held[1].module() is not None else None

    @property
    def wrappers(self) -> Iterable[WrapperInfo]:
        return [info for info in self._wrappers.values() if info.module() is not None]


def parameters_of(module: Any) -> frozenset[int]:
    return frozenset(id(parameter) for parameter in module.parameters())


def _hold(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _name_of(thing: Any) -> str:
    """How the user's code calls it: a variable, or an attribute of `self`."""
    for frame in user_frames(3):
        variables = frame.f_globals if frame.f_code.co_name == "<module>" else _arguments(frame)
        for name, value in tuple(variables.items()):
            if value is thing and not name.startswith("__"):
                return name
            for part, inner in tuple((getattr(value, "_modules", None) or {}).items()):
                if inner is thing:
                    return f"{name}.{part}"
        owner = variables.get("self")
        for name, value in tuple(getattr(owner, "__dict__", {}).items()):
            if value is thing:
                return f"self.{name}"
    return ""


def _arguments(frame: Any) -> dict[str, Any]:
    """A function's variables, without leaving them in the copy that the frame keeps."""
    import inspect

    if takes_snapshots(frame.f_code):
        return {}
    variables = frame.f_locals
    found = dict(variables)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and type(variables) is dict:
        variables.clear()
    return found
