"""By which factor each change of `.grad` scales it, measured on a few of its values."""

from __future__ import annotations

import weakref
from typing import Any

from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind

PARAMETERS = 16  # of an optimizer that are looked at, the largest
VALUES = 64  # of each


class Factors(Listener):
    """Compares the same values before and after; `drift` is what happened since the last look, by code that no probe saw.

    A change's numbers get "factor" (the scalar that explains it best) and "residual" (what of the change no scalar explains,
    relative to the gradient), "drift" and "drift_residual" likewise.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._last: dict[int, Any] = {}
        self._begun: dict[int, Any] = {}
        self._chosen: dict[int, list[Any]] = {}

    def backward_ends(self, row: Row) -> None:
        for uid in row.numbers.get("optimizers", ()):
            self._last[uid] = self._sample(uid)

    def change_begins(self, row: Row) -> None:
        for uid in row.targets[:1]:
            now = self._sample(uid)
            if now is None:
                continue
            self._begun[uid] = now
            self._compare(row, "drift", self._last.get(uid), now)

    def change_ends(self, row: Row) -> None:
        for uid in row.targets[:1]:
            before = self._begun.pop(uid, None)
            if row.kind == Kind.STEP.value or before is None:
                continue
            self._last[uid] = self._sample(uid)
            self._compare(row, "factor", before, self._last[uid])

    def zeroed(self, row: Row) -> None:
        for uid in row.targets or list(self._last):
            self._last.pop(uid, None)

    def release(self) -> None:
        self._last.clear()
        self._chosen.clear()

    def _compare(self, row: Row, name: str, before: Any, after: Any) -> None:
        if before is None or after is None or before.shape != after.shape or before.device != after.device:
            return
        import torch

        size, empty = before @ before, torch.zeros_like(before[0])
        factor = torch.where((size == 0) & (after @ after == 0), empty + 1, (after @ before) / size)
        rest = (after - factor * before).norm()
        residual = torch.where(rest == 0, empty, rest / after.norm())
        if row.kind == Kind.STEP.value:
            self._recorder.later(row.numbers, "magnitude", after.norm())
        self._recorder.later(row.numbers, name, factor)
        self._recorder.later(row.numbers, "residual" if name == "factor" else f"{name}_residual", residual)

    def _sample(self, uid: int) -> Any:
        import torch

        chosen = self._chosen.get(uid)
        if chosen is None:
            every = sorted(self._recorder.optimizers.parameters(uid), key=lambda each: -int(each.numel()))
            chosen = self._chosen[uid] = [weakref.ref(each) for each in every[:PARAMETERS]]
        found = []
        with torch.no_grad():
            for held in chosen:
                gradient = getattr(held(), "grad", None)
                if gradient is None or gradient.is_sparse:
                    continue
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                if local.numel():
                    flat = local.detach().reshape(-1) if local.is_contiguous() else local.detach().flatten()
                    found.append(flat[:: max(flat.numel() // VALUES, 1)][:VALUES].to(torch.float64))
            return torch.cat(found) if found else None
