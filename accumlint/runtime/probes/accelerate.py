"""Accelerate's `accumulate` and `no_sync`: what they are entered with, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder
from accumlint.trace import Kind, Role

MODULE = "accelerate.accelerator"


def install(recorder: Recorder, patches: Patches) -> None:
    when_imported(recorder, patches, MODULE, lambda module: watch(recorder, patches, module))


def watch(recorder: Recorder, patches: Patches, module: Any) -> None:
    patches.replace(module.Accelerator, "accumulate", lambda original: _accumulating(recorder, original))
    patches.replace(module.Accelerator, "no_sync", lambda original: _asked(recorder, original))


def _accumulating(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def accumulate(accelerator: Any, *models: Any) -> Any:
        entered = original(accelerator, *models)
        return _observed(recorder, accelerator, models, entered) if recorder.active else entered

    return accumulate


def _asked(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def no_sync(accelerator: Any, model: Any) -> Any:
        try:
            if recorder.active and recorder.wrapper_of(model) is None and recorder.objects.wrapper_around(model) is not None:
                recorder.event(Kind.SYNC_OFF, model=recorder.uid(model, Role.MODEL), options=["context"])
        except Exception as error:
            recorder.trouble(f"accelerate: {type(error).__name__}: {error}")
        return original(accelerator, model)

    return no_sync


@contextmanager
def _observed(recorder: Recorder, accelerator: Any, models: tuple[Any, ...], entered: AbstractContextManager[Any]) -> Iterator[Any]:
    with entered as given:
        try:
            if recorder.active and accelerator.gradient_accumulation_steps > 1:
                _note(recorder, accelerator, models)
        except Exception as error:
            recorder.trouble(f"accelerate: {type(error).__name__}: {error}")
        yield given


def _note(recorder: Recorder, accelerator: Any, models: tuple[Any, ...]) -> None:
    if accelerator.sync_gradients:
        recorder.event(Kind.SYNC_ON, options=["context", "accumulate"])
        return
    for position, model in enumerate(models or (None,)):
        info = recorder.wrapper_of(model) if hasattr(model, "parameters") else None
        options = ["context", "accumulate"] if position == 0 else ["context"]
        if model is not None and not hasattr(model, "parameters"):
            options += ["no-model", _form(model)]
        recorder.event(Kind.SYNC_OFF, model=None if info is None else info.uid, options=options)


def _form(value: Any) -> str:
    return type(value).__name__.lower()
