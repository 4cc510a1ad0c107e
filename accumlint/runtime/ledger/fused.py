"""Losses that are fused into kernels of other libraries, recorded when their modules are imported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from accumlint.runtime.imports import when_imported
from accumlint.runtime.ledger.units import NONE, Arguments, Loss, Units, targets
from accumlint.runtime.patches import Patches


@dataclass(frozen=True, slots=True)
class Fused:
    """A fused cross entropy: in which module, the function or the autograd function, and how it names its arguments.

    `reduces` is False for functions that return one loss a target. `ignored` is the argument that names the target to leave out.
    """

    module: str
    name: str
    target: str
    weight: str = ""
    ignored: str = "ignore_index"
    reduces: bool = True
    default_ignored: int = -100


FUSED = (
    Fused("liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction", "target", "ce_weight"),
    Fused("liger_kernel.ops.cross_entropy", "LigerCrossEntropyFunction", "target", "weight"),
    Fused("flash_attn.losses.cross_entropy", "SoftmaxCrossEntropyLossFn", "labels", reduces=False),
    Fused("flash_attn.ops.triton.cross_entropy", "CrossEntropyLoss", "labels", reduces=False),
    Fused("apex.contrib.xentropy.softmax_xentropy", "SoftmaxCrossEntropyLoss", "labels", "", "padding_idx", False, 0),
    Fused("torch.nn.modules.linear_cross_entropy", "_linear_cross_entropy_batch_chunked", "target", "weight"),
    Fused("torch.nn.modules.linear_cross_entropy", "_linear_cross_entropy_batch_chunked_no_reduction", "target", "weight", reduces=False),
)


def install(probe: Any, patches: Patches) -> None:
    """Replaces what is imported already, and the rest when it is."""
    for fused in FUSED:
        when_imported(probe.recorder, patches, fused.module, partial(_replace, probe, patches, fused))


def _replace(probe: Any, patches: Patches, fused: Fused, module: ModuleType) -> None:
    found = getattr(module, fused.name, None)
    if isinstance(found, type):
        held, names = found.apply, _parameters(found.forward)[1:]  # type: ignore[attr-defined]

        def apply(*given: Any, **named: Any) -> Any:
            return _called(probe, fused, names, held, given, named)

        found.apply = staticmethod(apply)  # type: ignore[attr-defined]
        patches.on_undo(lambda: delattr(found, "apply"))
    elif found is not None:
        function, parameters = found, _parameters(getattr(found, "_init_fn", found))

        def call(*given: Any, **named: Any) -> Any:
            return _called(probe, fused, parameters, function, given, named)

        setattr(module, fused.name, call)
        patches.on_undo(lambda: setattr(module, fused.name, function))


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _called(
    probe: Any, fused: Fused, names: list[str], function: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any]
) -> Any:
    with probe.quiet():
        output = function(*given, **named)
    if probe.listens():
        arguments = {**dict(zip(names, given, strict=False)), **named}
        if not fused.reduces:
            arguments["reduction"] = NONE
        loss = output[0] if isinstance(output, (tuple, list)) else output
        probe.note(Loss(fused.name, (), lambda arguments: _count(fused, arguments)), arguments, loss)
    return output


def _count(fused: Fused, arguments: Arguments) -> Units:
    ignored = arguments.get(fused.ignored, fused.default_ignored)
    return targets(
        {
            "input": arguments.get("input", arguments.get("logits", arguments[fused.target])),
            "target": arguments[fused.target],
            "weight": arguments.get(fused.weight) if fused.weight else None,
            "ignore_index": fused.default_ignored if ignored is None else ignored,
        }
    )
