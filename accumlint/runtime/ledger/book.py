"""The ledger: for each backward, with which coefficient the units of each loss enter it.

A hook on the node of a recorded loss reads the upstream gradient, which is exact for any arithmetic between the loss and the
backward. What is not recorded shows in the sum of upstream times loss, which then falls short of the root's value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from accumlint.runtime.ledger.graph import BY_HAND, MARK, Found, Operand, scalar, search
from accumlint.runtime.ledger.origin import comes_from_a_forward
from accumlint.runtime.ledger.units import MEAN, NONE, REDUCTIONS, Units
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
COARSE = 1e-3  # a tolerance above it proves nothing while something unknown was met


@dataclass(slots=True, eq=False)
class Call:
    """One call of a loss function. It lives as long as the graph that it is in, and holds nothing of it."""

    row: int  # -1 for a reduction by hand as long as it is no loss
    name: str
    reduction: int
    units: Units
    value: Any  # a copy of the loss
    readable: bool  # no saved-tensor hooks were active
    entries: int  # how often such hooks had been entered
    at: int = -1  # the stack that called a reduction by hand


@dataclass(slots=True)
class Entry:
    """A loss in a backward, without the call's tensors. `packed`: units, smallest and largest coefficient, upstream times loss."""

    row: int
    name: str
    reduction: str
    elements: int
    sequences: int | None
    operands: list[Operand] | None
    packed: Any
    term: str = ""  # tells losses by hand apart


@dataclass(slots=True)
class Sheet:
    """One backward."""

    row: Row
    found: Found
    root: Any  # a number on the device
    tolerance: float
    seeds: list[Operand] | None
    by_hand: bool = False  # some of its losses are reductions by hand
    entries: list[Entry] = field(default_factory=list)
    read: dict[str, Any] = field(default_factory=dict)


class Ledger(Listener):
    """Keeps the books of all backwards of a process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.sheet: Sheet | None = None
        self.hooks_entered = 0  # saved-tensor hooks, outside of backwards
        self.reductions = 0  # by hand, that were marked
        self._finished: list[Sheet] = []

    def enter(self, name: str, reduction: int, units: Units, output: Any, readable: bool) -> None:
        """Records a call of a loss function whose output has a graph."""
        row = self.recorder.event(Kind.LOSS)
        row.numbers.update(name=name, reduction=REDUCTIONS[reduction])
        call = self._call(row.index, name, reduction, units, output, readable)
        output.grad_fn.metadata.setdefault(MARK, {})[output.output_nr] = call
        self._listen(call, output)

    def mark(self, name: str, reduction: int, units: Units, output: Any, readable: bool) -> None:
        """Remembers a reduction by hand, which is a loss where a backward finds no other behind it."""
        call = self._call(-1, name, reduction, units, output, readable)
        call.at = self.recorder.here()
        output.grad_fn.metadata[BY_HAND] = call
        self._listen(call, output)
        self.reductions += 1

    def _call(self, row: int, name: str, reduction: int, units: Units, output: Any, readable: bool) -> Call:
        with torch.no_grad():
            return Call(row, name, reduction, units, output.detach().clone(), readable, self.hooks_entered)

    def _listen(self, call: Call, output: Any) -> None:
        number = output.output_nr

        def upstream(gradients: tuple[Any, ...]) -> None:
            self._receive(call, gradients[number])

        output.grad_fn.register_prehook(upstream)

    def _receive(self, call: Call, gradient: Any) -> None:
        sheet = self.sheet
        if gradient is None or sheet is None or self.recorder.in_backward is not sheet.row:
            return  # torch.autograd.grad, or a backward that was not seen
        by_hand = call.at >= 0
        if (by_hand or sheet.by_hand) and id(call) not in sheet.found.ways:
            return  # a reduction that is no loss, or a recorded function in front of which a loss by hand begins
        try:
            with torch.no_grad():
                packed = _packed(call, gradient.detach())
                way, units = sheet.found.ways.get(id(call)), call.units
                operands = None if way is None or way.operands is None or sheet.seeds is None else way.operands + sheet.seeds
                if by_hand:
                    packed, operands = _without_sign(packed, operands)
            entry = Entry(call.row, call.name, REDUCTIONS[call.reduction], units.elements, units.sequences, operands, packed)
            if by_hand:
                entry.term = self._term(call)
            sheet.entries.append(entry)
        except Exception as error:
            self.recorder.trouble(f"loss: {type(error).__name__}: {error}")

    def _term(self, call: Call) -> str:
        stack = self.recorder.stacks[call.at]
        return f"{call.name} of line {stack[0][1]}" if stack else call.name

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self.sheet = None
        roots = tuple(root for root in roots if root.requires_grad)
        if not roots:
            return
        given = _seeds(roots, seeds)
        found = self._search(row, roots)
        tolerance = max(TOLERANCES.get(root.dtype, 2e-2) for root in roots)
        with torch.no_grad():
            value = torch.stack([_dot(root.detach(), seed) for root, seed in zip(roots, given, strict=True)]).sum()
        self.sheet = Sheet(row, found, value, tolerance, _as_operands(given), bool(found.by_hand))
        found.by_hand.clear()

    def _search(self, row: Row, roots: tuple[Any, ...]) -> Found:
        """The recorded losses; where they are not all, those by hand as well, if they are then."""
        found = search(roots, self._readable)
        if found.complete or not self.reductions:
            return found
        wider = search(roots, self._readable, comes_from_a_forward)
        if not wider.complete or not wider.by_hand:
            return found
        for call in wider.by_hand:
            if call.row < 0:
                event = self.recorder.event(Kind.LOSS, at=call.at, turns=row.turns)
                event.numbers.update(name=call.name, reduction=REDUCTIONS[call.reduction], by_hand=True)
                call.row = event.index
        return wider

    def _readable(self, call: Call) -> bool:
        return call.readable and call.entries == self.hooks_entered

    def backward_ends(self, row: Row) -> None:
        sheet, self.sheet = self.sheet, None
        if sheet is None or sheet.row is not row:
            return
        with torch.no_grad():
            for number, entry in enumerate(sheet.entries):
                self.recorder.later(sheet.read, f"loss{number}", entry.packed)
                for position, (_, value) in enumerate(entry.operands or ()):
                    if not isinstance(value, float):
                        self.recorder.later(sheet.read, f"operand{number}.{position}", value)
            self.recorder.later(sheet.read, "root", sheet.root)
        sheet.root = None
        self._finished.append(sheet)

    def settled(self) -> None:
        """The numbers have arrived."""
        finished, self._finished = self._finished, []
        for sheet in finished:
            sheet.row.numbers["losses"] = [self._account(sheet, number, entry) for number, entry in enumerate(sheet.entries)]
            covered, why = coverage(sheet)
            sheet.row.numbers["covered"] = covered
            if why:
                sheet.row.numbers["why"] = why

    def _account(self, sheet: Sheet, number: int, entry: Entry) -> dict[str, Any]:
        units, low, high, _ = sheet.read[f"loss{number}"] or [math.nan] * 4
        operands = entry.operands
        if operands is not None:
            operands = [(name, sheet.read.get(f"operand{number}.{position}", value)) for position, (name, value) in enumerate(operands)]
        by_hand = {"by_hand": True, "term": entry.term} if entry.term else {}
        return {
            "call": entry.row,
            "name": entry.name,
            "reduction": entry.reduction,
            "units": units,
            "low": low,
            "high": high,
            "elements": entry.elements,
            "sequences": entry.sequences,
            "operands": None if operands is None else [list(operand) for operand in operands],
            **by_hand,
        }

    def release(self) -> None:
        self.sheet = None
        self._finished.clear()


def coverage(sheet: Sheet) -> tuple[bool | None, str]:
    """Whether the recorded losses are all that the backward went through, and what speaks against it."""
    if not sheet.entries:
        return False, f"no recorded loss: the backward begins at {_names(sheet.found)}"
    if sheet.found.complete:
        return True, ""
    root = sheet.read.get("root")
    parts = [(sheet.read.get(f"loss{number}") or [math.nan])[-1] for number in range(len(sheet.entries))]
    explained = sum(parts)
    if root is None or not math.isfinite(root) or not math.isfinite(explained):
        return None, f"the loss is not finite, and {_names(sheet.found)} was met"
    size = max(abs(root), *(abs(part) for part in parts))
    if abs(explained - root) > sheet.tolerance * size:
        return False, f"{_names(sheet.found)} is no recorded loss: the recorded ones explain {explained:.6g} of {root:.6g}"
    if sheet.tolerance > COARSE:
        return None, f"{_names(sheet.found)} was met, and the precision of {root:.6g} cannot tell what it adds"
    return True, ""


def wide(tensor: Any) -> Any:
    """In the widest format of the device."""
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _packed(call: Call, gradient: Any) -> Any:
    upstream, units, value = wide(gradient), call.units, wide(call.value)
    # A number is filled in on the device; a copy from the host would wait for it.
    count = upstream.new_full((), units.count) if isinstance(units.count, int) else units.count.to(upstream.device, upstream.dtype)
    if call.reduction == NONE:
        count, low, high = _spread(upstream, units)
    else:
        over = count if call.reduction == MEAN else 1
        low = high = torch.where(count > 0, upstream.sum() / over, torch.zeros_like(count))
    product = torch.where(upstream != 0, upstream * value, torch.zeros_like(upstream)).sum()
    return torch.stack([count, low, high, product])


def _without_sign(packed: Any, operands: list[Operand] | None) -> tuple[Any, list[Operand] | None]:
    """A loss by hand is one up to its sign: minus a mean of log-probabilities is the mean of the losses."""
    packed[1:3].abs_()
    if operands is None:
        return packed, None
    return packed, [(name, abs(value)) for name, value in operands if not (isinstance(value, float) and value == -1.0)]


def _spread(upstream: Any, units: Units) -> tuple[Any, Any, Any]:
    """Units with an upstream gradient, and the smallest and largest coefficient among them."""
    counts = upstream != 0
    if units.valid is not None:
        counts = counts & units.valid
    each = None if units.each is None else wide(units.each)
    if units.factor is not None:
        counts, upstream = units.factor != 0, upstream / wide(units.factor)
    elif each is not None:
        counts = counts & (each != 0)
    number = (counts if each is None else torch.where(counts, each, torch.zeros_like(each))).sum().to(upstream.dtype)
    if not upstream.numel():
        return number, number, number
    some = counts.any()
    low = torch.where(counts, upstream, torch.full_like(upstream, math.inf)).amin()
    high = torch.where(counts, upstream, torch.full_like(upstream, -math.inf)).amax()
    zero = torch.zeros_like(low)
    return number, torch.where(some, low, zero), torch.where(some, high, zero)


def _seeds(roots: tuple[Any, ...], seeds: Any) -> list[Any]:
    if seeds is None or isinstance(seeds, torch.Tensor):
        return [seeds] * len(roots)
    given = list(seeds)
    return given if len(given) == len(roots) else [None] * len(roots)


def _dot(root: Any, seed: Any) -> Any:
    value = wide(root)
    return (value if seed is None else value * wide(seed.detach())).sum()


def _as_operands(seeds: list[Any]) -> list[Operand] | None:
    """A gradient given to the backward, as the last scalar of the way."""
    if all(seed is None for seed in seeds):
        return []
    value = scalar(seeds[0]) if len(seeds) == 1 else None
    return None if value is None else [] if value == 1.0 else [("mul", value)]


def _names(found: Found) -> str:
    return ", ".join(found.unknown) or "an unknown operation"
