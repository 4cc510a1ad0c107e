"""Forwards and backwards of the models that are trained."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from accumlint.runtime.ledger.graph import PASSAGE
from accumlint.runtime.microbatches import CONTINUES
from accumlint.runtime.objects import parameters_of
from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.modules import Modules
from accumlint.runtime.probes.trainer import TRUSTED, takes_as_it_is
from accumlint.runtime.recorder import Recorder
from accumlint.trace import Kind, Role

MAX_TENSORS = 8  # of an input or output that are looked at
MAX_DEPTH = 4
SAMPLE = 16


def install(recorder: Recorder, patches: Patches) -> None:
    import torch

    forwards = _Forwards(recorder, torch)
    patches.replace(torch.nn.Module, "__call__", forwards.around)
    patches.replace(torch.autograd, "backward", _Backwards(recorder, torch).around)


class _Forwards:
    """Calls of a module that come from no other module's forward."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self.recorder = recorder
        self.torch = torch
        self.inside = threading.local()
        self.modules = Modules(recorder, torch)

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inside, recorder, enabled = self.inside, self.recorder, self.torch.is_grad_enabled
        wrapper_of = recorder.objects.wrapper_of

        def call(module: Any, *arguments: Any, **options: Any) -> Any:
            outer = getattr(inside, "on", None)
            # A wrapper inside a module of the user's own is what synchronises: its forward counts as well.
            nested = outer is not None and (wrapper_of(outer) is not None or wrapper_of(module) is None)
            if nested or not recorder.active or recorder.in_backward is not None:
                return original(module, *arguments, **options)
            recorder.passing()
            if not enabled():
                return original(module, *arguments, **options)
            inside.on = module
            try:
                return self._forward(original, module, arguments, options)
            finally:
                inside.on = outer

        return call

    def _forward(self, original: Callable[..., Any], module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        begin = len(self.recorder.rows)
        described = self._described(module, arguments, options)
        try:
            output = original(module, *arguments, **options)
        except Exception:
            if described is not None:
                self._raised(module, described)
            raise
        if described is not None:
            try:
                self._record(module, described, output, begin)
            except Exception as error:
                self.recorder.trouble(f"forward: {type(error).__name__}: {error}")
        return output

    def _described(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any] | None:
        """What the forward sees before it runs: the flag, the wrapper, samples of its inputs. None for a loss or a metric."""
        try:
            if next(module.parameters(), None) is None:
                return None
            objects = self.recorder.objects
            info = objects.wrapper_of(module)
            around = None if info is not None else objects.wrapper_around(module)
            found = info or around
            given = list(tensors((arguments, options)))
            return {
                "info": found,
                "bypass": around is not None and around.kind.reads_flag_in_forward,
                "sync": found.sync() if found is not None else None,
                "plain": _plain((arguments, options)),
                "inputs": [sample(tensor) for tensor in given if tensor.numel()],
                "options": [CONTINUES] if any(tensor.grad_fn is not None for tensor in given) else [],
            }
        except Exception as error:
            self.recorder.trouble(f"forward: {type(error).__name__}: {error}")
            return None

    def _raised(self, module: Any, described: dict[str, Any]) -> None:
        """A forward that fails and is caught leaves its micro-batch out."""
        info = described["info"]
        uid = self.recorder.uid(info.module() if info is not None else module, Role.MODEL)
        self.recorder.event(Kind.FORWARD, model=uid, sync=described["sync"], options=["raised"])

    def _record(self, module: Any, described: dict[str, Any], output: Any, begin: int) -> None:
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad and tensor.grad_fn is not None]
        if not outputs:
            return
        recorder, info = self.recorder, described["info"]
        uid = recorder.uid(info.module() if info is not None else module, Role.MODEL)
        entry = recorder.objects.entry(uid)
        if not entry.owns:
            entry.owns = parameters_of(module)
        row = recorder.event(Kind.FORWARD, model=uid, bypass=described["bypass"], sync=described["sync"], options=described["options"])
        row.numbers["training"] = bool(module.training)
        self.modules.look(uid, module)
        if described["plain"]:
            row.numbers["plain"] = described["plain"]
        for number, each in enumerate(described["inputs"]):
            recorder.later(row.numbers, f"input{number}", each)
        for tensor in outputs:
            tensor.grad_fn.metadata[PASSAGE] = True
            notes_passage(tensor, recorder, row.index)


def notes_passage(tensor: Any, recorder: Recorder, index: int) -> None:
    """Notes at a backward which forward it goes through."""

    def passes(_: Any) -> None:
        backward = recorder.in_backward
        if backward is not None and index not in backward.forwards:
            backward.forwards.append(index)

    tensor.register_hook(passes)


class _Backwards:
    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self.recorder = recorder
        self.torch = torch

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self.recorder

        def backward(tensors: Any, *arguments: Any, **options: Any) -> Any:
            # A checkpoint with reentrant autograd runs a backward inside the backward.
            if recorder.in_backward is not None or not recorder.active:
                return original(tensors, *arguments, **options)
            recorder.passing()
            row = self._begin(tensors, arguments, options)
            if row is None:
                return original(tensors, *arguments, **options)
            try:
                result = original(tensors, *arguments, **options)
            except BaseException:
                row.options.append("raised")
                raise
            finally:
                recorder.in_backward = None
            self._end(row)
            return result

        return backward

    def _begin(self, roots: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        recorder = self.recorder
        try:
            given = (roots,) if isinstance(roots, self.torch.Tensor) else tuple(roots)
            seeds = arguments[0] if arguments else options.get("grad_tensors")
            keeps = arguments[1] if len(arguments) > 1 else options.get("retain_graph")
            graph = arguments[2] if len(arguments) > 2 else options.get("create_graph")
            recorder.optimizers.backward_comes()
            row = recorder.event(Kind.BACKWARD, retains_graph=bool(keeps or (keeps is None and graph)))
            flags = {info.uid: info.sync() for info in recorder.objects.wrappers}
            if flags:
                row.numbers["sync"] = flags
                row.sync = next(iter(flags.values())) if len(set(flags.values())) == 1 else None
            if takes_as_it_is():
                row.options.append(TRUSTED)
            recorder.tell("backward_begins", row, given, seeds)
            recorder.in_backward = row
            return row
        except Exception as error:
            recorder.trouble(f"backward: {type(error).__name__}: {error}")
            return None

    def _end(self, row: Any) -> None:
        self.recorder.optimizers.backward_done(row)
        self.recorder.tell("backward_ends", row)
        self.recorder.moved()


def tensors(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors in nested containers, the first few."""
    yield from _limited(_tensors(value, depth))


def _limited(found: Iterator[Any]) -> Iterator[Any]:
    for number, tensor in enumerate(found):
        if number >= MAX_TENSORS:
            return
        yield tensor


def _tensors(value: Any, depth: int) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif depth < MAX_DEPTH:
        if isinstance(value, dict):
            inner: Any = value.values()
        elif isinstance(value, (list, tuple, set)):
            inner = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
        else:
            return
        for each in tuple(inner)[: 4 * MAX_TENSORS]:
            yield from _tensors(each, depth + 1)


def _plain(value: Any) -> str:
    """The numbers and words among the arguments, in short: the same batch for another head or task is another forward."""
    arguments, options = value
    found = [each for each in (*arguments, *options.values()) if isinstance(each, (int, float, str, bool))]
    return ", ".join(map(str, found))[:100]


def sample(tensor: Any, size: int = SAMPLE) -> Any:
    """A few values at fixed positions, copied, with the number of elements as the last."""
    import torch

    flat = tensor.detach()
    flat = flat.to_local() if hasattr(flat, "to_local") else flat
    flat = flat.reshape(-1) if flat.is_contiguous() else flat.flatten()
    stride = max(flat.numel() // size, 1)
    few = flat[::stride][:size].to(torch.float64 if flat.dtype.is_floating_point else torch.int64)
    return torch.cat([few, few.new_tensor([tensor.numel()])])
