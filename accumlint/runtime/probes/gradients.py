"""What is done to `.grad` between the last backward and the step: clipping, scaling by hand, clearing by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.places import USER, belongs_to
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind

NORM_ONLY = "norm-only"
MANUAL = "manual"
SCALING = {
    "mul_": "mul",
    "div_": "div",
    "__imul__": "mul",
    "__itruediv__": "div",
    "true_divide_": "div",
    "multiply_": "mul",
    "divide_": "div",
}
CLEARING = ("zero_", "fill_")
LISTS = {"_foreach_mul_": "mul", "_foreach_div_": "div", "_foreach_zero_": ""}

Function = Callable[..., Any]


def install(recorder: Recorder, patches: Patches) -> None:
    import torch
    from torch.nn.utils import clip_grad

    running: list[bool] = []
    for module in (clip_grad, torch.nn.utils):
        patches.replace(module, "clip_grad_norm_", lambda original: _clipping(recorder, running, original))
        patches.replace(module, "clip_grad_value_", lambda original: _clipping(recorder, running, original))
    # What a `clip_grad_norm_` calls that was imported by name before it was replaced, and its public name.
    for module, name in ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_")):
        patches.replace(module, name, lambda original: _clipping_to(recorder, running, original))
    gradients = _Gradients(recorder)
    for name, operation in SCALING.items():
        patches.replace(torch.Tensor, name, _scaling(gradients, operation))
    for name in CLEARING:
        patches.replace(torch.Tensor, name, lambda original: _clearing(gradients, original))
    for name, operation in LISTS.items():
        patches.replace(torch, name, _scaling_list(gradients, operation))
    recorder.listeners.append(gradients)


def _clipping_to(recorder: Recorder, running: list[bool], original: Function) -> Function:
    """The half of a clipping that scales: the norm is given."""

    def scale(parameters: Any, max_norm: Any, total_norm: Any, *arguments: Any, **options: Any) -> Any:
        def known_norm(held: Any, *_: Any, **__: Any) -> Any:
            original(held, max_norm, total_norm, *arguments, **options)
            return total_norm

        if not recorder.active or running:
            return original(parameters, max_norm, total_norm, *arguments, **options)
        _clipping(recorder, running, known_norm)(parameters, max_norm)
        return None

    return scale


def _clipping(recorder: Recorder, running: list[bool], original: Function) -> Function:
    def clip(parameters: Any, *arguments: Any, **options: Any) -> Any:
        if not recorder.active or running:
            return original(parameters, *arguments, **options)
        import torch

        held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        limit = arguments[0] if arguments else options.get("max_norm", options.get("clip_value"))
        marks = [NORM_ONLY] if isinstance(limit, (int, float)) and limit == float("inf") else []
        row = recorder.event(Kind.CLIP, targets=recorder.optimizers.holding(held), options=marks)
        recorder.tell("change_begins", row)
        running.append(True)
        try:
            norm = original(held, *arguments, **options)
        finally:
            running.pop()
        if isinstance(limit, (int, float)):
            row.numbers["limit"] = float(limit)
        if isinstance(norm, torch.Tensor) and norm.numel() == 1 and not hasattr(norm, "to_local"):  # its parts would have to be gathered
            recorder.later(row.numbers, "norm", norm.detach().clone())
        recorder.tell("change_ends", row)
        return norm

    return clip


class _Gradients(Listener):
    """Which tensors are gradients at this moment, by the address of their memory."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.busy = False
        self._owners: dict[int, int] = {}
        self._fresh = False
        self._rows: dict[tuple[int, str], Row] = {}

    def backward_ends(self, row: Row) -> None:
        self._fresh = False
        self._rows.clear()

    def change_ends(self, row: Row) -> None:
        self._fresh = False

    def zeroed(self, row: Row) -> None:
        self._fresh = False
        self._rows.clear()

    def owner(self, tensor: Any) -> int | None:
        """The optimizer that steps on this gradient, or None where the tensor is none."""
        try:
            pointer = tensor.data_ptr()
        except (RuntimeError, NotImplementedError):
            return None
        found = self._owners.get(pointer) if self._fresh else None
        if found is None and not self._fresh:
            self._owners = dict(self._addresses())
            self._fresh = True
            found = self._owners.get(pointer)
        return found

    def _addresses(self) -> Iterable[tuple[int, int]]:
        for uid, optimizer in self.recorder.optimizers.live():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None and not gradient.is_sparse:
                        yield (gradient.to_local() if hasattr(gradient, "to_local") else gradient).data_ptr(), uid

    def asked_by_user(self) -> bool:
        """Whether the call comes straight from the user's code."""
        return (
            not self.busy
            and self.recorder.active
            and self.recorder.in_backward is None
            and belongs_to(sys._getframe(2).f_code.co_filename) == USER
        )

    def scaled(self, tensor: Any, operation: str, operand: Any, call: Callable[[], Any]) -> Any:
        """Runs a scaling of a gradient; all parameters of one statement make one event."""
        owner = self.owner(tensor)
        if owner is None:
            return call()
        return self._change(owner, operation, operand, call)

    def _change(self, owner: int, operation: str, operand: Any, call: Callable[[], Any]) -> Any:
        recorder = self.recorder
        row = recorder.event(Kind.NORMALIZE, targets=[owner])
        first = self._rows.setdefault((row.at, operation), row)
        if first is not row:
            recorder.rows.pop()
            if owner not in first.targets:
                first.targets.append(owner)
            return call()
        row.numbers["operation"] = operation
        _keep(recorder, row, operand)
        return call()

    def cleared(self, tensor: Any) -> None:
        owner = self.owner(tensor)
        if owner is None:
            return
        row = self.recorder.event(Kind.ZERO, targets=[owner], options=[MANUAL])
        first = self._rows.setdefault((row.at, "zero"), row)
        if first is not row:
            self.recorder.rows.pop()
        else:
            self.recorder.optimizers.cleared(row.targets)


def _keep(recorder: Recorder, row: Row, operand: Any) -> None:
    import torch

    if isinstance(operand, (int, float)):
        row.numbers["operand"] = float(operand)
    elif isinstance(operand, torch.Tensor) and operand.numel() == 1:
        recorder.later(row.numbers, "operand", operand.detach().reshape(()).clone())


def _scaling(gradients: _Gradients, operation: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def scale(this: Any, other: Any, *arguments: Any, **options: Any) -> Any:
            if not gradients.asked_by_user():
                return original(this, other, *arguments, **options)
            return gradients.scaled(this, operation, other, lambda: original(this, other, *arguments, **options))

        return scale

    return make


def _clearing(gradients: _Gradients, original: Function) -> Function:
    def clear(this: Any, *arguments: Any, **options: Any) -> Any:
        zero = not arguments or (isinstance(arguments[0], (int, float)) and arguments[0] == 0)
        if zero and gradients.asked_by_user():
            gradients.cleared(this)
        return original(this, *arguments, **options)

    return clear


def _scaling_list(gradients: _Gradients, operation: str) -> Callable[[Function], Function]:
    def make(original: Function) -> Function:
        def scale(tensors: Any, *arguments: Any, **options: Any) -> Any:
            if not gradients.asked_by_user() or not tensors:
                return original(tensors, *arguments, **options)
            if not operation:
                gradients.cleared(tensors[0])
                return original(tensors)
            operand = arguments[0] if arguments else None
            return gradients.scaled(tensors[0], operation, operand, lambda: original(tensors, *arguments, **options))

        return scale

    return make
