"""Collectives that the user's own code calls: gradients that are reduced by hand, and values on which the ranks agree."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.places import OWN, USER, belongs_to
from accumlint.runtime.probes.samples import strided
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind

MANUAL = "manual"
BY_LIBRARY = "library"  # an installed package calls it, in the place of the user
TOLD_ELSEWHERE: set[str] = set()  # files of wrappers whose reductions have a probe of their own
SMALL = 4096  # elements of a value, rather than of a part of the gradients
REDUCTIONS = {"all_reduce": 0, "reduce": 0, "all_reduce_coalesced": 0, "reduce_scatter_tensor": 1, "reduce_scatter_single": 1}
AGREEMENTS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object")
NAMES = ("tensor", "tensors", "input")  # of the reduced argument, where it is given by name
IN_PLACE = frozenset({"all_reduce", "all_reduce_coalesced"})


def install(recorder: Recorder, patches: Patches) -> None:
    import torch.distributed

    dist: Any = torch.distributed
    if not dist.is_available():
        return
    collectives = Collectives(recorder)
    recorder.listeners.append(collectives)
    for name in (*REDUCTIONS, *AGREEMENTS):
        make = collectives.reducing(name) if name in REDUCTIONS else collectives.agreeing(name)
        original = getattr(dist, name, None)
        patches.replace(dist, name, make)
        if getattr(dist.distributed_c10d, name, None) is original:
            patches.replace(dist.distributed_c10d, name, make)
    try:
        from torch.distributed.algorithms.join import Join
    except ImportError:
        return
    patches.replace(Join, "__enter__", lambda original: _joining(recorder, original))


def _joining(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Ranks whose data ends first take part in the reductions of the others."""

    def enter(this: Any) -> Any:
        recorder.fact("join", "ranks may run out of data at different times")
        return original(this)

    return enter


class Collectives(Listener):
    """Tells gradients from other tensors, by where they lie in memory or by their size."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._owners: dict[int, int] = {}  # by address of a gradient, the optimizer that steps on it
        self._sizes: dict[int, int] = {}  # by number of elements of all its gradients, the optimizer
        self._rows: dict[tuple[int, str], Row] = {}  # by line since the last backward

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self._forget()

    def backward_ends(self, row: Row) -> None:
        self._forget()

    def zeroed(self, row: Row) -> None:
        self._forget()

    def change_ends(self, row: Row) -> None:
        self._owners.clear()
        self._sizes.clear()

    def release(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._owners.clear()
        self._sizes.clear()
        self._rows.clear()

    def reducing(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        position = REDUCTIONS[name]

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def reduce(*arguments: Any, **options: Any) -> Any:
                caller = sys._getframe(1).f_code.co_filename
                if not self.recorder.active or belongs_to(caller) == OWN or caller in TOLD_ELSEWHERE:
                    return original(*arguments, **options)
                tensors = _given(arguments, options, position)
                marks = [MANUAL] if belongs_to(caller) == USER else [MANUAL, BY_LIBRARY]
                row = self._guarded(self._begins, name, tensors, marks, _operation(name, arguments, options))
                result = original(*arguments, **options)
                if row is not None and result is None and name in IN_PLACE:
                    self._guarded(self._ends, row, tensors)
                return result

            return reduce

        return make

    def agreeing(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def gather(*arguments: Any, **options: Any) -> Any:
                if self.recorder.active and belongs_to(sys._getframe(1).f_code.co_filename) != OWN:
                    self._guarded(self.recorder.fact, "rank-agreed", name)
                return original(*arguments, **options)

            return gather

        return make

    def _begins(self, name: str, tensors: list[Any], marks: list[str], operation: str) -> Row | None:
        """Notes a reduction. Returns its event where it is the first of gradients at this line."""
        recorder, backward = self.recorder, self.recorder.in_backward
        owners = {owner for owner in map(self._owner, tensors) if owner is not None}
        within = backward is not None and any(tensor.is_floating_point() and tensor.numel() > 1 for tensor in tensors)
        if not owners and not within:
            if self._holds_parameters(tensors):
                recorder.fact("averages-parameters", name)
            if all(tensor.numel() <= SMALL for tensor in tensors):
                recorder.fact("rank-agreed", name)
            return None
        recorder.fact("manual-reduce", name)
        row = recorder.event(Kind.REDUCE, targets=sorted(owners), options=marks)
        elements = sum(tensor.numel() for tensor in tensors)
        first = self._rows.setdefault((row.at, name), row)
        if first is not row:
            recorder.rows.pop()
            first.targets = sorted({*first.targets, *owners})
            first.numbers["elements"] += elements
            first.numbers["tensors"] += len(tensors)
            return None
        row.numbers.update(bucket=0, elements=elements, tensors=len(tensors), operation=operation)
        row.numbers["backward"] = None if backward is None else backward.index
        recorder.later(row.numbers, "before", strided(_plain(tensors[0])))
        return row

    def _holds_parameters(self, tensors: list[Any]) -> bool:
        """Whether parameters, or copies of their size, are reduced: local SGD averages them now and then."""
        held = [each for uid, _ in self.recorder.optimizers.live() for each in self.recorder.optimizers.parameters(uid)]
        places = {each.data_ptr() for each in held if not hasattr(each, "to_local")}
        sizes = {each.numel() for each in held if each.numel() > SMALL}
        return any(each.is_floating_point() and (each.data_ptr() in places or each.numel() in sizes) for each in tensors)

    def _ends(self, row: Row, tensors: list[Any]) -> None:
        self.recorder.later(row.numbers, "after", strided(_plain(tensors[0])))

    def _owner(self, tensor: Any) -> int | None:
        """The optimizer whose gradient, or whose gradients in one piece, the tensor is."""
        if not tensor.is_floating_point() or tensor.layout is not self._strided():
            return None
        found = self._owners.get(_plain(tensor).data_ptr())
        if found is None:
            # A gradient may have been replaced since the last look.
            self._owners, self._sizes = {}, {}
            for uid, _ in self.recorder.optimizers.live():
                gradients = [each.grad for each in self.recorder.optimizers.parameters(uid) if each.grad is not None]
                dense = [_plain(each) for each in gradients if each.layout is self._strided()]
                self._owners.update((each.data_ptr(), uid) for each in dense)
                if len(dense) > 1:
                    self._sizes[sum(each.numel() for each in dense)] = uid
            found = self._owners.get(_plain(tensor).data_ptr(), self._sizes.get(tensor.numel()))
        return found

    def _strided(self) -> Any:
        import torch

        return torch.strided

    def _guarded(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            self.recorder.trouble(f"collective: {type(error).__name__}: {error}")
            return None


def _given(arguments: tuple[Any, ...], options: dict[str, Any], position: int) -> list[Any]:
    value = arguments[position] if len(arguments) > position else next((options[name] for name in NAMES if name in options), None)
    listed: Iterable[Any] = value if isinstance(value, (list, tuple)) else (value,)
    return [each for each in listed if hasattr(each, "data_ptr")]


def _operation(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    position = {"reduce": 2, "reduce_scatter_tensor": 2, "reduce_scatter_single": 2}.get(name, 1)
    operation = options.get("op", arguments[position] if len(arguments) > position else None)
    return "sum" if operation is None else str(operation).rpartition(".")[2].lower()


def _plain(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)
