"""The reference as one more copy of the gradients."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from accumlint.runtime.ledger.book import wide
from accumlint.runtime.recorder import Recorder
from accumlint.runtime.reference.window import Slot, Window

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # what halves are compared and written in


class Exact:
    """Sums the contributions of each parameter in its gradient's own format."""

    def __init__(self, recorder: Recorder, plan: Any) -> None:
        self._recorder = recorder
        self._plan = plan
        self._names: dict[int, str] = {}

    def add(self, slot: Slot, gradient: Any, ratio: Any) -> None:
        """Adds a contribution; `ratio` has the gradient's format and device."""
        if slot.buffer is None or slot.buffer.shape != gradient.shape or slot.buffer.dtype != gradient.dtype:
            slot.buffer, slot.fresh = torch.empty_like(gradient), True
        if slot.fresh:
            torch.mul(gradient, ratio, out=slot.buffer)
        else:
            slot.buffer.addcmul_(gradient, ratio)

    def compare(self, window: Window, scale: Any) -> Compared | Written:
        if self._plan.world > 1:
            return self._write(window, scale)
        over = 1 / (window.units * window.first)
        if scale is not None:
            over = over * wide(scale.to(over.device)).reshape(())
        distances, sizes, largest, names, formats = [], [], [], [], set()
        bytes_kept = 0
        for slot, parameter in window.live():
            gradient = parameter.grad
            if gradient is None and slot.fresh:
                continue
            difference, kept = self._expected(slot, gradient, over)
            size = _norm(difference)
            if gradient is not None:
                difference.sub_(gradient)
            distances.append(_norm(difference))
            sizes.append(size)
            largest.append(_largest(difference))
            names.append(self.name_of(parameter))
            formats.add(str((gradient if gradient is not None else difference).dtype).removeprefix("torch."))
            bytes_kept += kept
        return Compared(distances, sizes, largest, names, "/".join(sorted(formats)), bytes_kept, scale)

    def _expected(self, slot: Slot, gradient: Any, over: Any) -> tuple[Any, int]:
        """What the gradient should be, as a new tensor, and the bytes that are kept for it."""
        if slot.fresh:
            return torch.zeros_like(gradient, dtype=WIDER.get(gradient.dtype, gradient.dtype)), 0
        kept = slot.buffer.to(WIDER.get(slot.buffer.dtype, slot.buffer.dtype))
        return kept * over.to(kept.device, kept.dtype), slot.buffer.numel() * slot.buffer.element_size()

    def name_of(self, parameter: Any) -> str:
        if id(parameter) not in self._names:
            self._names = names(self._recorder)
        return self._names.get(id(parameter), "parameter")

    def _write(self, window: Window, scale: Any) -> Written:
        """Several ranks: the sum of g / c goes to a file, and on rank 0 the gradient as well."""
        stem = f"reference-{self._plan.rank}-{window.order}-{window.number}"
        layout: list[list[Any]] = []
        written = Written(f"{stem}.bin", f"{stem}-gradient.bin" if self._plan.rank == 0 else "", layout)
        folder = self._recorder.settings.folder
        factor = torch.where(window.first == 0, torch.zeros_like(window.first), 1 / window.first)
        formats = set()
        with open(os.path.join(folder, written.file), "wb") as sums:
            for slot, parameter in window.live():
                if slot.fresh and parameter.grad is None:
                    continue
                like = parameter.grad if slot.fresh else slot.buffer
                dtype = WIDER.get(like.dtype, like.dtype)
                layout.append([slot.index, self.name_of(parameter), like.numel(), str(dtype).removeprefix("torch.")])
                formats.add(str(like.dtype).removeprefix("torch."))
                kept = torch.zeros_like(like, dtype=dtype) if slot.fresh else slot.buffer.to(dtype) * factor.to(like.device, dtype)
                write(sums, kept)
                written.kept += 0 if slot.fresh else like.numel() * like.element_size()
        written.dtype = "/".join(sorted(formats))
        if written.gradient:
            with open(os.path.join(folder, written.gradient), "wb") as gradients:
                for index, _, _, name in layout:
                    self._write_gradient(gradients, window, index, getattr(torch, name), scale)
        return written

    def _write_gradient(self, file: Any, window: Window, index: int, dtype: Any, scale: Any) -> None:
        parameter = next(each for slot, each in window.live() if slot.index == index)
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradient.to(dtype)
        write(file, gradient if scale is None else gradient / scale.to(gradient.device, dtype).reshape(()))

    def forget(self) -> None:
        """Buffers are written over."""

    def release(self, window: Window) -> None:
        for slot in window.slots.values():
            slot.buffer, slot.fresh = None, True


@dataclass(slots=True)
class Compared:
    """Norms of the differences and of the reference by parameter, and the largest differences, on the device."""

    distances: list[Any]
    sizes: list[Any]
    largest: list[Any]
    names: list[str]
    dtype: str
    kept: int
    scale: Any
    kind: str = "exact"

    def read(self, recorder: Recorder, numbers: dict[str, Any]) -> None:
        if self.distances:
            with torch.no_grad():
                device = self.distances[0].device
                for key in ("distances", "sizes", "largest"):
                    recorder.later(numbers, key, torch.stack([wide(each.to(device)) for each in getattr(self, key)]))
        if self.scale is not None:
            recorder.later(numbers, "scale", self.scale.clone().reshape(()))
        self.distances = self.sizes = self.largest = []
        self.scale = None


@dataclass(slots=True)
class Written:
    """Files in the run's folder, and what is in them: index, name, elements and format of each parameter."""

    file: str
    gradient: str
    layout: list[list[Any]] = field(default_factory=list)
    kept: int = 0
    dtype: str = ""
    kind: str = "exact"

    def read(self, recorder: Recorder, numbers: dict[str, Any]) -> None:
        """Nothing is left on a device."""


def names(recorder: Recorder) -> dict[int, str]:
    """The names of parameters, by id, as their models spell them."""
    found: dict[int, str] = {}
    for module in recorder.objects.models():
        for name, parameter in module.named_parameters():
            for wrapper in ("module.", "_orig_mod.", "_fsdp_wrapped_module."):
                name = name.replace(wrapper, "", 1) if name.startswith(wrapper) else name
            if len(name) > len(found.get(id(parameter), "")):
                found[id(parameter)] = name
    return found


def write(file: Any, tensor: Any) -> None:
    """The bytes of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    if plain.numel():
        file.write((ctypes.c_char * (plain.numel() * plain.element_size())).from_address(plain.data_ptr()))


def _norm(tensor: Any) -> Any:
    return torch.linalg.vector_norm(tensor)


def _largest(tensor: Any) -> Any:
    if not tensor.numel():
        return tensor.new_zeros(())
    low, high = torch.aminmax(tensor)
    return torch.maximum(low.abs(), high.abs())
