"""What the run holds while it trains: memory, the device, and modules that keep micro-batches from being one large batch."""

from __future__ import annotations

import sys
from typing import Any

from accumlint.runtime.objects import parameters_of
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Role

COUPLED = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d"}
RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}


class Census(Listener):
    """Counts at the end of every update, while the gradients and the optimizer's state are there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def window_closes(self, row: Row) -> None:
        census = self._recorder.census
        _give_bases(self._recorder)
        census["memory"] = _memory(self._recorder)
        census["position"] = position() or census.get("position")
        if "modules" not in census:
            census["modules"] = _modules(self._recorder)
            census["device"] = _device(self._recorder)


def position() -> tuple[int, int, str] | None:
    """Rank, number of ranks and backend of the process group, where there is one now."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())
    return None


def _give_bases(recorder: Recorder) -> None:
    """Each optimizer's module: the smallest one that holds all of its parameters and none of another optimizer's.

    Inside a wrapper it is the wrapped module or none, for a wrapper reduces the whole of it.
    """
    objects = recorder.objects
    every = [entry for entry in objects.entries if entry.role == Role.OPTIMIZER.value and entry.owns]
    for entry in every:
        if entry.base is None:
            others = [other.owns for other in every if not other.owns & entry.owns]
            entry.base = next(
                (base for model in list(objects.models()) if (base := _base(recorder, model, entry.owns, others)) is not None), None
            )


def _base(recorder: Recorder, model: Any, owns: frozenset[int], others: list[frozenset[int]]) -> int | None:
    objects = recorder.objects
    root = objects.known(model)
    if root is None or not owns <= objects.entry(root).owns:
        return None
    best = _smallest(model, owns, others)
    wrapped = objects.wrapper_of(model) is not None or objects.wrapper_around(model) is not None
    if best is None or (wrapped and best is not model and objects.known(best) is None):
        return None
    uid = objects.known(best)
    uid = recorder.uid(best, Role.MODEL, owns=parameters_of(best)) if uid is None else uid
    base = objects.entry(uid).base
    return uid if base is None else base


def _smallest(model: Any, owns: frozenset[int], others: list[frozenset[int]]) -> Any:
    found, size = None, 0
    for module in model.modules():
        held = parameters_of(module)
        if owns <= held and not any(held & other for other in others) and (found is None or len(held) < size):
            found, size = module, len(held)
    return found


def _device(recorder: Recorder) -> str:
    for _, optimizer in recorder.optimizers.live():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                return str(parameter.device.type)
    return ""


def _modules(recorder: Recorder) -> dict[str, list[str]]:
    """The kinds of modules in the trained models that make micro-batches differ from one large batch."""
    found: dict[str, set[str]] = {"coupled": set(), "random": set()}
    for model in recorder.objects.models():
        for module in model.modules():
            kind = type(module).__name__
            if module.training and kind in COUPLED:
                found["coupled"].add(kind)
            elif module.training and kind in RANDOM and getattr(module, "p", 0) > 0:
                found["random"].add(kind)
    return {name: sorted(kinds) for name, kinds in found.items()}


def _memory(recorder: Recorder) -> dict[str, int]:
    """Bytes of this rank: parameters, gradients, optimizer state; and the peak that was allocated, where the device tells."""
    torch = sys.modules["torch"]
    parameters = gradients = state = 0
    seen: set[int] = set()
    for _, optimizer in recorder.optimizers.live():
        for group in optimizer.param_groups:
            for each in group["params"]:
                if id(each) not in seen:
                    seen.add(id(each))
                    parameters += _bytes(each)
                    gradients += _bytes(each.grad) if each.grad is not None else 0
        state += sum(
            _bytes(value) for held in getattr(optimizer, "state", {}).values() if isinstance(held, dict) for value in held.values()
        )
    found = {"parameters": parameters, "gradients": gradients, "optimizer_state": state}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["peak_allocated"] = int(torch.cuda.max_memory_allocated())
    return found


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size()) if hasattr(local, "element_size") else 0
