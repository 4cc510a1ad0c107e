"""Which reference a run can afford, and the listener that builds it."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from accumlint.runtime.ledger.book import Ledger
from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.runtime.reference.gradients import Reference
from accumlint.runtime.settings import Settings

LIMIT = 2 << 30  # bytes of gradients, over all ranks and updates, up to which "auto" is exact
ROOM = 1.5  # times the gradients must fit into what a device has left


def install(recorder: Recorder, patches: Patches, ledger: Ledger) -> None:
    """Adds the reference to what listens; without one, no leaf costs anything."""
    settings = recorder.settings
    if settings.reference == "off":
        recorder.listeners.append(Absent("off", "switched off"))
        return
    if settings.objective != "token":
        why = f"the reference weighs valid targets, and the objective is per {settings.objective}"
        recorder.listeners.append(Absent("not observed", why))
        return
    scalers = Scalers()
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    patches.replace(scaler, "scale", scalers.scaling)
    recorder.listeners.append(Reference(recorder, ledger, scalers, choose(settings)))


class Absent(Listener):
    """Says of every update why there is no reference."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        self.why = why

    def window_closes(self, row: Row) -> None:
        row.numbers["reference"] = {"kind": self.kind, "why": self.why}


class Scalers:
    """The scaler that scaled last, so that gradients it has not unscaled yet can be compared."""

    def __init__(self) -> None:
        self._last: Callable[[], Any] = lambda: None

    def scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(this: Any, outputs: Any) -> Any:
            if this.is_enabled():
                self._last = weakref.ref(this)
            return original(this, outputs)

        return scale

    def pending(self, optimizer: Any, *, stepping: bool) -> Any:
        """The scale that an optimizer's gradients still carry, a tensor of one element, or None.

        A fused optimizer that steps is handed the scale; before that, the scaler knows whether it has unscaled.
        """
        if stepping:
            return getattr(optimizer, "grad_scale", None)
        scaler = self._last()
        states = getattr(scaler, "_per_optimizer_states", None)
        if scaler is None or states is None:
            return None
        stage = states[id(optimizer)]["stage"] if id(optimizer) in states else None
        return scaler._scale if stage is None or stage.name == "READY" else None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the reference of one optimizer is kept. `world` is the number of ranks; `kind` is "exact" or "sketch"."""

    kind: str
    rank: int
    world: int


def choose(settings: Settings) -> Callable[[list[Any]], Plan]:
    """Decides for the parameters of an optimizer, when its first gradient comes."""

    def plan(parameters: list[Any]) -> Plan:
        rank, world = _position()
        shared = world == 1 or bool(settings.folder)  # without a folder there is nowhere to write
        if settings.reference != "auto":
            return Plan(settings.reference if shared else "sketch", rank, world)
        size = sum(each.numel() * each.element_size() for each in parameters)
        # One rank compares in place; several write their part for each update.
        total = size if world == 1 else size * world * settings.steps
        exact = shared and total <= LIMIT and (world == 1 or _one_host(settings, world)) and _fits(parameters, size)
        return Plan("exact" if exact else "sketch", rank, world)

    return plan


def _position() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _one_host(settings: Settings, world: int) -> bool:
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is not None and local.isdigit():
        return int(local) == world
    return not settings.host or settings.host == socket.gethostname()


def _fits(parameters: list[Any], size: int) -> bool:
    """Whether the accelerator has room for one more copy of the gradients."""
    device = next((each.device for each in parameters), None)
    if device is None or device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return bool(free + reserved > ROOM * size)
