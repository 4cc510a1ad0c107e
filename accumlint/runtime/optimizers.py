"""The optimizers of a run: which parameters they hold, which a backward reaches, and whether their gradients were cleared by hand."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from accumlint.trace import Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.runtime.recorder import Recorder, Row

MANUAL = "manual"
SHARDED = frozenset({Wrapper.FSDP1.value, Wrapper.FSDP2.value})  # their parameters are no leaves of a backward


class Optimizers:
    """Every optimizer that was made or has stepped, with a leaf hook on each of its parameters."""

    def __init__(self, recorder: Recorder) -> None:
        self.reached: set[int] = set()  # ids of the parameters that the running backward has reached
        self._recorder = recorder
        self._held: dict[int, weakref.ref[Any]] = {}
        self._hooked: dict[int, tuple[Any, Any]] = {}
        self._full: set[int] = set()  # optimizers that held gradients after the last backward or step

    def watch(self, optimizer: Any) -> int:
        """The number of an optimizer; parameters that are new to it get their hooks."""
        optimizer = _within(optimizer)
        uid = self._recorder.uid(optimizer, Role.OPTIMIZER)
        self._held.setdefault(uid, weakref.ref(optimizer))
        found = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owns = frozenset(id(parameter) for parameter in found)
        entry = self._recorder.objects.entry(uid)
        if entry.owns != owns:
            entry.owns = owns
            for parameter in found:
                held = self._hooked.get(id(parameter))
                if held is None or held[0]() is not parameter:
                    self._hook(parameter)
        return uid

    def _hook(self, parameter: Any) -> None:
        if not (parameter.requires_grad and parameter.is_leaf):
            return
        recorder, held, key, reached = self._recorder, weakref.ref(parameter), id(parameter), self.reached

        def contributes(gradient: Any) -> None:
            if recorder.in_backward is not None and recorder.active:
                reached.add(key)
                recorder.tell("parameter_gradient", held(), gradient)

        try:
            self._hooked[key] = (held, parameter.register_hook(contributes))
        except RuntimeError as error:
            recorder.trouble(f"leaf hook: {error}")

    def live(self) -> Iterable[tuple[int, Any]]:
        """Number and optimizer of those that still exist."""
        for uid, held in self._held.items():
            optimizer = held()
            if optimizer is not None:
                yield uid, optimizer

    def holding(self, parameters: Iterable[Any]) -> list[int]:
        """The optimizers that hold some of these parameters."""
        ids = {id(parameter) for parameter in parameters}
        return [uid for uid in self._held if self._recorder.objects.entry(uid).owns & ids]

    def inside(self, parameters: Iterable[Any]) -> list[int]:
        """The optimizers all of whose parameters are among these."""
        ids = {id(parameter) for parameter in parameters}
        return [uid for uid in self._held if self._recorder.objects.entry(uid).owns <= ids]

    def parameters(self, uid: int) -> list[Any]:
        """The parameters of an optimizer that still exists."""
        optimizer = self._held[uid]() if uid in self._held else None
        return [] if optimizer is None else [each for group in optimizer.param_groups for each in group["params"]]

    def backward_comes(self) -> None:
        """Before a backward: gradients that are gone without a call that clears were set to None by hand."""
        gone = [uid for uid, optimizer in self.live() if uid in self._full and not _holds(optimizer)]
        if gone:
            self._recorder.event(Kind.ZERO, targets=gone, options=[MANUAL], note="the gradients were set to None")
        self._full.difference_update(gone)
        self.reached.clear()

    def backward_done(self, row: Row) -> None:
        """What the backward has reached: models in `reaches`, optimizers in the numbers."""
        reached = self.reached
        entries = self._recorder.objects.entries
        self._reach_sharded(row)
        if not reached:
            return
        row.reaches = [entry.uid for entry in entries if entry.role == Role.MODEL.value and entry.owns & reached]
        optimizers = [uid for uid in self._held if entries[uid].owns & reached]
        row.numbers["optimizers"] = optimizers
        self._full.update(uid for uid, optimizer in self.live() if uid in optimizers and _holds(optimizer))

    def _reach_sharded(self, row: Row) -> None:
        """A backward reaches the parameters of the sharded models whose forwards it goes through."""
        entries = self._recorder.objects.entries
        for index in row.forwards:
            model = self._recorder.rows[index].model
            if model is None or entries[model].wrapper not in SHARDED:
                continue
            if not any(entries[uid].owns & entries[model].owns for uid in self._held):
                # They are replaced by their shards after the wrapper has become known.
                modules = [info.module() for info in self._recorder.objects.wrappers if info.uid == model]
                entries[model].owns = frozenset(id(each) for module in modules for each in module.parameters())
            self.reached |= entries[model].owns

    def found_full(self, uid: int) -> None:
        """An optimizer held gradients already when it was first met."""
        self._full.add(uid)

    def cleared(self, targets: Iterable[int]) -> None:
        """These were cleared by a call that has its own event."""
        self._full.difference_update(targets)

    def forget(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()


def _holds(optimizer: Any) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])


def _within(optimizer: Any) -> Any:
    """The optimizer that a helper of the script is built around, which a scaler may be given in its place."""
    kind = sys.modules["torch"].optim.Optimizer
    if isinstance(optimizer, kind):
        return optimizer
    held = [each for each in getattr(optimizer, "__dict__", {}).values() if isinstance(each, kind)]
    return held[0] if len(held) == 1 else optimizer
