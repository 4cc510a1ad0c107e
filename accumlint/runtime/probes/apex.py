"""apex's DistributedDataParallel: its switch, and the buckets that it reduces by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches
from accumlint.runtime.probes import collectives
from accumlint.runtime.probes.ddp import NO_AVERAGING
from accumlint.runtime.probes.samples import strided
from accumlint.runtime.recorder import Listener, Recorder
from accumlint.trace import Kind, Wrapper

MODULE = "apex.parallel.distributed"


def install(recorder: Recorder, patches: Patches) -> None:
    apex = Apex(recorder)
    recorder.listeners.append(apex)
    when_imported(recorder, patches, MODULE, lambda module: apex.watch(module, patches))


class Apex(Listener):
    """Follows every wrapper of a process."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._count = 0

    def watch(self, module: Any, patches: Patches) -> None:
        collectives.TOLD_ELSEWHERE.add(module.__file__)
        wrapper = module.DistributedDataParallel
        patches.replace(wrapper, "__init__", self._constructing)
        patches.replace(wrapper, "allreduce_bucket", self._reducing)
        patches.replace(wrapper, "disable_allreduce", lambda original: self._switching(original, Kind.SYNC_OFF))
        patches.replace(wrapper, "enable_allreduce", lambda original: self._switching(original, Kind.SYNC_ON))

    def backward_begins(self, row: Any, roots: Any, seeds: Any) -> None:
        self._count = 0

    def _constructing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def construct(wrapper: Any, *arguments: Any, **options: Any) -> None:
            original(wrapper, *arguments, **options)
            if self.recorder.active:
                self._guarded(self.register, wrapper)

        return construct

    def register(self, wrapper: Any) -> None:
        held = weakref.ref(wrapper)
        marks = frozenset() if getattr(wrapper, "gradient_average", True) else frozenset({NO_AVERAGING})
        self.recorder.register_wrapper(
            wrapper, Wrapper.APEX_DDP, wrapper.module, marks, lambda: not getattr(held(), "_disable_allreduce", False)
        )

    def _reducing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def allreduce_bucket(wrapper: Any, bucket: Any, *arguments: Any, **options: Any) -> Any:
            row = self._guarded(self._reduce, wrapper, bucket) if self.recorder.active else None
            result = original(wrapper, bucket, *arguments, **options)
            if row is not None and hasattr(result, "reshape"):
                # Only its first piece: the others lie behind it.
                self._guarded(lambda: self.recorder.later(row.numbers, "after", strided(result.reshape(-1)[: bucket[0].numel()])))
            return result

        return allreduce_bucket

    def _reduce(self, wrapper: Any, bucket: Any) -> Any:
        recorder, backward, info = self.recorder, self.recorder.in_backward, self.recorder.wrapper_of(wrapper)
        row = recorder.event(Kind.REDUCE, model=None if info is None else info.uid)
        elements = sum(gradient.numel() for gradient in bucket)
        row.numbers.update(bucket=self._count, elements=elements, backward=None if backward is None else backward.index)
        self._count += 1
        recorder.later(row.numbers, "before", strided(bucket[0]))
        return row

    def _switching(self, original: Callable[..., Any], kind: Kind) -> Callable[..., Any]:
        def switch(wrapper: Any, *arguments: Any, **options: Any) -> Any:
            info = self.recorder.wrapper_of(wrapper)
            if info is not None and self.recorder.active:
                self._guarded(lambda: self.recorder.event(kind, model=info.uid, options=["flag"]))
            return original(wrapper, *arguments, **options)

        return switch

    def _guarded(self, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except Exception as error:
            self.recorder.trouble(f"apex: {type(error).__name__}: {error}")
            return None
