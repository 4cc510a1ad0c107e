"""The values a rehearsal works with: what it knows, what it only names, and what it could not follow."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from accumlint.trace import Actor, Role, Wrapper
from accumlint.weight import Quantity, Weight

Key = tuple[Any, ...]
EACH_OF = "each of"  # begins the key of a dictionary that has an entry for each of something


class NestedKey(tuple[Any, ...]):
    """A key that is part of others, which are part of others in turn: its hash is worked out once."""

    number: int

    def __hash__(self) -> int:
        return self.number


def nested_key(parts: Key, known: dict[int, NestedKey]) -> Key:
    """The one key of these parts, so that comparing keys of any depth compares their own parts only."""
    try:
        number = place = hash(parts)
    except TypeError:  # a slice is part of it
        return parts
    found = known.get(place)
    while found is not None and found != parts:
        place += 1
        found = known.get(place)
    if found is None:
        found = known[place] = NestedKey(parts)
        found.number = number
    return found


_uids = itertools.count(1)


def fresh_uid() -> int:
    """A number no other object of this rehearsal carries."""
    return next(_uids)


def restart_uids() -> None:
    """Starts the numbers again, so that two rehearsals of the same code give the same objects the same numbers."""
    global _uids
    _uids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Root:
    """A number that the code leaves open: a setting, a constant with a name, the length of a loader."""

    key: Key
    text: str
    kind: str = "setting"  # setting | constant | length | size
    default: int | None = None


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a tensor, whatever its shape and type, and what it is called."""

    key: Key
    text: str


NO_ROOTS: frozenset[Root] = frozenset()


class Value:
    """Anything an expression can have as its value."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Known(Value):
    """A Python constant. `roots` are the open numbers that it was computed from, `root` the one it is exactly.

    `gates` are the roots it was tested against, as modulus or by comparison (for booleans).
    """

    value: Any
    roots: frozenset[Root] = NO_ROOTS
    root: Root | None = None
    gates: frozenset[Root] = NO_ROOTS
    origin: ast.AST | None = None  # the test that a flag was computed by
    _key: Key | None = field(default=None, init=False)

    @property
    def key(self) -> Key:
        key = self._key
        if key is None:
            key = self._key = ("known", repr(self.value))
        return key


NONE = Known(None)
TRUE = Known(True)
FALSE = Known(False)


class Opaque(Value):
    """A value that is only named: where it came from (`key`, `text`), and what is known of it all the same.

    `path` is the dotted import path for modules and their members. `causes` say what it depends on (data, loss, rank,
    clock, memory, or no more than the type of something); `agreed` that it was reduced over ranks. `forwards` are the
    FORWARD events behind a tensor, `weight` the coefficient of one unit in it, `born` the micro-batches whose data it
    holds. `quantity` marks a count.
    """

    # Most values are plain, and many are made: what is as it says here is not written into each of them.
    path: str = ""
    causes: frozenset[str] = frozenset()
    agreed: bool = False
    forwards: frozenset[int] = frozenset()
    weight: Weight | None = None
    reduced: bool = False  # a scalar, after .mean() or .sum()
    born: frozenset[int] = frozenset()
    quantity: Quantity | None = None
    guarded: bool = False  # cannot be zero
    scaler: Actor | None = None
    attached: bool = False
    gates: frozenset[Root] = NO_ROOTS
    actor: Actor | None = None
    element: Value | None = None
    negated: Opaque | None = None  # this is `not` of that one
    conjunction: tuple[Value, ...] = ()  # this is `and` (or `or`) of those
    owner: Value | None = None  # the object that this attribute or method belongs to
    name: str = ""  # the attribute's name

    def __init__(self, key: Key, text: str = "") -> None:
        self.key = key
        self.text = text
        self.attributes: dict[str, Value] = {}

    def copied(self) -> Opaque:
        """A value of which the same is known; what is set in one of them the other has not."""
        made = Opaque(self.key, self.text)
        made.__dict__.update(self.__dict__)
        made.attributes = {}
        return made


@dataclass(slots=True, eq=False)
class Phi(Value):
    """A value that depends on a condition nobody has had to answer yet."""

    condition: Opaque
    then: Value
    otherwise: Value


@dataclass(slots=True, eq=False)
class Items(Value):
    """A list, tuple or set. `open` when its true length is not known: then the items are samples."""

    items: list[Value]
    kind: str = "list"
    open: bool = False
    length: Root | None = None
    uid: int = field(default_factory=fresh_uid)
    data: bool = False  # its items are batches
    heads: bool = False  # the parts of one output of a model


@dataclass(slots=True, eq=False)
class Mapping(Value):
    """A dict or a namespace; keys that are not in it are Opaque."""

    items: dict[Any, Value]
    key: Key
    text: str = ""


@dataclass(slots=True, eq=False)
class Function(Value):
    """A function of the source with its closure; `self` is bound for methods."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    closure: Any  # Frame
    bound: Value | None = None
    owner: Class | None = None
    decorators: tuple[str, ...] = ()
    defaults: dict[str, Value] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name


@dataclass(slots=True, eq=False)
class Class(Value):
    node: ast.ClassDef
    closure: Any
    bases: tuple[Value, ...]
    members: dict[str, Value]
    uid: int = field(default_factory=fresh_uid)

    def find(self, name: str) -> Value | None:
        """The attribute of this class or of the first base that has it."""
        if name in self.members:
            return self.members[name]
        for base in self.bases:
            if isinstance(base, Class):
                found = base.find(name)
                if found is not None:
                    return found
        return None

    def ancestry(self) -> list[Value]:
        """The bases, followed ones expanded, nearest first."""
        seen: list[Value] = []
        for base in self.bases:
            seen.append(base)
            if isinstance(base, Class):
                seen.extend(base.ancestry())
        return seen


@dataclass(slots=True, eq=False)
class Instance(Value):
    """An object of a class of the source."""

    cls: Class
    attributes: dict[str, Value] = field(default_factory=dict)
    actor: Actor | None = None
    uid: int = field(default_factory=fresh_uid)
    wrapped_by: Thing | None = None


@dataclass(slots=True, eq=False)
class Thing(Value):
    """An object that takes part in training and was seen being made: model, optimizer, scaler, scheduler, loader."""

    actor: Actor
    attributes: dict[str, Value] = field(default_factory=dict)
    inner: Value | None = None  # the module behind a wrapper, the optimizer of a scheduler, the data of a loader
    sync: Value = TRUE
    wrapped_by: Thing | None = None
    length: Root | None = None
    parts: tuple[Value, ...] = ()
    supposed: tuple[tuple[Opaque, bool], ...] = ()  # the answers to open conditions that it was made under


@dataclass(slots=True, eq=False)
class Context(Value):
    """A context manager: null, no_sync (of a model, with sync off when `enabled`), no_grad, stack, scaled (apex), other.

    `entering` and `leaving` are what a framework does when the body begins and ends, given the interpreter and the node.
    """

    kind: str
    models: tuple[Value, ...] = ()
    enabled: Value = TRUE
    value: Value | None = None
    entered: list[Context] = field(default_factory=list)
    place: ast.AST | None = None
    entering: Callable[[Any, ast.AST], None] | None = None
    leaving: Callable[[Any, ast.AST], None] | None = None


@dataclass(slots=True, eq=False)
class Stream(Value):
    """Something to iterate: a range, enumerate, zip, islice, a user's generator, an iterator over a loader."""

    kind: str  # range | enumerate | zip | islice | generator | iterator | map | chunks | parameters | cycle
    parts: tuple[Value, ...] = ()
    start: Value | None = None
    stop: Value | None = None
    step: Value | None = None
    call: Callable[[Callable[[Value], None]], None] | None = None  # runs a generator's body, calling back at each yield
    uid: int = field(default_factory=fresh_uid)
    taken: int = 0  # how many items next() has drawn
    text: str = ""
    endless: bool = False  # a generator that never ends by itself


@dataclass(slots=True)
class Plan:
    """`count` turns, `item(i)` the value of each. `open`: the code does not fix the count. `endless`: it never ends."""

    count: int
    item: Callable[[int], Value]
    open: bool = False
    endless: bool = False
    root: Root | None = None
    data: bool = False


@dataclass(slots=True, eq=False)
class Partial(Value):
    function: Value
    arguments: tuple[Value, ...]
    keywords: dict[str, Value]


@dataclass(slots=True, eq=False)
class Method(Value):
    """A method of something that is not a class of the source, taken but perhaps not yet called."""

    receiver: Value
    name: str


@dataclass(slots=True, eq=False)
class Builtin(Value):
    name: str


@dataclass(slots=True, eq=False)
class Module(Value):
    """A module of the project; `path` is its file, or its folder where it is a package without one."""

    path: str
    dotted: str
    attributes: dict[str, Value] = field(default_factory=dict)


def actor_of(value: Value | None) -> Actor | None:
    """The actor that a value is, if it takes part in training."""
    if isinstance(value, (Thing, Opaque, Instance)):
        return value.actor
    return None


def make_actor(role: Role, name: str, *, wrapper: Wrapper = Wrapper.NONE, base: int | None = None, known: bool = True) -> Actor:
    return Actor(fresh_uid(), name, role, wrapper, base, known)


def key_of(value: Value) -> Key:
    """What identifies a value in a decision: the same expression over the same values has the same key."""
    if isinstance(value, (Opaque, Known, Mapping)):
        return value.key
    if isinstance(value, Phi):
        return ("phi", value.condition.key)
    if isinstance(value, Items) and not value.open and len(value.items) <= 8 and all(isinstance(item, Known) for item in value.items):
        return ("items", *(repr(item.value) for item in value.items if isinstance(item, Known)))
    if isinstance(value, (Items, Class, Instance, Stream)):
        return ("object", value.uid)
    if isinstance(value, Thing):
        return ("object", value.actor.uid)
    if isinstance(value, Module):
        return ("module", value.path)
    if isinstance(value, Builtin):
        return ("builtin", value.name)
    return ("object", id(value))


def born_of(value: Value) -> frozenset[int]:
    """The micro-batches whose data a value holds."""
    if value.__class__ is Opaque:
        return value.born
    if isinstance(value, Items):
        return frozenset().union(*(born_of(item) for item in value.items)) if value.items else frozenset()
    if isinstance(value, Mapping):
        return frozenset().union(*(born_of(item) for item in value.items.values())) if value.items else frozenset()
    return frozenset()


def forwards_of(value: Value) -> frozenset[int]:
    """The forwards behind a value."""
    if isinstance(value, Opaque):
        return value.forwards
    if isinstance(value, Items):
        return frozenset().union(*(forwards_of(item) for item in value.items)) if value.items else frozenset()
    return frozenset()


def setting_keys(value: Value) -> frozenset[Key]:
    """What a number is known by, here and wherever else it is given."""
    if isinstance(value, Known):
        return frozenset({value.root.key} if value.root is not None else ())
    return frozenset({value.key} if isinstance(value, Opaque) and not (value.forwards or value.born) else ())
