"""K as the source spells it, and whether a loop means to accumulate."""

from __future__ import annotations

import re

from accumlint.source.reading.facts import FunctionNode
from accumlint.source.reading.index import Index
from accumlint.source.rehearsal.entries import mentioned
from accumlint.source.rehearsal.machine import Machine
from accumlint.trace import Accumulation, Event, Kind


def accumulation_of(machine: Machine, events: tuple[Event, ...], entry: FunctionNode | None) -> Accumulation | None:
    """K as the source spells it: the setting that was found to be K, the one that divides the loss first."""
    knowledge = machine.world.knowledge
    known = {key: root for key, root in knowledge.accumulations.items() if not knowledge.is_other_setting(root)}
    for event in events:
        for factor in event.weight.factors if event.weight is not None else ():
            if any(root.text == factor.root for root in known.values()):
                return Accumulation(factor.root, machine.world.k, factor.place)
    roots = [root for root in known.values() if root.key in knowledge.proven or _is_at_hand(machine.index, root.text, entry)]
    if roots:
        gating = (root for root in roots if _gates_a_step(root.text, events))
        return Accumulation(next(gating, roots[0]).text, machine.world.k)
    first = next((event for event in events if event.kind is Kind.BACKWARD and event.turns), None)
    pieces = machine.pieces.get(first.turns[-1].line) if first is not None else None
    if pieces:
        return Accumulation(f"len({pieces})", _first_window(events) or machine.world.k)
    size = knowledge.literal
    in_place = size > 1 and _first_window(events) == size and _gates_a_step(f"% {size}", events)
    return Accumulation(str(size), size, literal=True) if in_place else None


def _gates_a_step(text: str, events: tuple[Event, ...]) -> bool:
    """Whether the condition of an update spells K like this; another loop, such as a trial run, may be bounded by something else."""
    words = r"\s*".join(map(re.escape, text.split()))  # `% 4` is spelled `%4` as well
    spelled = re.compile(rf"(?<![\w.]){words}(?!\w)")
    return any(spelled.search(guard.text) for event in events if event.kind is Kind.STEP for guard in event.guards)


def _is_at_hand(index: Index, text: str, entry: FunctionNode | None) -> bool:
    """Whether a number that is K by its name only is one that this loop knows, not another function's."""
    return entry is None or bool(mentioned(index, entry) & set(re.findall(r"\w+", text)))


def _first_window(events: tuple[Event, ...]) -> int:
    """How many micro-batches go backward before the first step."""
    found: set[int] = set()
    for event in events:
        if event.kind is Kind.STEP and found:
            break
        if event.kind is Kind.BACKWARD:
            found.add(event.micro_batch)
    return len(found)


def means_to_accumulate(events: tuple[Event, ...], accumulation: Accumulation | None) -> bool:
    if any(event.kind is Kind.SYNC_OFF for event in events):
        return True
    batch = {event.index: event.micro_batch for event in events if event.kind is Kind.FORWARD}
    if any(len({batch[one] for one in event.forwards if one in batch}) > 1 for event in events if event.kind is Kind.BACKWARD):
        return True
    if accumulation is None:
        return False
    if _waits_for_boundary(events):
        return True
    return any(
        factor.root == accumulation.text
        for event in events
        if event.kind in {Kind.BACKWARD, Kind.NORMALIZE} and event.weight is not None
        for factor in event.weight.factors
    )


def _waits_for_boundary(events: tuple[Event, ...]) -> bool:
    """Whether an update happens under a test against K which not every backward waits for."""
    waiting = [{(guard.place, guard.holds) for guard in event.guards} for event in events if event.kind is Kind.BACKWARD]
    around = set.intersection(*waiting) if waiting else set()
    steps = (event for event in events if event.kind is Kind.STEP)
    return any(guard.cause == "gate" and (guard.place, guard.holds) not in around for step in steps for guard in step.guards)
