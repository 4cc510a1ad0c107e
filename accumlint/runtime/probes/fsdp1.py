"""FullyShardedDataParallel: the flat gradient of one handle is reduce-scattered, or all-reduced where nothing is sharded."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.ddp import COMM_HOOK, group_of
from accumlint.runtime.probes.samples import Chunks, strided
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind, Wrapper


class Flat(Listener):
    """The wrappers of a process and the reductions of the running backward."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._roots: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # the outermost wrapper of each
        self._open: dict[int, tuple[Row, Chunks]] = {}  # by handle, between the two halves of a reduction
        self._count = 0

    def watch_wrapper(self, module: Any, patches: Patches) -> None:
        wrapper = module.FullyShardedDataParallel
        patches.replace(wrapper, "__init__", self._constructing)
        patches.replace(wrapper, "no_sync", self._switching)
        patches.replace(wrapper, "register_comm_hook", self._hooking)

    def watch_reductions(self, module: Any, patches: Patches) -> None:
        names = ("_reduce_grad", "_accumulate_sharded_grad", "_reduce_grad_no_shard")
        if not all(hasattr(module, name) for name in names):
            self.recorder.limit("reductions of FullyShardedDataParallel are not observed in this version of torch")
            return
        for name, make in zip(names, (self._scattering, self._accumulating, self._reducing), strict=True):
            patches.replace(module, name, make)

    def backward_begins(self, row: Row, roots: tuple[Any, ...], seeds: Any) -> None:
        self._count = 0
        self._open.clear()

    def _constructing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(wrapper: Any, *arguments: Any, **options: Any) -> None:
            original(wrapper, *arguments, **options)
            if self.recorder.active:
                self._guarded(self.register, wrapper)

        return construct

    def register(self, wrapper: Any) -> None:
        recorder, held = self.recorder, weakref.ref(wrapper)
        strategy = wrapper.sharding_strategy.name
        info = recorder.register_wrapper(
            wrapper, Wrapper.FSDP1, wrapper.module, frozenset({strategy.lower()}), lambda: bool(getattr(held(), "_sync_gradients", True))
        )
        recorder.objects.entry(info.uid).numbers.update(group_of(wrapper.process_group))
        for part in wrapper.modules():
            if isinstance(part, type(wrapper)):
                self._roots[part] = info.uid
                if part is not wrapper:
                    recorder.objects.drop_wrapper(part)

    def _switching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def no_sync(wrapper: Any) -> Iterator[None]:
            with original(wrapper):
                self._guarded(self._switch, wrapper, Kind.SYNC_OFF)
                yield
            self._guarded(self._switch, wrapper, Kind.SYNC_ON)

        return no_sync

    def _switch(self, wrapper: Any, kind: Kind) -> None:
        if self.recorder.active:
            self.recorder.event(kind, model=self._roots.get(wrapper), options=["context"])

    def _hooking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def register_comm_hook(wrapper: Any, *arguments: Any, **options: Any) -> Any:
            result = original(wrapper, *arguments, **options)
            uid = self._roots.get(wrapper)
            if uid is not None:
                entry = self.recorder.objects.entry(uid)
                entry.options = sorted({*entry.options, COMM_HOOK})
            return result

        return register_comm_hook

    def _scattering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_grad(state: Any, handle: Any) -> Any:
            self._guarded(self._scatter, state, handle)
            return original(state, handle)

        return reduce_grad

    def _scatter(self, state: Any, handle: Any) -> None:
        row = self._row(state, handle.flat_param.grad)
        if row is None:
            return
        gradient, parts = handle.flat_param.grad, int(state.world_size)
        chunks = Chunks(gradient.numel(), parts, -(-gradient.numel() // parts))
        row.numbers.update(part=int(state.rank), parts=parts)
        if chunks.count:
            self.recorder.later(row.numbers, "before", chunks.whole(gradient))
            self._open[id(handle)] = (row, chunks)

    def _accumulating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate_sharded_grad(state: Any, handle: Any, shard: Any) -> Any:
            self._guarded(self._scattered, handle, shard)
            return original(state, handle, shard)

        return accumulate_sharded_grad

    def _scattered(self, handle: Any, shard: Any) -> None:
        row, chunks = self._open.pop(id(handle), (None, None))
        if row is not None and chunks is not None:
            self.recorder.later(row.numbers, "after", chunks.part(shard))

    def _reducing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def reduce_grad_no_shard(state: Any, handle: Any) -> Any:
            row = self._guarded(self._row, state, handle.flat_param.grad)
            if row is not None:
                self._guarded(self._sample, row, "before", handle)
            result = original(state, handle)
            if row is not None:
                self._guarded(self._sample, row, "after", handle)
            return result

        return reduce_grad_no_shard

    def _sample(self, row: Row, key: str, handle: Any) -> None:
        self.recorder.later(row.numbers, key, strided(handle.flat_param.grad))

    def _row(self, state: Any, gradient: Any) -> Row | None:
        recorder, backward = self.recorder, self.recorder.in_backward
        if not recorder.active:
            return None
        row = recorder.event(Kind.REDUCE, model=self._roots.get(state), sync=bool(state._sync_gradients))
        row.numbers.update(bucket=self._count, elements=gradient.numel(), backward=None if backward is None else backward.index)
        self._count += 1
        return row

    def _guarded(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            self.recorder.trouble(f"FullyShardedDataParallel: {type(error).__name__}: {error}")
            return None
