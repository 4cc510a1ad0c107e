"""Losses that are written out: sums and means to one number that the user's code calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, MethodType
from typing import Any

from accumlint.runtime.ledger.masks import valid_elements
from accumlint.runtime.ledger.units import MEAN, SUM, Units
from accumlint.runtime.patches import Patches
from accumlint.runtime.places import USER, belongs_to

REDUCING = {"sum": SUM, "mean": MEAN}


def install(probe: Any, patches: Patches) -> None:
    """Replaces the reductions of torch and of its tensors."""
    for owner, module, path in ((probe.torch, "torch", ""), (probe.torch.Tensor, "torch", "Tensor.")):
        for name in REDUCING:
            patches.replace(owner, name, lambda original, name=name: Replaced(original, probe, name))  # type: ignore[misc]
            made = vars(owner)[name]
            made.__module__, made.__qualname__ = module, path + name  # by which it is pickled


class Replaced:
    """What stands for a function of torch, as a method too. It equals the original, which tables of overrides may be keyed by."""

    def __init__(self, original: Callable[..., Any], probe: Any, name: str) -> None:
        self._original = original
        self._probe = probe
        self._name = name
        self._reduction = REDUCING[name]
        self._tensor = probe.torch.Tensor

    def __call__(self, *given: Any, **named: Any) -> Any:
        output = self._original(*given, **named)
        if type(output) is self._tensor and output.requires_grad and not output.dim() and self._asked_by_user(sys._getframe(1)):
            self._note(given[0] if given else named.get("input"), output)
        return output

    def _asked_by_user(self, frame: FrameType) -> bool:
        probe = self._probe
        return probe.recorder.in_backward is None and belongs_to(frame.f_code.co_filename) == USER and bool(probe.listens())

    def _note(self, reduced: Any, output: Any) -> None:
        if type(reduced) is self._tensor and reduced.layout is self._probe.torch.strided and output.is_floating_point():
            self._probe.note_reduction(self._name, self._reduction, lambda readable: self._count(reduced, readable), output)

    def _count(self, reduced: Any, readable: bool) -> Units:
        """A mean runs over all elements; in a sum, a mask has set to zero what does not count."""
        units = reduced.numel() if self._reduction == MEAN else valid_elements(reduced, readable)
        return Units(units, reduced.numel(), int(reduced.shape[0]) if reduced.dim() > 1 else None)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self._original)

    def __hash__(self) -> int:
        return hash(self._original)

    def __reduce__(self) -> str:
        return str(self.__qualname__)  # type: ignore[attr-defined]
