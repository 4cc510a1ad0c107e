"""What the ways that do not train really leave out: only events that the other way brought about."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from accumlint.source.reading.facts import terminal
from accumlint.source.rehearsal.values import Items, Opaque, Value
from accumlint.trace import Event, Kind, Place, Turn

HANGS = "hangs:"  # cause of a loss that has no graph on the way that a skip, whose index follows, stands for

FRESH = frozenset({"tensor", "zeros", "zeros_like", "new_zeros", "new_tensor", "scalar_tensor", "full"})


def returns_fresh(body: Sequence[ast.stmt]) -> bool:
    """Whether a block ends with the return of a new tensor that only takes a gradient: `torch.zeros((), requires_grad=True)`."""
    last = body[-1] if body else None
    if not isinstance(last, ast.Return) or last.value is None:
        return False
    first = last.value.elts[0] if isinstance(last.value, ast.Tuple) and last.value.elts else last.value
    if isinstance(first, ast.IfExp):
        first = first.orelse
    if isinstance(first, ast.Name):
        name = first.id
        made = [one.value for one in body if isinstance(one, ast.Assign) and any(terminal(target) == name for target in one.targets)]
        return bool(made) and _takes_gradient(made[-1])
    return _takes_gradient(first)


def _takes_gradient(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and terminal(node.func) == "requires_grad_" and isinstance(node.func, ast.Attribute):
        node = node.func.value
        return isinstance(node, ast.Call) and terminal(node.func) in FRESH
    if not isinstance(node, ast.Call) or terminal(node.func) not in FRESH:
        return False
    return any(word.arg == "requires_grad" and isinstance(word.value, ast.Constant) and word.value.value is True for word in node.keywords)


def hang(value: Value, skips: Sequence[int]) -> None:
    """The loss that a function returns hangs on the ways by which it returns one without a graph."""
    if isinstance(value, Items) and value.items:
        value = value.items[0]
    if isinstance(value, Opaque) and value.forwards:
        value.causes |= {f"{HANGS}{skip}" for skip in skips}


def narrowed(events: Sequence[Event], ends: dict[int, int]) -> list[Event]:
    """The events, each skip with only the kinds that some pass by its place would have left out.

    What a skip leaves out is first told by the names in the source, which promise more than is there. `ends` holds, by the
    index of a skip, where the statements end that it passes over; the others go on to the end of the turn.
    """
    skips = [event for event in events if _leaves_out(event)]
    if not skips:
        return list(events)
    happened: dict[tuple[Place, str], set[Kind]] = {}
    for skip in skips:
        happened.setdefault(_where(skip), set()).update(_missed(events, skip, ends))
    return [replace(event, skipped=event.skipped & happened[_where(event)]) if _leaves_out(event) else event for event in events]


def _leaves_out(event: Event) -> bool:
    return event.kind is Kind.SKIP and bool(event.skipped)


def _where(skip: Event) -> tuple[Place, str]:
    return (skip.guard.place if skip.guard is not None else skip.place, skip.leaves)


def _missed(events: Sequence[Event], skip: Event, ends: dict[int, int]) -> set[Kind]:
    if not skip.turns:
        return set()  # asked once, before the loop
    end = ends.get(skip.index, len(events))
    found: set[Kind] = set()
    for event in events[skip.index + 1 : end]:
        if not _same_turn(skip.turns, event.turns):
            break
        found.add(event.kind)
    return found


def _same_turn(outer: tuple[Turn, ...], inner: tuple[Turn, ...]) -> bool:
    """Whether an event happened in the turn, or in loops inside it."""
    return len(inner) >= len(outer) and all(
        (one.line, one.index, one.entry) == (other.line, other.index, other.entry) for one, other in zip(outer, inner, strict=False)
    )
