"""What one process saw, as plain data: the file that a rank leaves for the controller."""

from __future__ import annotations

import os
import platform
import socket
import sys
from dataclasses import asdict
from typing import Any

from accumlint.runtime.recorder import Recorder
from accumlint.trace import Role

VERSION = 1
# What the classes of modules say about the limits of equivalence with one large batch.
COUPLED = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d"}
RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"}


def report_of(recorder: Recorder, *, ended: str = "running", error: dict[str, Any] | None = None, stack: str = "") -> dict[str, Any]:
    """The report. `ended` is one of "running", "updates", "script", "error", "stalled"."""
    rank, world, backend = _position()
    return {
        "version": VERSION,
        "token": recorder.settings.token,
        "rank": rank,
        "world": world,
        "local_rank": int(os.environ.get("LOCAL_RANK", rank)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "torch": str(sys.modules["torch"].__version__),
        "python": platform.python_version(),
        "device": _device(recorder),
        "backend": backend,
        "script": os.path.realpath(sys.argv[0]) if sys.argv and sys.argv[0] else "",
        "argv": list(sys.argv[1:]),
        "ended": ended,
        "error": error,
        "stack": stack,
        "updates": recorder.updates,
        "objects": _objects(recorder),
        "stacks": recorder.stacks,
        "events": recorder.events(),
        "facts": recorder.facts,
        "limits": recorder.limits,
        "troubles": recorder.troubles,
        "modules": _modules(recorder),
        "memory": _memory(recorder),
    }


def _position() -> tuple[int, int, str]:
    """Rank, number of ranks, and the backend of their group, "" without one."""
    distributed = sys.modules["torch"].distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size(), str(distributed.get_backend())
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), ""


def _objects(recorder: Recorder) -> list[dict[str, Any]]:
    entries = recorder.objects.entries
    for entry in entries:
        if entry.role == Role.OPTIMIZER.value:
            entry.base = _module_of(recorder, entry.uid)
    keep = ("uid", "role", "name", "type", "wrapper", "base", "options", "numbers")
    return [{key: value for key, value in asdict(entry).items() if key in keep} for entry in entries]


def _module_of(recorder: Recorder, uid: int) -> int | None:
    """The module that holds the optimizer's parameters, where there is one that no other optimizer shares."""
    entries = recorder.objects.entries
    owns = entries[uid].owns
    others = [each.owns for each in entries if each.role == Role.OPTIMIZER.value and each.uid != uid]
    holders = [each for each in entries if each.role == Role.MODEL.value and owns and owns <= each.owns]
    holders = [each for each in holders if not any(other & each.owns for other in others if not other & owns)]
    smallest = min(holders, key=lambda each: (len(each.owns), -each.uid), default=None)
    return None if smallest is None else smallest.base if smallest.base is not None else smallest.uid


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
        state += sum(_bytes(value) for held in optimizer.state.values() if isinstance(held, dict) for value in held.values())
    found = {"parameters": parameters, "gradients": gradients, "optimizer_state": state}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["peak_allocated"] = int(torch.cuda.max_memory_allocated())
    return found


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size()) if hasattr(local, "element_size") else 0
