"""Compilation is switched off in an observed run; a script that asks for it is told so in the report."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder

LIMIT = (
    "torch.compile was switched off (TORCHDYNAMO_DISABLE=1), for compiled code runs past the probes: what was measured is the "
    "same program in eager mode."
)


def install(recorder: Recorder, patches: Patches) -> None:
    import torch

    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        patches.replace(torch, "compile", lambda original: _noting(recorder, original))
        patches.replace(torch.nn.Module, "compile", lambda original: _noting(recorder, original))


def _noting(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def compile(*arguments: Any, **options: Any) -> Any:
        recorder.limit(LIMIT)
        return original(*arguments, **options)

    return compile
