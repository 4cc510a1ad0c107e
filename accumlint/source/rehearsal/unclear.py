"""Whether synchronisation or the update hangs on what nobody can follow and what may differ between the micro-batches of a window.

A condition that stays open has one answer for a whole rehearsal only as long as it is the same: `is_last(i)` is asked anew in every turn,
and whatever is answered, a window made of such answers is none that the code runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode
from accumlint.source.reading.nodes import every
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.branches import seen
from accumlint.source.rehearsal.state import PERSONAL, Call, State
from accumlint.source.rehearsal.values import Instance, Key, Known, Opaque, Phi, Value, key_of
from accumlint.trace import PERHAPS, Event, Guard, Kind, Place
from accumlint.weight import Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.unfollowed import Unfollowed

HANGING = frozenset({Kind.ZERO, Kind.CLIP, Kind.SCHEDULE, Kind.SAVE, Kind.AVERAGE, Kind.UNSCALE, Kind.SCALER_UPDATE})
asks_for_boundary = found_in(re.compile(r"boundary|(^|[._])(is_)?(last|final)|should_|accum|window", re.IGNORECASE))
is_boundary = found_in(re.compile(r"boundary|(^|_)is_(last|final)|(^|_)should_(step|update)", re.IGNORECASE))
DEEPEST = 6  # how far a condition is followed to the objects that it is about
advances = found_in(re.compile(r"(^|_)(next|pop|fetch|advance|tick|pull|poll)(_|$)", re.IGNORECASE))
tells = found_in(re.compile(r"(^|_)(log|print|write|report|info|debug|warn|warning|save|display|record)(_|$)", re.IGNORECASE))
tells_of_windows = found_in(re.compile(r"accum|micro|window|split|chunk|repeat|(^|[^a-z])every", re.IGNORECASE))
reduces = found_in(re.compile(r"reduce|gather|sync|(^|_)sum(_|$)|total|agree|_$", re.IGNORECASE))
COUNTS = frozenset({Quantity.UNITS, Quantity.WINDOW_UNITS})
is_harmless_context = found_in(
    re.compile(r"autocast|profil|timer|record|eval|grad|inference|summon|gather|trace|range|tqdm", re.IGNORECASE)
)


def ask_for_sync(state: State, value: Value) -> None:
    """Remembers the open conditions behind a value that switches synchronisation, and the numbers that counters are compared with."""
    for leaf in _leaves(value):
        state.sync_asked.setdefault(leaf.text, set()).update(_asked(state, leaf))
    known = state.world.knowledge.accumulations
    if not isinstance(value, Known) or (value.origin is not None and state.index.has_modulo(value.origin)):
        return
    for root in value.gates:
        if root.kind == "setting" and root.key not in known:
            state.sync_asked.setdefault(root.text, set()).update((root.key, ("counter", *root.key)))


def ask_of_sides(state: State, node: ast.If, test: Value) -> None:
    """The same for an if statement that switches synchronisation or holds the update; not where a loss or this rank decides."""
    if isinstance(test, Known) and not test.gates:
        return
    branch = seen(state.index, node)
    either = branch.kinds ^ branch.other or _after_leaving(state, node)
    if Kind.SYNC_OFF in either:
        ask_for_sync(state, test)
    if not isinstance(test, Opaque) or test.causes & PERSONAL - {"data"} or not either & {Kind.STEP, *HANGING}:
        return
    asked = state.asked_at.setdefault(state.recorder.place(node.test), {})
    for leaf in _leaves(test):
        asked.setdefault(leaf.text, set()).update(_asked(state, leaf))


def _after_leaving(state: State, node: ast.If) -> frozenset[Kind]:
    """`if not due(i): continue`: what waits for the answer stands behind it; where it leaves out a backward it is no boundary."""
    rest = (
        state.index.kinds(state.index.following(node)) if any(isinstance(part, ast.Continue) for part in node.body) else frozenset[Kind]()
    )
    return frozenset() if Kind.BACKWARD in rest else rest


def _asked(state: State, leaf: Opaque) -> Iterator[Key]:
    """What a condition is about: one thing, or a new one each time, where an object moved on or is asked where it is."""
    yield leaf.key
    if _is_of(leaf.key, state.moved) or _asks(leaf):
        yield ("moved", *leaf.key)


def _is_of(key: object, moved: set[Key], depth: int = 0) -> bool:
    """Whether a value is read from one of these objects: `state.count`, `state.count >= k`."""
    if not isinstance(key, tuple) or not key or depth > DEEPEST:
        return False
    if key[0] in {".", "[]"} and len(key) > 1 and key[1] in moved:
        return True
    return key[0] in {".", "[]", "compare", "not"} and any(_is_of(part, moved, depth + 1) for part in key[1:])


def is_flag(test: Value) -> bool:
    """Whether a condition is a mark that comes with the data, `for batch, last in windows`, or an answer about the boundary."""
    leaves = list(_leaves(test))
    return bool(leaves) and all(_marks(leaf) for leaf in leaves)


def _marks(leaf: Opaque) -> bool:
    if leaf.forwards or leaf.causes & PERSONAL - {"data"} or "data" not in leaf.causes:
        return False
    return leaf.key[0] in {".", "[]", "part"} or _asks(leaf)


def _asks(leaf: Opaque) -> bool:
    """Whether a condition is the answer of a call or a property that asks for the boundary, whatever it was named then."""
    if leaf.key[0] == "." and len(leaf.key) > 2:
        return is_boundary(str(leaf.key[2]))
    called = leaf.key[1] if leaf.key[0] == "call" and len(leaf.key) > 1 else ()
    name = called[-1] if isinstance(called, tuple) and called else ""
    return leaf.key[0] == "call" and (asks_for_boundary(leaf.text) or (isinstance(name, str) and asks_for_boundary(name)))


def hang_on(state: State, nodes: Iterable[ast.AST], asked: Value, text: str) -> None:
    """Remembers that one of several ways is taken by a value that nobody can follow: `match phase(i):`, `actions[phase(i)]()`."""
    if not isinstance(asked, Opaque) or asked.causes & PERSONAL - {"data"}:
        return
    keys = set(_asked(state, asked))
    for node in nodes:
        kinds = state.index.kinds(node)
        if Kind.SYNC_OFF in kinds:
            state.sync_asked.setdefault(text, set()).update(keys)
        if kinds & {Kind.STEP, *HANGING}:
            at = node.subject if isinstance(node, ast.Match) else node
            state.asked_at.setdefault(state.recorder.place(at), {}).setdefault(text, set()).update(keys)


def hang_on_calls(state: State, node: ast.expr, asked: Value) -> None:
    """`due(i) and update()`, `update() if due(i) else wait()`: what the functions do that are called in it hangs on the answer."""
    if state.recorder.turns and state.index.kinds(node) & {Kind.STEP, *HANGING}:
        calls = (part for part in every(node, ast.Call) if isinstance(part, ast.Call))
        hang_on(state, [function for call in calls for function in state.index.callees(call)], asked, state.recorder.text(node))


def runs_decorated(state: State, function: FunctionNode) -> None:
    """`@accumulate(k)`: a decorator that nobody can follow and that is told of windows may call what it decorates more or less often."""
    for decorator in state.index.once("reshaping", function, _reshaping):
        name = decorator.func if isinstance(decorator, ast.Call) else decorator
        if state.index.kinds(function) & {Kind.BACKWARD, Kind.STEP} and isinstance(state.force(state.eval(name)), Opaque):
            text = state.recorder.text(decorator)
            for asked in (state.sync_asked, state.asked_at.setdefault(state.recorder.place(function), {})):
                asked.setdefault(text, set()).update({("decorated", 0), ("decorated", 1)})


def _reshaping(function: ast.AST) -> list[ast.expr]:
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    return [one for one in function.decorator_list if tells_of_windows(ast.unparse(one))]


def enters(state: State, context: Value) -> None:
    """A context manager that nobody can follow may switch the synchronisation of the model that it was made with."""
    if isinstance(context, Opaque) and _is_lent(context.key, state.lent):
        state.sync_asked.setdefault(context.text, set()).update((context.key, ("moved", *context.key)))


@contextmanager
def counting(state: State, context: Value, item: ast.withitem, body: Sequence[ast.stmt]) -> Iterator[None]:
    """`with Accumulator(optimizer, k):` of a make that nobody knows may hold back the updates in its block."""
    if not isinstance(context, Opaque) or Kind.STEP not in state.index.kinds(body) or not tells_of_windows(str(context.key)):
        yield
        return
    place, text = state.recorder.place(item.context_expr), state.recorder.text(item.context_expr)
    state.asked_at.setdefault(place, {}).setdefault(text, set()).update({("entered", 0), ("entered", 1)})
    state.recorder.guards.append(Guard(place, text, "setting"))
    try:
        yield
    finally:
        state.recorder.guards.pop()


def may_be_entered(state: State, call: Call) -> bool:
    """Whether what a call gives may be entered as a context, at once or later, and may switch something meanwhile."""
    if is_harmless_context(call.name):
        return False
    return state.index.once("enters names", state.index.tree, _enters_names) or id(call.node) in _managed_calls(state)


def _is_lent(key: object, lent: set[Key], depth: int = 0) -> bool:
    """Whether a value is one of these or comes out of one."""
    if not isinstance(key, tuple) or not key or depth > DEEPEST:
        return False
    return key in lent or any(_is_lent(part, lent, depth + 1) for part in key[1:])


def may_divide(state: Unfollowed, call: Call) -> None:
    """`divide_gradients(model, k)`, `parameter.register_hook(divider(k))`: who is told of K and of gradients may divide them by it."""
    values = [state.force(value) for value in call.values]
    hooks = call.name.startswith("register_")
    if any(is_accumulation(state, value) or (hooks and isinstance(value, Opaque) and is_told(state, value.key)) for value in values) and (
        hooks or any(state.holds_gradients(value) for value in values)
    ):
        state.recorder.fact("may-divide", call.node)


def is_told(state: State, key: Key) -> bool:
    """Whether a value was made by a call that is given K: a loader that may well give whole windows only."""
    if key[0] in {"part", "[]"}:
        return isinstance(key[1], tuple) and is_told(state, key[1])
    return key[0] == "call" and any(_is_of_k(state, part) for part in key[2:] if isinstance(part, tuple))


def _is_of_k(state: State, key: Key) -> bool:
    """Whether a value is K, as far as it was found out or by its name."""
    knowledge = state.world.knowledge
    name = key[-1] if key and key[0] in {"parameter", ".", "[]"} else None
    return key in knowledge.accumulations or (isinstance(name, str) and knowledge.is_accumulation_name(name.strip("'")))


def is_accumulation(state: State, value: Value) -> bool:
    """Whether a value is K, or made of K alone: `1 / k`."""
    value = state.force(value)
    known = state.world.knowledge.accumulations
    if isinstance(value, Known):
        return bool(value.roots) and all(root.key in known for root in value.roots)
    return isinstance(value, Opaque) and _is_of_k(state, value.key)


def moves_on(state: State, call: Call) -> None:
    """`state.advance()`: an object that nobody knows may be another one afterwards."""
    owner = state.force(call.receiver) if call.receiver is not None else None
    if not isinstance(owner, (Opaque, Instance)) or owner.actor is not None or tells(call.name):
        return
    if advances(call.name) or (state.recorder.turns and id(call.node) in state.index.once("said", state.index.tree, _said)):
        state.moved.add(key_of(owner))


def may_agree(state: State, call: Call) -> None:
    """`sum_over_ranks_(count)`: a function that nobody knows and that is called for what it does to a count may reduce it in place."""
    if tells(call.name) or not (call.receiver is None or reduces(call.name)):
        return
    for value in map(state.force, call.values):
        counted = isinstance(value, Opaque) and value.quantity in COUNTS and not value.forwards
        if counted and isinstance(value, Opaque) and id(call.node) in state.index.once("said", state.index.tree, _said):
            value.agreed, value.quantity, value.weight = True, None, None


def _managed(tree: ast.AST) -> frozenset[int]:
    return frozenset(map(id, _contexts(tree)))


def _contexts(tree: ast.AST) -> Iterator[ast.expr]:
    """What with statements enter."""
    for node in every(tree, ast.With, ast.AsyncWith):
        if isinstance(node, (ast.With, ast.AsyncWith)):
            yield from (item.context_expr for item in node.items)


def _enters_names(tree: ast.AST) -> bool:
    """Whether contexts that have a name are entered: `with context:`, `stack.enter_context(context)`."""
    if any(isinstance(node, ast.Attribute) and node.attr == "enter_context" for node in every(tree, ast.Attribute)):
        return True
    return any(isinstance(entered, (ast.Name, ast.Attribute, ast.IfExp)) for entered in _contexts(tree))


def _managed_calls(state: State) -> frozenset[int]:
    return state.index.once("managed", state.index.tree, _managed)


def _said(tree: ast.AST) -> frozenset[int]:
    """Calls that are made for what they do, not for what they give."""
    return frozenset(id(node.value) for node in every(tree, ast.Expr) if isinstance(node, ast.Expr)) | _managed(tree)


def _leaves(value: Value) -> Iterator[Opaque]:
    if isinstance(value, Phi):
        yield from _leaves(value.condition)
    elif isinstance(value, Opaque) and value.negated is not None:
        yield from _leaves(value.negated)
    elif isinstance(value, Opaque) and value.conjunction:
        for part in value.conjunction[1:]:
            yield from _leaves(part)
    elif isinstance(value, Opaque):
        yield value


def unclear(asked: Mapping[str, set[Key]]) -> frozenset[str]:
    """The questions that were asked about different things."""
    return frozenset(text for text, keys in asked.items() if len(keys) > 1)


def questions(state: State) -> frozenset[str]:
    """All of them on which an event hung: none has an answer that holds for a rehearsal."""
    return frozenset[str]().union(*map(unclear, state.asked_at.values()))


def awaited(state: State, events: Iterable[Event]) -> str:
    """The question whose answer an update waits for; "" where none does."""
    texts = {place: min(found) for place, asked in state.asked_at.items() if (found := unclear(asked))}
    for event in events if texts else ():
        if event.kind is Kind.STEP or event.kind is Kind.BACKWARD:
            for place, text in texts.items():
                if _lies_in(event, place) or (event.kind is Kind.STEP and _waits_at(event, place)):
                    return text
    return ""


def _waits_at(event: Event, place: Place) -> bool:
    return any(guard.place == place for guard in event.guards)


def _lies_in(event: Event, place: Place) -> bool:
    """Whether an event happens in a stretch of the source, such as a function that is called by who knows whom."""
    return event.place.path == place.path and place.line <= event.place.line <= (place.end_line or place.line)


def perhaps(state: State, events: Iterable[Event]) -> list[Event]:
    """The events, of which those that hang on such a question are said to happen perhaps."""
    places = {place for place, asked in state.asked_at.items() if unclear(asked)}
    if not places:
        return list(events)
    hang = (event.kind in HANGING and any(_waits_at(event, one) or _lies_in(event, one) for one in places) for event in events)
    return [replace(event, options=event.options | {PERHAPS}) if one else event for event, one in zip(events, hang, strict=True)]


def without_sync(events: Iterable[Event]) -> list[Event]:
    """The events, of which none says whether synchronisation was on."""
    return [replace(event, sync=None) if event.sync is not None else event for event in events]
