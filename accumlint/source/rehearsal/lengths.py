"""Numbers that nobody knows, but what they count: `epochs * (len(dataset) // batch_size)`, or where a counter of micro-batches ends."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from accumlint.source.rehearsal.values import Known, Opaque, Value, setting_keys
from accumlint.trace import Kind

if TYPE_CHECKING:
    from accumlint.source.rehearsal.state import State

OF_UPDATES = re.compile(
    r"(global|total|effective|target|overall|desired|accum\w*)_?(train_?)?(mini_?)?(batch|bs)|updates?(_|$)", re.IGNORECASE
)
MOST_PARTS = 60  # of what a number was computed from


def note_numbers(state: State, made: Value, *operands: Value) -> Value:
    """Keeps in mind which lengths and settings the operands are that have a number here; gives the value back."""
    if made.__class__ is Opaque:
        for one in operands:
            if isinstance(one, Known) and one.roots:
                state.numbers_in[made.key] = one.roots
    return made


def in_micro_batches(state: State, value: Value) -> bool:
    """Whether a number that nobody knows was computed from a length and not from K."""
    if not isinstance(value, Opaque) or value.forwards or value.born or OF_UPDATES.search(value.text):
        return False
    accumulations = state.world.knowledge.accumulations
    found, pending = False, [*setting_keys(value)]
    for _ in range(MOST_PARTS):
        if not pending:
            return found
        key: Any = pending.pop()
        roots = state.numbers_in.get(key, frozenset())
        if key in accumulations or any(root.key in accumulations for root in roots):
            return False
        found = found or any(root.kind == "length" for root in roots)
        pending.extend(part for part in key if isinstance(part, tuple))
    return False


def note_bound(state: State, counter: Known, bound: Value) -> None:
    """Keeps in mind that a counter which moves with every micro-batch ends at a setting: `if seen == args.max_steps: break`."""
    recorder = state.recorder
    if not recorder.turns:
        return
    now = (counter.value, recorder.micro_batches, len(recorder.events))
    for key in setting_keys(bound):
        value, number, at = state.bounds.get(key, (0, 0, 0))
        state.bounds[key] = now
        if now[:2] == (value + 1, number + 1) and all(event.kind is not Kind.STEP for event in recorder.events[at:]):
            state.batch_counts.add(key)
