"""`fully_shard`, and `replicate` built on it: each group of parameters is reduced by itself after its backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.ddp import NO_AVERAGING
from accumlint.runtime.probes.replicate import switching
from accumlint.runtime.probes.samples import Chunks
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind, Wrapper


@dataclass(slots=True)
class _Reduced:
    """A parameter whose reduced shard is read once the backward has waited for it."""

    row: Row
    parameter: Any
    chunks: Chunks
    before: Any  # samples of the shard that it was added to


class Groups(Listener):
    """The wrapped modules of a process and the reductions of the running backward."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._roots: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the outermost wrapped module of each
        self._groups: dict[int, list[Any]] = {}  # by outermost module, read at its first use
        self._of_group: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()
        self._running: Any = None
        self._reduced: list[_Reduced] = []
        self._count = 0

    def watch_states(self, module: Any, patches: Patches) -> None:
        patches.replace(module.FSDPState, "init", self._making)

    def watch_flags(self, module: Any, patches: Patches) -> None:
        kind = getattr(module, "FSDPModule", None)
        if kind is not None:
            patches.replace(kind, "set_requires_gradient_sync", lambda original: switching(self.recorder, original))

    def watch_reductions(self, module: Any, patches: Patches) -> None:
        if not hasattr(module, "foreach_reduce") or not hasattr(module.FSDPParamGroup, "post_backward"):
            self.recorder.limit("reductions of fully_shard are not observed in this version of torch")
            return
        patches.replace(module.FSDPParamGroup, "post_backward", self._after_backward)
        patches.replace(module, "foreach_reduce", self._reducing)

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self._count = 0
        self._reduced.clear()

    def backward_ends(self, row: Row) -> None:
        reduced, self._reduced = self._reduced, []
        for each in reduced:
            gradient = each.parameter.grad
            after = each.chunks.part(_local(gradient))
            self.recorder.later(each.row.numbers, "after", after if each.before is None else after - each.before)

    def release(self) -> None:
        self._reduced.clear()
        self._groups.clear()

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init(state: Any, modules: Any, *arguments: Any, **options: Any) -> Any:
            result = original(state, modules, *arguments, **options)
            if self.recorder.active:
                self._guarded(self.register, modules if isinstance(modules, (tuple, list)) else (modules,))
            return result

        return init

    def register(self, modules: Any) -> None:
        recorder, first = self.recorder, modules[0]
        held = weakref.ref(first)
        info = recorder.register_wrapper(first, Wrapper.FSDP2, first, frozenset(), lambda: self._sync(held()))
        self._groups.clear()
        self._of_group.clear()
        for module in modules:
            for part in module.modules():
                if part in self._roots and part is not first:
                    recorder.objects.drop_wrapper(part)
                if part in self._roots or part in modules:
                    self._roots[part] = info.uid

    def _sync(self, module: Any) -> bool:
        groups = self._groups_of(module)
        return any(group.reduce_grads for group in groups) if groups else True

    def _groups_of(self, module: Any) -> list[Any]:
        found = self._groups.get(id(module))
        if found is None:
            found = [weakref.proxy(group) for part in module.modules() for group in _groups_in(part)]
            self._groups[id(module)] = found
        return found

    def _after_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def post_backward(group: Any, *unused: Any) -> Any:
            self._running = group
            try:
                return original(group, *unused)
            finally:
                self._running = None

        return post_backward

    def _reducing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def foreach_reduce(parameters: Any, gradients: Any, group: Any, *arguments: Any, **options: Any) -> Any:
            if self.recorder.active:
                self._guarded(self._reduce, self._running, parameters, gradients, group)
            return original(parameters, gradients, group, *arguments, **options)

        return foreach_reduce

    def _reduce(self, running: Any, parameters: Any, gradients: Any, group: Any) -> None:
        recorder, backward = self.recorder, self.recorder.in_backward
        row = recorder.event(Kind.REDUCE, model=self._model_of(running), sync=True)
        if not getattr(running, "all_reduce_grads", True) and getattr(running, "_is_hsdp", False):
            row.options.append("partial")  # within the shards' group only; the replicas are reduced later
        self._note_factor(row.model, running)
        elements = sum(gradient.numel() for gradient in gradients)
        row.numbers.update(bucket=self._count, elements=elements, backward=None if backward is None else backward.index)
        self._count += 1
        if backward is not None:
            self._sample(row, parameters, gradients, group)

    def _note_factor(self, uid: int | None, group: Any) -> None:
        """The user's own divisor in the place of the number of ranks."""
        factor = getattr(group, "gradient_divide_factor", None)
        if uid is not None and factor is not None:
            entry = self.recorder.objects.entry(uid)
            entry.options = sorted({*entry.options, NO_AVERAGING})
            entry.numbers["divide_factor"] = float(factor)

    def _sample(self, row: Row, parameters: Any, gradients: Any, group: Any) -> None:
        at = max(range(len(gradients)), key=lambda number: (_dimension(parameters[number]) == 0) * gradients[number].numel())
        parameter, gradient = parameters[at].sharded_param, gradients[at]
        if _dimension(parameters[at]) != 0 or any(each.parameter is parameter for each in self._reduced):
            return
        parts = 1 if group is None else int(group.size())
        rows = -(-gradient.size(0) // parts) if gradient.dim() else 1
        chunks = Chunks(gradient.numel(), parts, rows * (gradient.numel() // max(1, gradient.size(0) if gradient.dim() else 1)))
        if not chunks.count:
            return
        row.numbers.update(part=0 if group is None else int(group.rank()), parts=parts)
        self.recorder.later(row.numbers, "before", chunks.whole(gradient))
        before = None if parameter.grad is None else chunks.part(_local(parameter.grad))
        self._reduced.append(_Reduced(row, parameter, chunks, before))

    def _model_of(self, group: Any) -> int | None:
        if group is None:
            return None
        if group not in self._of_group:
            modules = getattr(group, "modules", None) or (getattr(group, "module", None),)
            self._of_group[group] = next((self._roots[each] for each in modules if each in self._roots), None)
        return self._of_group[group]

    def _guarded(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            self.recorder.trouble(f"fully_shard: {type(error).__name__}: {error}")
            return None


def _groups_in(module: Any) -> list[Any]:
    from torch.distributed._composable_state import _get_module_state

    state = _get_module_state(module)
    if state is None:
        return []
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [group for group in (getattr(state, "_fsdp_param_group", None),) if group is not None]


def _dimension(parameter: Any) -> int:
    """The dimension along which a parameter is sharded."""
    return int(getattr(getattr(parameter, "fsdp_placement", None), "dim", 0))


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
