"""Whether synchronisation or the update hangs on what nobody can follow and what may differ between the micro-batches of a window.

A condition that stays open has one answer for a whole rehearsal only as long as it is the same: `is_last(i)` is asked anew in every turn,
and whatever is answered, a window made of such answers is none that the code runs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from accumlint.source.rehearsal.state import PERSONAL, State
from accumlint.source.rehearsal.values import Key, Known, Opaque, Phi, Value
from accumlint.trace import Event, Kind


def ask_for_sync(state: State, value: Value) -> None:
    """Remembers the open conditions behind a value that switches synchronisation, and the numbers that counters are compared with."""
    for leaf in _leaves(value):
        state.sync_asked.setdefault(leaf.text, set()).add(leaf.key)
    known = state.world.knowledge.accumulations
    for root in value.gates if isinstance(value, Known) else ():
        if root.kind == "setting" and root.key not in known:
            state.sync_asked.setdefault(root.text, set()).update((root.key, ("counter", *root.key)))


def ask_of_sides(state: State, node: ast.If, test: Value) -> None:
    """The same for an if statement that switches synchronisation or holds the update; not where a loss or this rank decides."""
    if isinstance(test, Known) and not test.gates:
        return
    either = state.index.kinds(node.body) ^ state.index.kinds(node.orelse)
    if Kind.SYNC_OFF in either:
        ask_for_sync(state, test)
    if Kind.STEP in either and isinstance(test, Opaque) and not test.causes & PERSONAL - {"data"}:
        for leaf in _leaves(test):
            state.step_asked.setdefault(leaf.text, set()).add(leaf.key)


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


def without_sync(events: Iterable[Event]) -> list[Event]:
    """The events, of which none says whether synchronisation was on."""
    return [replace(event, sync=None) if event.sync is not None else event for event in events]
