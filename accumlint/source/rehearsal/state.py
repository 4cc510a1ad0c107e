"""The state of a rehearsal, and the questions that every part of the interpreter asks of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from accumlint.source.reading.index import Index
from accumlint.source.reading.program import Program
from accumlint.source.reading.relevance import Relevance
from accumlint.source.rehearsal.elsewhere import Elsewhere
from accumlint.source.rehearsal.record import OpenTurn, Recorder
from accumlint.source.rehearsal.values import (
    FALSE,
    TRUE,
    Builtin,
    Class,
    Context,
    Data,
    Function,
    Items,
    Key,
    Known,
    Module,
    NestedKey,
    Opaque,
    Partial,
    Phi,
    Plan,
    Root,
    Stream,
    Value,
    key_of,
    nested_key,
)
from accumlint.source.rehearsal.worlds import MOST_STEPS, OutOfSteps, World, is_together
from accumlint.trace import Actor, Kind
from accumlint.weight import Quantity

DEEPEST_CALL = 14
MOST_CHOICES = 32  # of a value that hangs on conditions
SAMPLES = 4  # items of a list that are looked into


@dataclass(slots=True, eq=False)
class Frame:
    """The names of one running function."""

    names: dict[str, Value] = field(default_factory=dict)
    parent: Frame | None = None
    function: Function | None = None
    depth: int = 0
    declared_global: set[str] = field(default_factory=set)
    declared_nonlocal: set[str] = field(default_factory=set)
    yields: Any = None  # what to call with each yielded value
    hanging: list[int] = field(default_factory=list)  # the skips on which a new tensor without a graph is returned

    def find(self, name: str) -> Value | None:
        frame: Frame | None = self
        while frame is not None:
            found = frame.names.get(name)
            if found is not None:
                return found
            frame = frame.parent
        return None

    @property
    def top(self) -> Frame:
        frame = self
        while frame.parent is not None:
            frame = frame.parent
        return frame


SETTINGS_NAME = re.compile(r"(^|_)(args|arguments|config|cfg|opts?|options|settings|hparams)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Signal:
    """How a block of statements was left."""

    kind: str  # break | continue | return | raise
    value: Value | None = None


BREAK = Signal("break")
CONTINUE = Signal("continue")


class Leave(Exception):
    """A loop or with body that runs inside a generator's yield was left."""

    def __init__(self, signal: Signal, owner: object) -> None:
        super().__init__(signal.kind)
        self.signal = signal
        self.owner = owner


@dataclass(slots=True)
class Call:
    """A call with its arguments evaluated. `path` is the dotted import path of what is called, "" when unknown."""

    node: ast.Call
    name: str
    path: str
    function: Value
    receiver: Value | None
    args: list[Value]
    keywords: dict[str, Value]
    spread: bool = False  # *args or **kwargs that could not be unpacked

    def argument(self, position: int, *names: str) -> Value | None:
        for name in names:
            if name in self.keywords:
                return self.keywords[name]
        return self.args[position] if position < len(self.args) else None

    @property
    def values(self) -> list[Value]:
        return [*self.args, *self.keywords.values()]


def _inherit(made: Opaque, part: Opaque) -> None:
    if part.causes:
        made.causes |= part.causes
    if part.forwards:
        made.forwards |= part.forwards
    if part.born:
        made.born |= part.born
    if part.gates:
        made.gates |= part.gates
    if part.agreed:
        made.agreed = True


def unshifted(value: Opaque) -> tuple[Root, int]:
    """The open number of `n + 1`: n, and what is added to it."""
    kind, *parts = value.key
    if kind in {"Add", "Sub"} and len(parts) == 2 and parts[1][0] == "known" and parts[1][1].isdigit():
        number = int(parts[1][1])
        return Root(parts[0], value.text.rsplit("+" if kind == "Add" else "-", 1)[0].strip(" (")), number if kind == "Add" else -number
    return Root(value.key, value.text), 0


def _counts_data(value: Opaque) -> bool:
    """Whether a value holds more than settings and the number of ranks."""
    return value.weight is not None and any(factor.quantity not in {Quantity.WORLD, Quantity.CONSTANT} for factor in value.weight.factors)


PERSONAL = frozenset({"data", "loss", "rank", "clock", "memory"})  # causes of conditions that are no setting of the run


class State:
    """What the parts of the interpreter share. Each part adds the methods declared here without a body."""

    __slots__ = tuple(
        """
        index recorder relevance world globals program modules frame kept_frames holders steps running journal supposed sides forward
        no_grad contexts limits asked last_branch last_test entered covered managing model_calls consumers yield_roots counted_in
        loss_calls pieces keys names_of_data identities batch_counts sizes elsewhere _data prepares numbers_in bounds
        """.split()
    )  # found sooner than in a dict of this size

    def __init__(self, index: Index, relevance: Relevance, recorder: Recorder, world: World) -> None:
        self.index = index
        self.recorder = recorder
        self.relevance = relevance
        self.world = world
        self.globals = Frame()
        self.program: Program | None = None  # the files that the rehearsed one was followed into
        self.modules: dict[str, Frame] = {}  # the names of those that were imported so far, by path
        self.frame = self.globals
        self.kept_frames: list[Frame] = []  # those in which functions were made, which last as long as these do
        self.holders: list[Opaque] = []  # values that have attributes, each of which knows its owner
        self.steps = 0
        self.running: list[ast.AST] = []
        self.journal: list[tuple[dict[Any, Value], Any, Value | None]] | None = None
        self.supposed: list[tuple[Opaque, bool]] = []  # open conditions, and the answer of which the consequences are looked at now
        self.sides: dict[int, tuple[ast.If, set[bool]]] = {}  # of the if statements come to, the sides that are not ruled out
        self.forward: int | None = None  # the FORWARD event whose module body is being followed
        self.no_grad = 0
        self.contexts: list[Context] = []
        self.limits: list[str] = []
        self.asked: dict[int, tuple[int, Opaque]] = {}  # of the if statements come to, how deep and what decides them, where that is open
        self.last_branch: ast.If | None = None
        self.last_test: Value = TRUE  # of the last if statement
        self.entered: set[int] = set()  # ids of the functions that were run
        self.covered: set[int] = set()  # ids of the backward calls that were reached
        self.managing: list[ast.AST] = []  # the with items whose own context managers are being followed
        self.model_calls: list[ast.AST] = []  # calls of a wrapped model's own methods that are being followed
        self.consumers: list[ast.For | ast.AsyncFor] = []  # loops whose bodies run at the yields of generators
        self.yield_roots: list[Root] = []  # what bounds the loops that yield, in the generator being collected
        self.counted_in: dict[str, tuple[OpenTurn, ...]] = {}  # by its root, the turns in which a count was taken
        self.loss_calls: dict[int, ast.Call] = {}  # by the id of a function, its last call of one that forms a loss
        self.pieces: dict[int, str] = {}  # what the loops over the micro-batches of one window go over, by line
        self.keys: dict[int, NestedKey] = {}  # of the values that were named so far
        self.names_of_data: dict[Key, str] = {}  # of the tensors that were summed or multiplied by
        self.identities: dict[str, Data] = {}  # what those names stand for
        self.batch_counts: set[Key] = set()  # settings that a loader's length divides: `epochs = ceil(steps / len(loader))`
        self.elsewhere = Elsewhere()
        self.sizes: dict[Key, int] = {}  # the numbers of micro-batches' sizes and of the batches that they are cut from
        self.bounds: dict[Key, tuple[int, int, int]] = {}  # of settings that end a counter: it, the micro-batches and the events by then
        self.numbers_in: dict[Key, frozenset[Root]] = {}  # by a number nobody knows, the lengths and settings it was computed from

    def let_go(self) -> None:
        """Gives up all values at once: what they hold of each other the collector would have to go through."""
        for frame in (self.globals, *self.modules.values(), *self.kept_frames):
            frame.names.clear()
        for holder in self.holders:
            holder.attributes.clear()
        for kind in (State, type(self)):
            for name in kind.__slots__:
                delattr(self, name)

    # Provided by the other parts of the interpreter.
    def eval(self, node: ast.expr) -> Value:
        raise NotImplementedError

    def block(self, statements: Sequence[ast.stmt]) -> Signal | None:
        raise NotImplementedError

    def call(self, call: Call) -> Value:
        raise NotImplementedError

    def call_value(
        self, function: Value, args: list[Value], node: ast.Call | None = None, keywords: dict[str, Value] | None = None
    ) -> Value:
        raise NotImplementedError

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        raise NotImplementedError

    def item(self, value: Value, key: Value, node: ast.AST) -> Value:
        raise NotImplementedError

    def assign(self, target: ast.expr, value: Value) -> None:
        raise NotImplementedError

    def openness(self, value: Value, node: ast.AST) -> tuple[bool, Root | None]:
        """Whether an iterable's length is not fixed by the code, and the open number that it is."""
        raise NotImplementedError

    def take(self, node: ast.AST, key: tuple[Any, ...] | None = None) -> frozenset[int]:
        raise NotImplementedError

    def plan(self, value: Value, node: ast.AST, bound: int | None = None) -> Plan:
        raise NotImplementedError

    def next_of(self, value: Value, node: ast.AST) -> Value:
        raise NotImplementedError

    def collect(self, stream: Stream) -> tuple[list[Value], bool]:
        raise NotImplementedError

    def enter(self, context: Context, node: ast.AST) -> None:
        raise NotImplementedError

    def leave(self, context: Context, node: ast.AST) -> None:
        raise NotImplementedError

    def named_constant(self, name: str, node: ast.AST | None, value: Value) -> Value:
        raise NotImplementedError

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, owner: Class | None) -> Value:
        raise NotImplementedError

    def framework_attribute(self, owner: Value, name: str) -> Value | None:
        """What a framework knows an attribute to be that the source has not set."""
        raise NotImplementedError

    def decorated(self, decorators: Sequence[ast.expr], function: Function) -> Value:
        """What a framework's decorators make of a function."""
        raise NotImplementedError

    def method(self, receiver: Value, name: str, node: ast.AST) -> Value:
        raise NotImplementedError

    def module_attribute(self, module: Module, name: str) -> Value:
        raise NotImplementedError

    def each(self, value: Value, node: ast.AST, limit: int | None = None) -> list[Value]:
        raise NotImplementedError

    def forward_of(self, call: Call, model: Value, method: str = "forward") -> Value:
        raise NotImplementedError

    def actor_by_name(self, value: Value) -> Actor | None:
        raise NotImplementedError

    # Shared by all parts.
    def _bind(self, name: str, value: Value) -> None:
        frame = self.frame
        if name in frame.declared_global:
            frame = frame.top
        elif name in frame.declared_nonlocal and frame.parent is not None:
            outer = frame.parent
            while outer.parent is not None and name not in outer.names:
                outer = outer.parent
            frame = outer
        self.write(frame.names, name, value)

    def _unknown(self, node: ast.AST) -> Value:
        return self.opaque(("node", id(node)), self.recorder.text(node))

    def tick(self) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise OutOfSteps

    def opaque(self, key: Key, text: str = "", *parts: Value | None, **fields: Any) -> Opaque:
        """An Opaque that inherits from its parts what they depend on."""
        made = Opaque(nested_key(key, self.keys), text)
        for part in parts:
            kind = part.__class__
            if kind is Opaque:
                _inherit(made, part)  # type: ignore[arg-type]
            elif kind is Known:
                made.gates |= part.gates  # type: ignore[union-attr]
            elif kind is Phi:
                for side in choices(part):  # type: ignore[arg-type]
                    if isinstance(side, Opaque):
                        _inherit(made, side)
            elif kind is Items:
                for item in part.items[:SAMPLES]:  # type: ignore[union-attr]
                    if isinstance(item, Opaque):
                        _inherit(made, item)
                    elif isinstance(item, Known):
                        made.gates |= item.gates
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    def force(self, value: Value) -> Value:
        """Answers the condition that a value hangs on."""
        if value.__class__ is not Phi:
            return value
        while isinstance(value, Phi):
            holds = self.holds(value.condition, self._prefers_then(value), weight=self._stake(value))
            value = value.then if holds else value.otherwise
        return value

    def _stake(self, value: Value) -> int:
        """How many kinds of event hang on a choice between functions."""
        return max((len(self.index.kinds(one.node)) for one in choices(value) if isinstance(one, Function)), default=0)

    @contextmanager
    def supposing(self, condition: Opaque, holds: bool) -> Iterator[None]:
        """What is done here happens only if the condition is answered so."""
        self.supposed.append((condition, holds))
        try:
            yield
        finally:
            self.supposed.pop()

    def _prefers_then(self, phi: Phi) -> bool:
        """Features on first, several processes above all: the side that is something rather than nothing."""
        for condition, holds in ((phi.condition, True), (phi.condition.negated, False)):
            if isinstance(condition, Opaque) and is_together(condition.text):
                return holds
        if self._stands_in(phi):
            return False
        if isinstance(phi.then, Function) and self._stake(phi.otherwise) > self._stake(phi.then) == 0:
            return False  # a loop that trains before one that evaluates
        if isinstance(phi.then, Opaque) and phi.then.key[0] == "call" and self._is_criterion(phi.otherwise):
            return False  # a criterion that is known before an object that nobody followed
        return not self._is_nothing(phi.then) or self._is_nothing(phi.otherwise)

    @staticmethod
    def _stands_in(phi: Phi) -> bool:
        """`if args is None: args = Arguments()`: whoever trains gives arguments of their own."""
        given = phi.otherwise
        if phi.condition.key[0] != "none" or not isinstance(given, Opaque) or given.key != phi.condition.key[1]:
            return False
        return given.key[0] == "parameter" and SETTINGS_NAME.search(given.text) is not None

    @staticmethod
    def _is_criterion(value: Value) -> bool:
        return any(
            isinstance(one, Partial) and isinstance(one.function, Opaque) and one.function.path.startswith("torch.nn.functional.")
            for one in choices(value)
        )

    @staticmethod
    def _is_nothing(value: Value) -> bool:
        if isinstance(value, Known):
            return value.value is None or value.value is False
        return (isinstance(value, Context) and value.kind == "null") or (isinstance(value, Builtin) and value.name == "nullcontext")

    def truth(self, value: Value, preference: bool = True, *, flips: bool = True, weight: int = 0) -> bool:
        """Whether a value is true here; an unknown one is decided as preferred and stays so."""
        if value.__class__ is Phi:
            value = self.force(value)
        if isinstance(value, Known):
            try:
                return bool(value.value)
            except Exception:  # a constant whose truth Python refuses
                return preference
        if isinstance(value, Opaque):
            return self.holds(value, preference, flips=flips, weight=weight)
        items = getattr(value, "items", None)
        if isinstance(items, (list, dict)) and not getattr(value, "open", False):
            return bool(items)
        return True

    def holds(self, condition: Opaque, preference: bool, *, flips: bool = True, weight: int = 0) -> bool:
        if condition.negated is not None:
            return not self.truth(condition.negated, not preference, flips=flips, weight=weight)
        if condition.conjunction:
            kind, *parts = condition.conjunction
            assert isinstance(kind, Known)
            answers = (self.truth(part, preference, flips=flips, weight=weight) for part in parts)
            return all(answers) if kind.value == "and" else any(answers)
        personal = bool(condition.causes & PERSONAL)
        return self.world.decide(condition.key, condition.text, preference, flips=flips and not personal, weight=weight)

    def number(self, value: Value, *, role: str = "") -> Known | None:
        """The value as a number, if it has one here; an open setting gets the number of this world.

        `role` "modulus" or "bound" lets the name of a setting that nothing else has told about decide that it is K.
        """
        if value.__class__ is Phi:
            value = self.force(value)
        if isinstance(value, Known):
            return value if isinstance(value.value, (int, float)) else None
        if isinstance(value, Opaque) and role and value.key in self.sizes:
            return Known(self.sizes[value.key])
        if not isinstance(value, Opaque) or value.forwards or value.born or value.quantity is not None:
            return None
        root, offset = unshifted(value)
        if role and root.key not in self.world.knowledge.accumulations and self.world.knowledge.is_accumulation_name(root.text):
            self.world.knowledge.accumulations[root.key] = root
        chosen = self.world.number(root)
        return None if chosen is None else Known(chosen + offset, frozenset({root}), None if offset else root)

    def rooted(self, value: int, root: Root) -> Known:
        """A named constant: open, so K's value where it turns out to be K."""
        if self.world.knowledge.is_accumulation_name(root.text):
            self.world.knowledge.accumulations.setdefault(root.key, root)
        chosen = self.world.number(root)
        return Known(value if chosen is None else chosen, frozenset({root}), root)

    def christen(self, name: str, value: Value) -> None:
        """An open number that is given a name of K is K."""
        if not self.world.knowledge.is_accumulation_name(name):
            return
        root = value.root if isinstance(value, Known) else None
        if isinstance(value, Opaque) and not (
            value.forwards
            or value.born
            or value.causes
            or _counts_data(value)
            or value.path
            or value.actor
            or value.name in self.index.functions
        ):
            root = Root(value.key, value.text or name)
        if root is not None and root.kind in {"setting", "constant"} and root.key not in self.world.knowledge.lengths:
            self.world.knowledge.learn_accumulation(root)

    def gates_update(self, node: Sequence[ast.stmt]) -> bool:
        """Whether statements hold a step or a zero but no backward: what a boundary guards."""
        kinds = self.index.kinds(node)
        alone = Kind.ZERO in kinds and Kind.SYNC_OFF not in kinds  # what clears beside `no_sync` evaluates
        return (alone or bool(kinds & {Kind.STEP, Kind.SCALER_UPDATE})) and Kind.BACKWARD not in kinds

    def write(self, store: dict[Any, Value], key: Any, value: Value) -> None:
        """Assigns into an object's attributes so that an untaken branch can be undone."""
        if self.journal is not None:
            self.journal.append((store, key, store.get(key)))
        store[key] = value

    def key(self, *values: Value) -> Key:
        return tuple([key_of(value) for value in values])

    @staticmethod
    def boolean(value: bool, source: Value | None = None) -> Known:
        if isinstance(source, Known) and (source.roots or source.gates):
            return Known(value, source.roots, None, source.gates)
        return TRUE if value else FALSE


def choices(value: Value) -> list[Value]:
    """What a value can come to, by whatever conditions; of values that hang on many conditions the first ones."""
    found: list[Value] = []
    pending, seen = [value], {id(value)}
    while pending and len(seen) < MOST_CHOICES:
        one = pending.pop(0)
        if not isinstance(one, Phi):
            found.append(one)
            continue
        for side in (one.then, one.otherwise):
            if id(side) not in seen:
                seen.add(id(side))
                pending.append(side)
    return found
