"""The listener that sums what every backward contributes, weighted so that each unit of the window counts the same.

With c the coefficient that a backward gave to its units and g its contribution to the gradients, the gradient that the
window should have had is the mean of g / c over all N units of all ranks: the right coefficient is W/N before the
averaging over W ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from accumlint.runtime.ledger.book import Ledger, Sheet
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.runtime.reference import verdicts
from accumlint.runtime.reference.exact import Exact
from accumlint.runtime.reference.sketch import Sketch
from accumlint.runtime.reference.window import Slot, Window
from accumlint.trace import Kind

LEFT_OUT = "left-out"
SHARDED = "the parameters are sharded, or their gradients pass no leaf hook"


class Reference(Listener):
    """One window for each optimizer."""

    def __init__(self, recorder: Recorder, ledger: Ledger, scalers: Any, plan: Callable[[list[Any]], Any]) -> None:
        self._recorder = recorder
        self._ledger = ledger
        self._scalers = scalers
        self._plan = plan
        self._windows: dict[int, Window] = {}
        self._owners: dict[int, tuple[weakref.ref[Any], Window]] = {}
        self._sheet: Sheet | None = None
        self._reached: list[Window] = []
        self._closed: list[verdicts.Closed] = []

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self._sheet = self._ledger.sheet
        self._reached = []

    def parameter_gradient(self, parameter: Any, gradient: Any) -> None:
        window = self._window_of(parameter)
        sheet = self._sheet
        if window is None or sheet is None or window.refused:
            return
        try:
            with torch.no_grad():
                if window not in self._reached:
                    self._reached.append(window)
                    if not window.begin(sheet.entries):
                        window.refuse("a gradient came before any recorded loss was seen")
                slot, ratio = window.slot_of(parameter), window.ratio(gradient)
                if slot is not None and ratio is not None and self._accepts(window, gradient):
                    window.sums.add(slot, gradient, ratio)
                    slot.shape, slot.fresh = gradient.shape, False
        except Exception as error:
            window.refuse(f"{type(error).__name__}: {error}")
            window.sums.release(window)

    def _accepts(self, window: Window, gradient: Any) -> bool:
        if gradient.layout is not torch.strided:
            window.refuse("a gradient is sparse")
        elif hasattr(gradient, "to_local"):
            window.refuse(SHARDED)
        return not window.refused

    def backward_ends(self, row: Row) -> None:
        sheet, self._sheet = self._sheet, None
        if sheet is None or sheet.row is not row:
            return
        with torch.no_grad():
            for window in self._reached:
                window.end(sheet)
                window.last_row = len(self._recorder.rows)
        self._reached = []

    def change_begins(self, row: Row) -> None:
        """The first clip or the step after the last backward: what is compared is the gradient before it."""
        if row.kind not in {Kind.CLIP.value, Kind.STEP.value}:
            return
        for uid in row.targets or list(self._windows):
            window = self._windows.get(uid)
            if window is not None and window.sheets and window.result is None:
                self._compare(window, stepping=row.kind == Kind.STEP.value)

    def _compare(self, window: Window, *, stepping: bool) -> None:
        if window.refused or window.units is None or window.first is None:
            return
        optimizer = dict(self._recorder.optimizers.live()).get(window.uid)
        scale = self._scalers.pending(optimizer, stepping=stepping)
        try:
            with torch.no_grad():
                if any(_is_sharded(slot, each.grad) for slot, each in window.live() if each.grad is not None):
                    window.refuse(SHARDED)
                    return
                window.result = window.sums.compare(window, scale)
        except Exception as error:
            window.refuse(f"{type(error).__name__}: {error}")

    def zeroed(self, row: Row) -> None:
        """A clearing inside a window takes nothing out of what the window should have had, unless the update was left out,
        or the gradients came from a backward that was meant for another optimizer."""
        for uid in row.targets:
            window = self._windows.get(uid)
            if window is None or not window.sheets:
                continue
            others = any(len(sheet.row.numbers.get("optimizers", ())) > 1 for sheet in window.sheets)
            if others or self._left_out(window):
                window.forget()

    def _left_out(self, window: Window) -> bool:
        return any(
            row.kind == Kind.STEP.value and window.uid in row.targets and LEFT_OUT in row.options
            for row in self._recorder.rows[window.last_row :]
        )

    def window_closes(self, row: Row) -> None:
        for uid in row.targets:
            window = self._windows.get(uid)
            if window is not None and self._recorder.in_backward is not None:
                window.forget()
                self._reached = [each for each in self._reached if each is not window]
                row.numbers["reference"] = {"kind": verdicts.NOT_OBSERVED, "why": "the optimizer steps inside the backward"}
                continue
            if window is None or not window.sheets:
                row.numbers["reference"] = {"kind": verdicts.NOT_OBSERVED, "why": SHARDED}
                continue
            closed = verdicts.Closed(row, list(window.sheets), window.refused, window.result)
            closed.where = (window.order, window.number)
            if window.units is not None and window.first is not None:
                with torch.no_grad():
                    self._recorder.later(closed.read, "counts", window.counts())
            if closed.result is not None:
                closed.result.read(self._recorder, closed.read)
            self._closed.append(closed)
            window.number += 1
            window.forget()

    def settled(self) -> None:
        closed, self._closed = self._closed, []
        for each in closed:
            each.row.numbers["reference"] = verdicts.judge(each)

    def release(self) -> None:
        for window in self._windows.values():
            window.sums.release(window)
        self._windows.clear()
        self._owners.clear()
        self._closed.clear()

    def _window_of(self, parameter: Any) -> Window | None:
        """The window of the optimizer that holds a parameter; the first, where several do."""
        held = self._owners.get(id(parameter))
        if held is not None and held[0]() is parameter:
            return held[1]
        for order, (uid, _) in enumerate(self._recorder.optimizers.live()):
            owned = self._recorder.optimizers.parameters(uid)
            if any(each is parameter for each in owned):
                window = self._windows.get(uid) or self._opened(uid, order, owned)
                window.slots[id(parameter)] = next(slot for slot in _slots(owned) if slot.parameter() is parameter)
                self._owners[id(parameter)] = (weakref.ref(parameter), window)
                return window
        return None

    def _opened(self, uid: int, order: int, owned: list[Any]) -> Window:
        plan = self._plan(owned)
        slots = {id(each): slot for each, slot in zip(owned, _slots(owned), strict=True)}
        window = self._windows[uid] = Window(uid, order, slots, plan)
        for each in owned:
            self._owners.setdefault(id(each), (weakref.ref(each), window))
        window.sums = Exact(self._recorder, plan) if plan.kind == "exact" else Sketch(self._recorder, plan)
        return window


def _is_sharded(slot: Slot, gradient: Any) -> bool:
    """Whether a gradient is a rank's part only, or has become one since the leaf hook."""
    return hasattr(gradient, "to_local") or (not slot.fresh and slot.shape != gradient.shape)


def _slots(owned: list[Any]) -> list[Slot]:
    starts = itertools.accumulate((each.numel() for each in owned), initial=0)
    return [Slot(weakref.ref(each), index, start) for index, (each, start) in enumerate(zip(owned, starts, strict=False))]
