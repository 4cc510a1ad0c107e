"""Batches taken from loaders, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import PASS_ENDS, Recorder
from accumlint.trace import Kind, Role

Function = Callable[..., Any]


def install(recorder: Recorder, patches: Patches) -> None:
    import torch
    from torch.utils.data import dataloader

    for each in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter, dataloader._BaseDataLoaderIter):
        if "__next__" in vars(each):
            patches.replace(each, "__next__", lambda original: _taking(recorder, original))
    patches.replace(torch, "save", lambda original: _saving(recorder, original))
    when_imported(recorder, patches, "torch.distributed.checkpoint", lambda module: _distributed(recorder, patches, module))


def _taking(recorder: Recorder, original: Function) -> Function:
    def take(this: Any) -> Any:
        if not recorder.active or recorder.in_backward is not None:
            return original(this)
        recorder.passing()
        try:
            batch = original(this)
        except StopIteration:
            recorder.event(PASS_ENDS)
            raise
        recorder.event(Kind.DATA, targets=[recorder.uid(this, Role.LOADER, name="loader")])
        return batch

    return take


def _saving(recorder: Recorder, original: Function) -> Function:
    def save(thing: Any, *arguments: Any, **options: Any) -> Any:
        if recorder.active:
            recorder.passing()
            marks = ["optimizer-state"] if _has_optimizer_state(thing) else []
            recorder.event(Kind.SAVE, options=marks)
        return original(thing, *arguments, **options)

    return save


def _distributed(recorder: Recorder, patches: Patches, checkpoint: Any) -> None:
    for name in ("save", "async_save", "save_state_dict"):
        patches.replace(checkpoint, name, lambda original: _saving(recorder, original))


def _has_optimizer_state(thing: Any, depth: int = 0) -> bool:
    """Whether an optimizer's state dict is among what is saved."""
    if not isinstance(thing, dict) or depth > 3:
        return False
    if "param_groups" in thing and "state" in thing:
        return True
    return any(_has_optimizer_state(value, depth + 1) for value in thing.values())
