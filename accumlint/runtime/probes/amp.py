"""Loss scaling: which losses are scaled and by how much, unscaling, steps that a scaler leaves out, updates of the scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.probes.forward import tensors
from accumlint.runtime.recorder import Listener, Recorder, Row
from accumlint.trace import Kind, Role

DISABLED, NEW_SCALE = "disabled", "new-scale"
IMPLICIT = "implicit"  # done by the scaler's step, which finds that nobody has unscaled
RAISED = "raised"
LEFT_OUT = "left-out"  # a step that the scaler does not take, for the gradients are not finite

Function = Callable[..., Any]


def install(recorder: Recorder, patches: Patches) -> None:
    import torch

    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
    probe = _Scalers(recorder)
    patches.replace(scaler, "scale", probe.scaling)
    patches.replace(scaler, "unscale_", probe.unscaling)
    patches.replace(scaler, "step", probe.stepping)
    patches.replace(scaler, "update", probe.updating)
    recorder.listeners.append(probe)


class _Scalers(Listener):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.enabled: Any = None  # the scale of the scaler that is at work, as its tensor

    def uid(self, scaler: Any) -> int:
        uid = self.recorder.uid(scaler, Role.SCALER)
        if not scaler.is_enabled() and DISABLED not in self.recorder.objects.entry(uid).options:
            self.recorder.objects.entry(uid).options.append(DISABLED)
        return uid

    def scaling(self, original: Function) -> Function:
        recorder = self.recorder

        def scale(this: Any, outputs: Any) -> Any:
            result = original(this, outputs)
            if recorder.active and this.is_enabled():
                uid = self.uid(this)
                for tensor in tensors(result):
                    if tensor.requires_grad:
                        tensor.register_hook(_marks(recorder, uid, this))
            return result

        return scale

    def unscaling(self, original: Function) -> Function:
        recorder = self.recorder

        def unscale(this: Any, optimizer: Any) -> Any:
            if not recorder.active:
                return original(this, optimizer)
            marks = [IMPLICIT] if recorder.stepping is not None else []
            row = recorder.event(Kind.UNSCALE, scaler=self.uid(this), targets=[recorder.optimizers.watch(optimizer)], options=marks)
            recorder.tell("change_begins", row)
            result = original(this, optimizer)
            recorder.tell("change_ends", row)
            return result

        return unscale

    def stepping(self, original: Function) -> Function:
        recorder = self.recorder

        def step(this: Any, optimizer: Any, *arguments: Any, **options: Any) -> Any:
            if not recorder.active:
                return original(this, optimizer, *arguments, **options)
            uid, begin = recorder.optimizers.watch(optimizer), len(recorder.rows)
            before, recorder.stepping = recorder.stepping, self.uid(this)
            try:
                result = original(this, optimizer, *arguments, **options)
            except Exception:
                recorder.event(Kind.STEP, scaler=self.uid(this), targets=[uid], options=[RAISED], numbers={"updated": False})
                raise
            finally:
                recorder.stepping = before
            if not any(row.kind == Kind.STEP.value and uid in row.targets for row in recorder.rows[begin:]):
                recorder.event(Kind.STEP, scaler=self.uid(this), targets=[uid], options=[LEFT_OUT], numbers={"updated": False})
                recorder.settle()  # the scaler has waited for the device already
            return result

        return step

    def updating(self, original: Function) -> Function:
        recorder = self.recorder

        def update(this: Any, new_scale: Any = None) -> Any:
            if not recorder.active or not this.is_enabled():
                return original(this, new_scale)
            row = recorder.event(Kind.SCALER_UPDATE, scaler=self.uid(this), options=[] if new_scale is None else [NEW_SCALE])
            if getattr(this, "_scale", None) is not None:
                recorder.later(row.numbers, "before", this._scale.clone())
            result = original(this, new_scale)
            if getattr(this, "_scale", None) is not None:
                recorder.later(row.numbers, "after", this._scale.clone())
            return result

        return update

    def backward_ends(self, row: Row) -> None:
        if row.scaled is None:
            row.scaled = False


def _marks(recorder: Recorder, uid: int, scaler: Any) -> Callable[[Any], None]:
    def scaled(_: Any) -> None:
        row = recorder.in_backward
        if row is not None:
            row.scaled, row.scaler = True, uid
            if "scale" not in row.numbers:
                row.numbers["scale"] = None
                recorder.later(row.numbers, "scale", scaler._scale.clone())

    return scaled
