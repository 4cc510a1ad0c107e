"""What the reference needs of one optimizer between two of its updates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from accumlint.runtime.ledger.book import Entry, Sheet, wide

# Coefficients further apart than this, relative to the larger, are not one coefficient.
SAME, SAME_COARSE = 1e-4, 2e-2


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter. `buffer` belongs to whoever sums the gradients, `fresh` says that nothing of this window is in it."""

    parameter: weakref.ref[Any]
    index: int  # among the optimizer's parameters
    start: int  # elements in the parameters before it
    shape: Any = None  # of its gradients
    buffer: Any = None
    signs: Any = None
    fresh: bool = True


@dataclass(slots=True, eq=False)
class Window:
    """The backwards of an optimizer since its last update.

    `first` is the coefficient of the first backward that had one: the sums are kept relative to it, so that they have the
    size of the gradients. `units` sums the units of all; `apart` and `lost` are 1 where a backward mixed coefficients, and
    where a unit had the coefficient 0. All are numbers on the device.
    """

    uid: int
    order: int  # among the optimizers of this process
    slots: dict[int, Slot]
    plan: Any
    sums: Any = None
    number: int = 0
    sheets: list[Sheet] = field(default_factory=list)
    first: Any = None
    units: Any = None
    apart: Any = None
    lost: Any = None
    refused: str = ""
    ratios: dict[Any, Any] = field(default_factory=dict)  # the factor of the running backward, by format and device
    result: Any = None
    last_row: int = -1

    def slot_of(self, parameter: Any) -> Slot | None:
        slot = self.slots.get(id(parameter))
        return slot if slot is not None and slot.parameter() is parameter else None

    def live(self) -> Iterator[tuple[Slot, Any]]:
        for slot in self.slots.values():
            parameter = slot.parameter()
            if parameter is not None:
                yield slot, parameter

    def refuse(self, why: str) -> None:
        """Nothing can be said of this window."""
        self.refused = self.refused or why

    def forget(self) -> None:
        """A new window begins; buffers are used again."""
        for slot in self.slots.values():
            slot.fresh = True
        self.sheets.clear()
        self.first = self.units = self.apart = self.lost = self.result = None
        self.ratios.clear()
        self.sums.forget()
        self.refused = ""

    def begin(self, entries: list[Entry]) -> bool:
        """Takes the coefficient of a backward when its first gradient comes; False where no loss has been seen yet."""
        if not entries:
            return False
        coefficient = _coefficient(entries)
        zero = torch.zeros_like(coefficient)
        self.first = coefficient if self.first is None else torch.where(self.first == 0, coefficient, self.first.to(coefficient.device))
        self.ratios = {None: torch.where(coefficient != 0, self.first / coefficient, zero)}
        return True

    def ratio(self, gradient: Any) -> Any:
        """The factor that takes a contribution of the running backward to the first one's coefficient, or None."""
        key = (gradient.dtype, gradient.device)
        if key not in self.ratios and self.ratios:
            self.ratios[key] = self.ratios[None].to(gradient.device, gradient.dtype)
        return self.ratios.get(key)

    def end(self, sheet: Sheet) -> None:
        """Adds a finished backward to the counts."""
        self.sheets.append(sheet)
        self.result = None
        self.ratios.clear()
        packed = torch.stack([entry.packed for entry in sheet.entries]) if sheet.entries else None
        if packed is None:
            return
        units, low, high = packed[:, 0], packed[:, 1], packed[:, 2]
        some, coefficient = units > 0, _coefficient(sheet.entries)
        same = SAME_COARSE if sheet.tolerance > SAME_COARSE / 10 else SAME
        gap = torch.maximum((low - coefficient).abs(), (high - coefficient).abs())
        apart = (some & (gap > same * coefficient.abs())).any()
        self.units = _joined(self.units, units.sum(), torch.add)
        self.apart = _joined(self.apart, apart, torch.logical_or)
        self.lost = _joined(self.lost, (some & (high == 0)).any(), torch.logical_or)

    def counts(self) -> Any:
        """Units, first coefficient, mixed, lost: one small tensor."""
        return torch.stack([wide(each) for each in (self.units, self.first, self.apart, self.lost)])


def _coefficient(entries: list[Entry]) -> Any:
    """The coefficient of the first loss that has units."""
    found = torch.zeros_like(entries[0].packed[0])
    for entry in reversed(entries):
        found = torch.where(entry.packed[0] > 0, entry.packed[2], found.to(entry.packed.device))
    return found


def _joined(before: Any, now: Any, operation: Any) -> Any:
    return now if before is None else operation(before.to(now.device), now)
