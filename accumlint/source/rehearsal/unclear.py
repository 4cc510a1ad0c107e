"""Whether synchronisation or the update hangs on what nobody can follow and what may differ between the micro-batches of a window.

A condition that stays open has one answer for a whole rehearsal only as long as it is the same: `is_last(i)` is asked anew in every turn,
and whatever is answered, a window made of such answers is none that the code runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from accumlint.source.reading.nodes import every
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.state import PERSONAL, Call, State
from accumlint.source.rehearsal.values import Key, Known, Opaque, Phi, Value, key_of
from accumlint.trace import PERHAPS, Event, Kind

HANGING = frozenset({Kind.ZERO, Kind.CLIP, Kind.SCHEDULE, Kind.SAVE, Kind.AVERAGE, Kind.UNSCALE, Kind.SCALER_UPDATE})
asks_for_boundary = found_in(re.compile(r"boundary|(^|[._])(is_)?(last|final)|should_|accum|window", re.IGNORECASE))
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
    either = state.index.kinds(node.body) ^ state.index.kinds(node.orelse)
    if Kind.SYNC_OFF in either:
        ask_for_sync(state, test)
    if not isinstance(test, Opaque) or test.causes & PERSONAL - {"data"} or not either & {Kind.STEP, *HANGING}:
        return
    asked = state.asked_at.setdefault(state.recorder.place(node.test), {})
    for leaf in _leaves(test):
        asked.setdefault(leaf.text, set()).update(_asked(state, leaf))


def _asked(state: State, leaf: Opaque) -> Iterator[Key]:
    """What a condition is about: one thing, or a new one each time, where an object moved on or is asked where it is."""
    yield leaf.key
    about = leaf.key[1] if len(leaf.key) > 1 else None
    if (leaf.key[0] in {".", "[]"} and about in state.moved) or (leaf.key[0] == "call" and asks_for_boundary(leaf.text)):
        yield ("moved", *leaf.key)


def is_managed(state: State, call: Call) -> bool:
    """Whether what a call gives is entered, and may switch something meanwhile, as far as its name tells."""
    return id(call.node) in state.index.once("managed", state.index.tree, _managed) and not is_harmless_context(call.name)


def enters_unknown(state: State, made: Opaque) -> None:
    """A context manager that nobody can follow may switch the synchronisation of the model that it is given."""
    state.sync_asked.setdefault(made.text, set()).update((made.key, ("moved", *made.key)))


def moves_on(state: State, call: Call) -> None:
    """`state.advance()`: an object that nobody knows may be another one afterwards."""
    owner = state.force(call.receiver) if call.receiver is not None else None
    if not isinstance(owner, Opaque) or owner.actor is not None or not state.recorder.turns:
        return
    if id(call.node) in state.index.once("said", state.index.tree, _said):
        state.moved.add(key_of(owner))


def _managed(tree: ast.AST) -> frozenset[int]:
    items = (item for node in every(tree, ast.With, ast.AsyncWith) if isinstance(node, (ast.With, ast.AsyncWith)) for item in node.items)
    return frozenset(id(item.context_expr) for item in items)


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
    steps = (event for event in events if texts and event.kind is Kind.STEP)
    return next((texts[guard.place] for step in steps for guard in step.guards if guard.place in texts), "")


def perhaps(state: State, events: Iterable[Event]) -> list[Event]:
    """The events, of which those that hang on such a question are said to happen perhaps."""
    places = {place for place, asked in state.asked_at.items() if unclear(asked)}
    if not places:
        return list(events)
    hang = (event.kind in HANGING and any(guard.place in places for guard in event.guards) for event in events)
    return [replace(event, options=event.options | {PERHAPS}) if one else event for event, one in zip(events, hang, strict=True)]


def without_sync(events: Iterable[Event]) -> list[Event]:
    """The events, of which none says whether synchronisation was on."""
    return [replace(event, sync=None) if event.sync is not None else event for event in events]
