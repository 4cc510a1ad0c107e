"""Counts of targets: of a micro-batch, of a window, of all ranks; whether they vary, and whether they can be zero."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accumlint.source.reading.facts import terminal
from accumlint.source.rehearsal.values import Known, Opaque, Value
from accumlint.trace import SHIFTED, Kind
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.record import OpenTurn
    from accumlint.source.rehearsal.state import State

COUNTED = "counted"  # where a count was taken
SINCE = "since"  # after how many updates a count was begun, and after how many it was last added to
GROWN = "grown"  # how many batches have added their size to a number since it was zero
BY_INDEX = "by-index"  # cause of a comparison with the index that losses ignore
WHOLE = "whole"  # cause of a comparison that selects everything, for all that is seen
IGNORE_NAME = re.compile(r"ignored?_?(index|id|label|token)", re.IGNORECASE)  # what a loss is told to ignore, if there is any of it

PAD_NAME = re.compile(r"(^|_)pad(ding)?(_?(idx|index|id|token|token_id|value))?$", re.IGNORECASE)


def sum_of_counts(state: State, counts: list[Opaque], left: Value, right: Value, node: ast.AST) -> tuple[Quantity, Weight]:
    """A running count: of one micro-batch when it starts from zero, of the window once a second one is added."""
    quantities = {count.quantity for count in counts}
    first = counts[0].quantity or Quantity.UNITS
    if Quantity.GLOBAL_UNITS in quantities:
        quantity = Quantity.GLOBAL_UNITS
    elif Quantity.WINDOW_UNITS in quantities or (len(counts) > 1 and not _of_one_batch(counts)):
        quantity = Quantity.WINDOW_UNITS
    else:
        quantity = first
    if quantities == {Quantity.INPUTS}:
        quantity = Quantity.INPUTS
    text = state.recorder.text(node)
    guarded = any(count.guarded for count in counts)
    uneven = any(is_uneven(count) for count in counts)
    stale = any(map(is_stale, counts))
    own = counts[0].weight.factors[0].of if len(counts) == 1 and counts[0].weight is not None and counts[0].weight.factors else ""
    return quantity, Weight(
        (
            Factor(
                quantity,
                1,
                None,
                text,
                state.recorder.place(node),
                guarded=guarded,
                root=root_of(*counts),
                uneven=uneven,
                stale=stale,
                of=own,
            ),
        )
    )


def since(value: Value) -> tuple[int, int] | None:
    """After how many updates a count was begun and last added to."""
    found = value.attributes.get(SINCE) if isinstance(value, Opaque) else None
    return found.value if isinstance(found, Known) else None


def run_on(state: State, current: Value, result: Value, node: ast.AST) -> None:
    """A count that is added to after an update without having been set back: `tokens += n`, where nothing says `tokens = 0`."""
    begun, added = since(current), since(result)
    if begun is None or added is None or begun[0] == added[1] or not isinstance(result, Opaque) or result.weight is None:
        return
    result.weight = replace(result.weight, factors=tuple(replace(factor, stale=True) for factor in result.weight.factors))
    state.recorder.emit(Kind.COUNT, node, weight=result.weight)


def counted(count: Opaque) -> Any:
    """In which turns of the loops a count was taken."""
    found = count.attributes.get(COUNTED)
    return found.value if isinstance(found, Known) else None


def _of_one_batch(counts: list[Opaque]) -> bool:
    """Whether all of them count targets of the same micro-batch, such as those of two heads."""
    found = {counted(count) for count in counts}
    return len(found) == 1 and all(found)


def is_uneven(value: Value) -> bool:
    """Whether a count is of what a comparison of data selects."""
    if not isinstance(value, Opaque):
        return False
    return ("compared" in value.causes and WHOLE not in value.causes) or (
        value.weight is not None and any(factor.uneven for factor in value.weight.factors)
    )


def is_stale(value: Value) -> bool:
    """Whether a count still holds targets of earlier updates."""
    return isinstance(value, Opaque) and value.weight is not None and any(factor.stale for factor in value.weight.factors)


def shifts(value: Opaque) -> frozenset[str]:
    """What was cut from its second position on before it came to this."""
    return frozenset(cause for cause in value.causes if cause.startswith(SHIFTED))


def selects(state: State, left: Value, right: Value, index: ast.AST) -> frozenset[str]:
    """A comparison of data selects some of it: a different number each time, and perhaps none; with an index to ignore, if there is any."""
    if IGNORE_NAME.search(terminal(index)):
        return frozenset({"compared", "filtered", BY_INDEX} | (set() if state.index.ignores_targets else {WHOLE}))
    padding = isinstance(index, ast.Constant) and index.value == 0 and "pad_sequence" in state.index.identifiers
    if padding or PAD_NAME.search(terminal(index)):
        return frozenset({"compared"})  # what is filled up has something of its own
    positions = any(isinstance(side, Opaque) and "positions" in side.causes for side in (left, right))
    if isinstance(right, Known) and positions:
        return frozenset()
    return frozenset({"compared"}) if positions else frozenset({"compared", "filtered"})


def root_of(*counts: Value) -> str:
    """Which counting a number goes back to."""
    for one in counts:
        if isinstance(one, Opaque) and one.weight is not None:
            for factor in one.weight.factors:
                if factor.root:
                    return factor.root
    return ""


def note_growth(op: type[ast.operator], left: Value, right: Value, made: Opaque) -> None:
    """`pending += len(batch)`: notes how many batches a window holds that ends at so many samples."""
    if op is not ast.Add or not isinstance(right, Opaque) or right.quantity not in {Quantity.INPUTS, Quantity.UNITS}:
        return
    before = left.attributes.get(GROWN) if isinstance(left, Opaque) else left
    if isinstance(before, Known) and isinstance(before.value, int):
        made.attributes[GROWN] = Known(before.value + 1)


def guard(state: State, value: Opaque, node: ast.AST) -> Opaque:
    """The same count, which can no longer be zero."""
    made = state.opaque(("guarded", value.key), state.recorder.text(node), value, quantity=value.quantity, guarded=True, reduced=True)
    if value.weight is not None:
        made.weight = guarded_weight(value.weight)
    return made


def guarded_weight(weight: Weight) -> Weight:
    return replace(weight, factors=tuple(replace(factor, guarded=True) for factor in weight.factors))


def last_part(text: str) -> str:
    """`eps` of `args.eps` and of `cfg['eps']`."""
    return text.rstrip(")(]'\"").rsplit(".", 1)[-1].rsplit("['", 1)[-1]


def is_epsilon(value: Value) -> bool:
    """Whether a summand keeps a count away from zero: `count + 1e-8`."""
    if isinstance(value, Known):
        return isinstance(value.value, (int, float)) and value.value > 0
    return isinstance(value, Opaque) and last_part(value.text).lower() in {"eps", "epsilon"}


def spanned(state: State, factor: Factor) -> Factor:
    """What a count stands for where it is used: that of a whole batch is the window's inside a loop over the batch's parts."""
    home, turns = state.counted_in.get(factor.root), state.recorder.turns
    if home is None or factor.quantity is not Quantity.UNITS or list(home) != turns[: len(home)]:
        return factor
    return replace(factor, quantity=Quantity.WINDOW_UNITS) if any(turn.parts for turn in turns[len(home) :]) else factor


def _home(state: State, parts: tuple[Value, ...]) -> tuple[OpenTurn, ...]:
    """The turns down to the one whose data is counted; all of them where that is not known."""
    turns = state.recorder.turns
    born = frozenset[int]().union(*[part.born for part in parts if isinstance(part, Opaque)])
    if born:
        for at in range(len(turns), 0, -1):
            if not born.isdisjoint(turns[at - 1].taken):
                return tuple(turns[:at])
    return tuple(turns)


def span_of(counts: Iterable[Value]) -> tuple[int, int] | None:
    """After how many updates the first of several counts was begun, and the last one added to."""
    spans = [span for span in map(since, counts) if span is not None]
    return (min(first for first, _ in spans), max(last for _, last in spans)) if spans else None


def count(state: State, quantity: Quantity, key: Any, node: ast.AST, *parts: Value, guarded: bool = False, of: str = "") -> Opaque:
    """A number of targets or inputs, as a value that can divide; `of` names the mask whose sum it is."""
    text = state.recorder.text(node)
    made = state.opaque(key, text, *parts, quantity=quantity, guarded=guarded, reduced=True)
    made.forwards, made.attached = frozenset(), False
    root = root_of(*parts)
    if not root:
        root = f"{text}:{getattr(node, 'lineno', 0)}"
        state.counted_in[root] = _home(state, parts)
    uneven = any(is_uneven(part) for part in parts)
    stale = any(map(is_stale, parts))
    own = Factor(quantity, 1, None, text, state.recorder.place(node), guarded=guarded, root=root, uneven=uneven, stale=stale, of=of)
    made.weight = Weight((own,))
    made.attributes[SINCE] = Known(span_of(parts) or (state.recorder.updates, state.recorder.updates))
    made.attributes[COUNTED] = Known(tuple((turn.line, turn.index, turn.entry) for turn in state.recorder.turns))
    made.born = frozenset()
    return made


def counts_of_parts(state: State, node: ast.AST, items: list[Value], many: bool) -> Opaque | None:
    """A tensor of nothing but counts, which are those of a window where there are several."""
    counts = [item for item in items if isinstance(item, Opaque) and item.quantity in {Quantity.UNITS, Quantity.INPUTS}]
    if not counts or len(counts) < len(items):
        return None
    several = Quantity.WINDOW_UNITS if many or len(counts) > 1 else Quantity.UNITS
    quantity = Quantity.INPUTS if counts[0].quantity is Quantity.INPUTS else several
    return count(state, quantity, ("joined", getattr(node, "lineno", 0), state.steps), node, *counts)
