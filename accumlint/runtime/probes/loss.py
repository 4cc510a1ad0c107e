"""Calls of loss functions, where torch.nn.functional looks its entry in C up, and of known fused losses."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder

WEIGHTED = {"huber_loss"}  # torch.nn.functional multiplies its elements by a weight itself


def install(recorder: Recorder, patches: Patches) -> None:
    import torch

    from accumlint.runtime.ledger import book, byhand, fused, units
    from accumlint.runtime.reference import choice

    ledger = book.Ledger(recorder)
    recorder.listeners.append(ledger)
    probe = Probe(recorder, ledger, torch)
    for owner, losses in ((torch._C._nn, units.IN_NN), (torch, units.IN_TORCH)):
        for name, loss in losses.items():
            patches.replace(owner, name, probe.around(loss))
            _keep_scriptable(torch, owner, name, patches)
    patches.replace(torch.autograd.graph.saved_tensors_hooks, "__enter__", probe.counting)
    fused.install(probe, patches)
    byhand.install(probe, patches)
    for name in byhand.REDUCING:
        _keep_scriptable(torch, torch, name, patches)
    choice.install(recorder, patches, ledger)


class Probe:
    """Records a call of a loss function when it can be part of a backward."""

    def __init__(self, recorder: Recorder, ledger: Any, torch: Any) -> None:
        self.recorder = recorder
        self.ledger = ledger
        self.torch = torch
        self._inside = threading.local()

    def around(self, loss: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What records the calls of one function."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **named: Any) -> Any:
                output = original(*given, **named)
                if self.listens():
                    self.note(loss, loss.arguments(given, named), output, sys._getframe(1))
                return output

            return call

        return make

    def counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Counts how often saved tensors are handed to hooks, outside of backwards."""

        def enter(hooks: Any) -> Any:
            if self._task() == -1:
                self.ledger.hooks_entered += 1
            return original(hooks)

        return enter

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Only the outermost loss function counts."""
        before = getattr(self._inside, "on", False)
        self._inside.on = True
        try:
            yield
        finally:
            self._inside.on = before

    def listens(self) -> bool:
        return self.recorder.active and not getattr(self._inside, "on", False) and self.torch.is_grad_enabled()

    def note(self, loss: Any, arguments: dict[str, Any], output: Any, caller: Any = None) -> None:
        """Enters the call in the ledger."""
        from accumlint.runtime.ledger import units

        try:
            if not self._is_trained(output):
                return
            packed = self._packs_saved_tensors()
            if packed and self._task() != -1:
                return  # a checkpoint computes its forward again; the first time counted
            reduction = units.reduction(arguments)
            with self.torch.no_grad():
                counted = loss.count(arguments)
                if reduction == units.NONE:
                    counted.factor = self._factor(loss.name, caller)
            self.ledger.enter(loss.name, reduction, counted, output, not packed)
        except Exception as error:
            self.recorder.trouble(f"{loss.name}: {type(error).__name__}: {error}")

    def note_reduction(self, name: str, reduction: int, count: Callable[[bool], Any], output: Any) -> None:
        """Remembers a sum or a mean by hand, of which `count` tells the units, with masks where those may be read."""
        try:
            if self._task() != -1 or not self._is_trained(output):
                return
            readable = not self._packs_saved_tensors()
            with self.torch.no_grad():
                counted = count(readable)
            self.ledger.mark(name, reduction, counted, output, readable)
        except Exception as error:
            self.recorder.trouble(f"{name}: {type(error).__name__}: {error}")

    def _is_trained(self, output: Any) -> bool:
        """Whether the output is a plain tensor with a graph, in eager mode."""
        torch = self.torch
        if not isinstance(output, torch.Tensor) or not output.requires_grad or output.grad_fn is None:
            return False
        wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
        if torch.jit.is_tracing() or torch.compiler.is_compiling() or (wrapped is not None and wrapped(output)):
            return False
        if hasattr(output, "to_local"):
            self.recorder.limit("a loss that is spread over ranks (DTensor) was not recorded")
            return False
        return not (output.is_cuda and torch.cuda.is_current_stream_capturing())

    def _factor(self, name: str, caller: Any) -> Any:
        """The weight that torch.nn.functional is about to multiply an unreduced loss by."""
        if name not in WEIGHTED or caller is None or caller.f_globals.get("__name__") != "torch.nn.functional":
            return None
        variables = caller.f_locals
        weight = variables.get("weight")
        if type(variables) is dict:
            variables.clear()  # before Python 3.13 a copy that the frame would keep, and with it every tensor in it
        return None if weight is None else weight.detach()

    def _task(self) -> int:
        """The backward that runs on this thread, -1 for none."""
        return int(self.torch._C._current_graph_task_id())

    def _packs_saved_tensors(self) -> bool:
        top = self.torch._C._autograd._top_saved_tensors_default_hooks
        try:
            return top(True) is not None
        except TypeError:  # older versions take no argument
            return top() is not None


def _keep_scriptable(torch: Any, owner: Any, name: str, patches: Patches) -> None:
    """TorchScript knows builtins by identity: the replacement must be known as well."""
    builtins = sys.modules.get("torch.jit._builtins")
    function = getattr(owner, name, None)
    if builtins is not None and getattr(builtins, "_builtin_table", None) is not None and function is not None:
        builtins._register_builtin(function, f"aten::{name}")
        patches.on_undo(lambda: builtins._builtin_table.pop(id(function), None))
