"""The reference as a linear sketch: 4096 sums over random signs, for models whose gradients should not be kept twice.

Linear, so the contributions of backwards, and the sketches of ranks, are added and weighted as the gradients themselves.
The norm of a sketch is that of the vector, to about one part in a hundred.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from accumlint.runtime.recorder import Recorder
from accumlint.runtime.reference.window import Slot, Window

BUCKETS = 4096
ROWS = 256  # of the pattern of signs, which every block of BUCKETS × ROWS elements uses again under signs of its own
SEED = 20260


class Sketch:
    """Sums signs times elements into buckets. The signs come from a generator of its own and are the same on every rank."""

    def __init__(self, recorder: Recorder, plan: Any) -> None:
        self._plan = plan
        self._recorder = recorder
        self._patterns: dict[tuple[Any, Any], Any] = {}
        self._total: Any = None
        self._scratch: dict[tuple[Any, Any], Any] = {}

    def add(self, slot: Slot, gradient: Any, ratio: Any) -> None:
        if slot.signs is None:
            slot.signs = _signs(slot.index, gradient.numel(), gradient.device)
        if self._total is None or self._total.dtype != _format(gradient) or self._total.device != gradient.device:
            fresh = torch.zeros(BUCKETS, dtype=_format(gradient), device=gradient.device)
            self._total = fresh if self._total is None else fresh + self._total.to(fresh.device, fresh.dtype)
        self._into(self._total, slot, gradient, ratio)

    def _into(self, total: Any, slot: Slot, gradient: Any, factor: Any) -> None:
        """Adds factor times the sketch of a gradient to `total`."""
        flat = gradient.detach().reshape(-1)
        signs = slot.signs.to(total.dtype) * factor.to(total.device, total.dtype)
        pattern, scratch = self._pattern(total)
        # Parameters follow each other over the buckets: a model smaller than a row is kept whole.
        begin = slot.start % BUCKETS
        scratch[:begin].zero_()
        for number, start in enumerate(range(0, flat.numel(), BUCKETS * ROWS)):
            block = flat[start : start + BUCKETS * ROWS]
            end = begin + block.numel()
            rows = -(-end // BUCKETS)
            torch.mul(block, pattern[: block.numel()], out=scratch[begin:end])
            scratch[end : rows * BUCKETS].zero_()
            first = number * (ROWS + 1)
            total.addmv_(scratch[: rows * BUCKETS].view(rows, BUCKETS).t(), signs[first : first + rows])

    def _pattern(self, total: Any) -> tuple[Any, Any]:
        key = (total.dtype, total.device)
        if key not in self._patterns:
            generator = torch.Generator().manual_seed(SEED)
            bits = torch.randint(0, 2, (BUCKETS * ROWS,), generator=generator, dtype=torch.int8, device="cpu")
            self._patterns[key] = (bits * 2 - 1).to(total.device, total.dtype)
            self._scratch[key] = torch.empty((ROWS + 1) * BUCKETS, dtype=total.dtype, device=total.device)
        return self._patterns[key], self._scratch[key]

    def compare(self, window: Window, scale: Any) -> Sketched:
        gradient = torch.zeros_like(self._total)
        one = torch.ones((), dtype=gradient.dtype, device=gradient.device)
        formats = set()
        for slot, parameter in window.live():
            if parameter.grad is not None:
                if slot.signs is None:
                    slot.signs = _signs(slot.index, parameter.grad.numel(), parameter.grad.device)
                self._into(gradient, slot, parameter.grad.to(gradient.device), one)
                formats.add(str(parameter.grad.dtype).removeprefix("torch."))
        if scale is not None:
            gradient /= scale.to(gradient.device, gradient.dtype).reshape(())
        kept = sum(each.numel() * each.element_size() for each in (*self._patterns.values(), *self._scratch.values(), self._total))
        sums = self._total / window.first.to(gradient.device, gradient.dtype)
        return Sketched(sums, gradient, "/".join(sorted(formats)), kept, self._plan.world, self._plan.rank)

    def forget(self) -> None:
        if self._total is not None:
            self._total.zero_()

    def release(self, window: Window) -> None:
        self._total = None
        self._patterns.clear()
        self._scratch.clear()
        for slot in window.slots.values():
            slot.signs = None


@dataclass(slots=True)
class Sketched:
    """Sketches of the sum of g / c and of the gradient, on the device. Other ranks' sums are added by the controller."""

    sums: Any
    gradient: Any
    dtype: str
    kept: int
    world: int
    rank: int
    kind: str = "sketch"

    def read(self, recorder: Recorder, numbers: dict[str, Any]) -> None:
        recorder.later(numbers, "sums", self.sums)
        if self.rank == 0:
            recorder.later(numbers, "gradient", self.gradient)
        self.sums = self.gradient = None


def _signs(index: int, elements: int, device: Any) -> Any:
    """A sign for each row that a parameter's blocks lie in, by its place among the optimizer's parameters."""
    generator = torch.Generator().manual_seed(SEED + 1 + index)
    blocks = -(-elements // (BUCKETS * ROWS))
    bits = torch.randint(0, 2, (blocks * (ROWS + 1),), generator=generator, dtype=torch.int8, device="cpu")
    return (bits * 2 - 1).to(device)


def _format(gradient: Any) -> Any:
    return torch.float64 if gradient.dtype == torch.float64 else torch.float32
