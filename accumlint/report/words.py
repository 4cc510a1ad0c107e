"""How the events and weights of a window are spelled for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from accumlint.trace import Event, Kind
from accumlint.weight import Factor, Quantity, Weight

LABELS = {
    Kind.DATA: "batch",
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.BACKWARD: "backward",
    Kind.REDUCE: "all-reduce",
    Kind.UNSCALE: "unscale",
    Kind.NORMALIZE: "normalize",
    Kind.CLIP: "clip",
    Kind.STEP: "step",
    Kind.SCALER_UPDATE: "scaler",
    Kind.ZERO: "zero",
    Kind.SCHEDULE: "schedule",
    Kind.AVERAGE: "average",
    Kind.SAVE: "save",
    Kind.SKIP: "skip",
    Kind.SYNC_OFF: "sync off",
    Kind.SYNC_ON: "sync on",
    Kind.COUNT: "count",
    Kind.RETAIN: "keep graph",
    Kind.OPAQUE: "unknown",
}

_SENTENCES = {
    Kind.DATA: "a new batch is taken",
    Kind.FORWARD: "forward",
    Kind.LOSS: "the loss is formed",
    Kind.BACKWARD: "backward",
    Kind.REDUCE: "gradients are reduced over the ranks",
    Kind.UNSCALE: "gradients are unscaled",
    Kind.NORMALIZE: "gradients are normalized",
    Kind.CLIP: "gradients are clipped",
    Kind.STEP: "optimizer step",
    Kind.SCALER_UPDATE: "the loss scale is updated",
    Kind.ZERO: "gradients are zeroed",
    Kind.SCHEDULE: "scheduler step",
    Kind.AVERAGE: "bookkeeping of the update",
    Kind.SAVE: "checkpoint",
    Kind.SKIP: "the micro-batch is left",
    Kind.SYNC_OFF: "synchronisation is switched off",
    Kind.SYNC_ON: "synchronisation is switched on",
    Kind.COUNT: "targets are counted",
    Kind.RETAIN: "a loss is kept with its graph",
    Kind.OPAQUE: "a call that was not followed",
}

_MEANINGS = {
    Quantity.UNITS: "valid targets of this micro-batch",
    Quantity.WINDOW_UNITS: "valid targets of the window, on this rank",
    Quantity.GLOBAL_UNITS: "valid targets of the window, over all ranks",
    Quantity.ACCUMULATION: "micro-batches of a window",
    Quantity.WORLD: "number of ranks",
    Quantity.SCALE: "loss scale",
    Quantity.CONSTANT: "a constant",
    Quantity.INPUTS: "inputs, not valid targets",
    Quantity.UNKNOWN: "not known",
}


def coefficient(weight: Weight | None, *extra: Factor) -> str:
    """The weight of a target with the numbers that K had in the rehearsal, such as `1/(3n)`; "" when there is none to show."""
    if weight is None or not (weight.factors or extra):
        return ""
    weight = weight.times(*extra)
    number, powers = Fraction(1), dict[str, int]()
    for factor in weight.factors:
        if factor.quantity in {Quantity.ACCUMULATION, Quantity.CONSTANT} and factor.value:
            number *= factor.value**factor.power
        elif factor.quantity is not Quantity.CONSTANT:
            powers[factor.quantity.value] = powers.get(factor.quantity.value, 0) + factor.power
    text = _fraction(number, powers)
    return f"{text} + …" if weight.mixed else text if weight.known else f"{text} ?"


def at_backward(event: Event) -> str:
    """The weight that a backward gives a target, with the loss scale where the loss was scaled."""
    scaled = event.scaled and not (event.weight and event.weight.of(Quantity.SCALE))
    return coefficient(event.weight or Weight(), *((Factor(Quantity.SCALE, 1),) if scaled else ()))


def _fraction(number: Fraction, powers: dict[str, int]) -> str:
    over = [_power(name, power) for name, power in powers.items() if power > 0]
    under = [_power(name, -power) for name, power in powers.items() if power < 0]
    top = _product(number.numerator, over)
    if not under and number.denominator == 1:
        return top
    bottom = _product(number.denominator, under)
    plain = len(under) + (number.denominator != 1) == 1
    return f"{top}/{bottom}" if plain else f"{top}/({bottom})"


def _product(number: int, names: list[str]) -> str:
    return "·".join(names) if number == 1 and names else f"{number}{'·'.join(names)}"


def _power(name: str, power: int) -> str:
    return name if power == 1 else f"{name}^{power}"


def factor_line(factor: Factor) -> tuple[str, str]:
    """A factor and what it stands for: ("1/K", "micro-batches of a window, 3 in this rehearsal: `args.accum`")."""
    name = factor.quantity.value
    if factor.quantity is Quantity.CONSTANT and factor.value is not None:
        name = str(factor.value)
    sign = _power(name, factor.power) if factor.power > 0 else f"1/{_power(name, -factor.power)}"
    meaning = _MEANINGS[factor.quantity]
    if factor.quantity is Quantity.ACCUMULATION and factor.value is not None:
        meaning += f", {factor.value} in this rehearsal"
    if factor.text:
        meaning += f": `{factor.text}`" + (" by itself" if factor.implicit else "")
    return sign, meaning


def state(event: Event) -> str:
    """What an event saw, in a word or two: it stands beside the mark in the timeline."""
    match event.kind:
        case Kind.FORWARD if event.bypass:
            return "bypass"
        case Kind.FORWARD | Kind.BACKWARD:
            return "" if event.sync is None else "sync on" if event.sync else "sync off"
        case Kind.UNSCALE:
            return "÷ S"
        case Kind.NORMALIZE | Kind.LOSS:
            return coefficient(event.weight)
        case Kind.SKIP:
            return event.leaves
        case Kind.DATA if len(event.data) == 1:
            return f"no. {event.data[0]}"
        case _:
            return ""


def reductions(events: Sequence[Event]) -> dict[int, bool]:
    """Which backwards (by index) make their wrapper reduce, by the flag that it reads; those where it is not plain are left out."""
    forwards = {event.index: event for event in events if event.kind is Kind.FORWARD}
    found: dict[int, bool] = {}
    armed: dict[int, int] = {}  # forwards of a model since its last backward: after several the reducer follows only one backward
    for event in events:
        if event.kind is Kind.FORWARD and event.model is not None:
            armed[event.model.uid] = armed.get(event.model.uid, 0) + 1
        if event.kind is not Kind.BACKWARD:
            continue
        behind = [forwards[index] for index in event.forwards if index in forwards]
        model = event.model or next((forward.model for forward in behind if forward.model), None)
        if model is None or any(forward.bypass for forward in behind):
            continue
        pending = armed.pop(model.uid, 0)
        flags = {forward.sync for forward in behind} if model.wrapper.reads_flag_in_forward else {event.sync}
        plain = model.wrapper.reads_flag_in_backward or (model.wrapper.reads_flag_in_forward and pending == len(behind) > 0)
        if plain and len(flags) == 1 and (flag := flags.pop()) is not None:
            found[event.index] = flag
    return found


def note(event: Event) -> str:
    """One line on an event, for a trace that is read as a list."""
    parts = [_SENTENCES[event.kind]]
    seen = state(event)
    if event.kind in {Kind.FORWARD, Kind.BACKWARD, Kind.SKIP} and seen:
        parts.append({"bypass": "round the wrapper"}.get(seen, seen))
    weight = at_backward(event) if event.kind is Kind.BACKWARD else seen if event.kind in {Kind.LOSS, Kind.NORMALIZE} else ""
    if weight:
        parts.append(f"{'factor' if event.kind is Kind.NORMALIZE else 'weight of a target'} {weight}")
    if event.guard is not None:
        parts.append(f"under `{event.guard.text}`")
    return ", ".join(parts) + (f": {event.note}" if event.note else "")
