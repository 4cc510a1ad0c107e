"""`torch.distributed._composable.replicate`: DDP without a wrapper module. What the user calls is the module itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.buckets import Buckets
from accumlint.runtime.recorder import Recorder
from accumlint.trace import Kind, Wrapper

MODULE = "torch.distributed._composable.replicate"


def install(recorder: Recorder, patches: Patches, buckets: Buckets) -> None:
    def patch(module: Any) -> None:
        patches.replace(module._ReplicateState, "init", lambda original: _making(recorder, buckets, original))
        patches.replace(module._ReplicateState, "record_init_args", lambda original: _recording(recorder, original))
        patches.replace(module.DDP, "set_requires_gradient_sync", lambda original: switching(recorder, original))

    when_imported(recorder, patches, MODULE, patch)


def _recording(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def record_init_args(state: Any, module: Any, *arguments: Any, **options: Any) -> None:
        original(state, module, *arguments, **options)
        if recorder.active:
            try:
                recorder.register_wrapper(module, Wrapper.DDP, module, frozenset(), lambda: not state._no_sync)
            except Exception as error:
                recorder.trouble(f"replicate: {type(error).__name__}: {error}")

    return record_init_args


def _making(recorder: Recorder, buckets: Buckets, original: Callable[..., Any]) -> Callable[..., Any]:
    def init(state: Any, module: Any, *arguments: Any, **options: Any) -> None:
        buckets.composing = recorder.wrapper_of(module)
        try:
            original(state, module, *arguments, **options)
        finally:
            buckets.composing = None

    return init


def switching(recorder: Recorder, original: Callable[..., Any], *marks: str) -> Callable[..., Any]:
    """A method that switches synchronisation on or off: `method(module, on, …)`."""

    def switch(module: Any, *arguments: Any, **options: Any) -> Any:
        result = original(module, *arguments, **options)
        if recorder.active:
            try:
                on = arguments[0] if arguments else next(iter(options.values()))
                info = recorder.wrapper_of(module)
                kind = Kind.SYNC_ON if on else Kind.SYNC_OFF
                recorder.event(kind, model=None if info is None else info.uid, options=["flag", *marks])
            except Exception as error:
                recorder.trouble(f"sync flag: {type(error).__name__}: {error}")
        return result

    return switch
