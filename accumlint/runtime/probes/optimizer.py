"""What belongs to the update: steps, clearing, schedules, averages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder, Row
from accumlint.trace import Kind, Role

HOOK = "hook"  # the step runs inside a backward
CLOSURE = "closure"

Function = Callable[..., Any]


def install(recorder: Recorder, patches: Patches) -> None:
    import torch
    from torch.optim import swa_utils
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps = _Steps(recorder)
    patches.on_undo(register_optimizer_step_pre_hook(steps.begins).remove)
    patches.on_undo(register_optimizer_step_post_hook(steps.ends).remove)
    patches.replace(torch.optim.Optimizer, "add_param_group", lambda original: _watching(recorder, original))
    patches.replace(torch.optim.Optimizer, "zero_grad", lambda original: _zeroing(recorder, original, _of_optimizer))
    patches.replace(torch.nn.Module, "zero_grad", lambda original: _zeroing(recorder, original, _of_module))
    patches.replace(swa_utils.AveragedModel, "update_parameters", lambda original: _averaging(recorder, original))
    _Schedulers(recorder).install(patches)
    recorder.on_release(recorder.optimizers.forget)


class _Steps:
    """The steps that are really taken: one that a scaler leaves out does not come here.

    An optimizer evaluates a closure before it updates, so the step of one comes after the closure's own backward. Where it
    is evaluated again, as by L-BFGS, every evaluation has an update of its own.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.open: dict[int, Row] = {}
        self.unevaluated: dict[int, Callable[[], None]] = {}

    def begins(self, optimizer: Any, arguments: Any, options: Any) -> tuple[Any, Any] | None:
        """What the step is called with instead, where it has a closure."""
        recorder = self.recorder
        if not recorder.active:
            return None
        uid = recorder.optimizers.watch(optimizer)
        marks = [HOOK] if recorder.in_backward is not None else []
        closure = arguments[1] if len(arguments) > 1 else options.get("closure")
        if not callable(closure):
            self._begin(optimizer, uid, recorder.stepping, marks)
            return None
        begin = functools.partial(self._begin, optimizer, uid, recorder.stepping, [*marks, CLOSURE])
        self.unevaluated[uid] = begin
        seen = self._evaluating(uid, closure, begin)
        if len(arguments) > 1:
            return (arguments[0], seen, *arguments[2:]), options
        return arguments, {**options, "closure": seen}

    def _begin(self, optimizer: Any, uid: int, scaler: int | None, marks: list[str]) -> None:
        recorder = self.recorder
        if not recorder.active:
            return
        row = recorder.event(Kind.STEP, targets=[uid], scaler=scaler, options=marks)
        for name in ("found_inf", "grad_scale"):  # a fused optimizer is given them, and decides for itself
            value = getattr(optimizer, name, None)
            if value is not None:
                recorder.later(row.numbers, name, value)
        self.open[uid] = row
        recorder.tell("change_begins", row)

    def _evaluating(self, uid: int, closure: Function, begin: Callable[[], None]) -> Function:
        def evaluate(*arguments: Any, **options: Any) -> Any:
            self._end(uid)
            self.unevaluated.pop(uid, None)
            result = closure(*arguments, **options)
            begin()
            return result

        return functools.update_wrapper(evaluate, closure)

    def ends(self, optimizer: Any, arguments: Any, options: Any) -> None:
        uid = self.recorder.objects.known(optimizer)
        if uid is not None:
            self.unevaluated.pop(uid, _nothing)()
            self._end(uid)

    def _end(self, uid: int) -> None:
        row = self.open.pop(uid, None)
        if row is not None and self.recorder.active:
            self.recorder.tell("change_ends", row)
            self.recorder.closes_window(row)


def _nothing() -> None:
    pass


def _watching(recorder: Recorder, original: Function) -> Function:
    def add_param_group(optimizer: Any, group: Any) -> Any:
        result = original(optimizer, group)
        if recorder.active:
            recorder.optimizers.watch(optimizer)
        return result

    return add_param_group


def _zeroing(recorder: Recorder, original: Function, targets: Callable[[Recorder, Any], list[int]]) -> Function:
    def zero_grad(this: Any, *arguments: Any, **options: Any) -> Any:
        result = original(this, *arguments, **options)
        if recorder.active:
            found = targets(recorder, this)
            marks = [HOOK] if recorder.in_backward is not None else []
            row = recorder.event(Kind.ZERO, targets=found, options=marks)
            recorder.optimizers.cleared(found)
            recorder.tell("zeroed", row)
        return result

    return zero_grad


def _of_optimizer(recorder: Recorder, optimizer: Any) -> list[int]:
    return [recorder.optimizers.watch(optimizer)]


def _of_module(recorder: Recorder, module: Any) -> list[int]:
    return [recorder.uid(module, Role.MODEL), *recorder.optimizers.inside(module.parameters())]


def _averaging(recorder: Recorder, original: Function) -> Function:
    def update_parameters(this: Any, *arguments: Any, **options: Any) -> Any:
        if recorder.active:
            recorder.event(Kind.AVERAGE, targets=[recorder.uid(this, Role.OTHER)])
        return original(this, *arguments, **options)

    return update_parameters


class _Schedulers:
    """Steps of learning rate schedules: the outermost call counts, and none while one is constructed."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running: list[object] = []

    def install(self, patches: Patches) -> None:
        import torch.optim.lr_scheduler as schedulers

        base = getattr(schedulers, "LRScheduler", None) or schedulers._LRScheduler
        for each in {base, *_subclasses(base)}:
            if each is getattr(schedulers, "ReduceLROnPlateau", None):
                continue  # driven by a metric, at any time
            for name, make in (("__init__", self._constructing), ("step", self._stepping)):
                if name in vars(each):
                    patches.replace(each, name, make)

    def _constructing(self, original: Function) -> Function:
        def construct(this: Any, *arguments: Any, **options: Any) -> Any:
            self.running.append(this)
            try:
                return original(this, *arguments, **options)
            finally:
                self.running.pop()

        return construct

    def _stepping(self, original: Function) -> Function:
        def step(this: Any, *arguments: Any, **options: Any) -> Any:
            if not self.running and self.recorder.active:
                self._count(this)
            self.running.append(this)
            try:
                return original(this, *arguments, **options)
            finally:
                self.running.pop()

        return step

    def _count(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        base = None if optimizer is None else self.recorder.objects.known(optimizer)
        self.recorder.event(Kind.SCHEDULE, targets=[self.recorder.uid(scheduler, Role.SCHEDULER, base=base)])


def _subclasses(base: Any) -> set[Any]:
    return {below for each in base.__subclasses__() for below in (each, *_subclasses(each))}
