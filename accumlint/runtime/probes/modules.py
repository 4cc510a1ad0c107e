"""What the modules of a model that trains are made of: normalisation over the batch, parameters of half precision."""

from __future__ import annotations

from typing import Any

from accumlint.runtime.recorder import Recorder


class Modules:
    """Looks at every model once, in its first forward that trains."""

    def __init__(self, recorder: Recorder, torch: Any) -> None:
        self.recorder = recorder
        self.normalisation = torch.nn.modules.batchnorm._BatchNorm
        self.half = {torch.float16, torch.bfloat16}
        self.seen: set[int] = set()

    def look(self, uid: int, module: Any) -> None:
        if uid in self.seen:
            return
        self.seen.add(uid)
        normal = next((part for part in module.modules() if isinstance(part, self.normalisation) and part.training), None)
        if normal is not None:
            self.recorder.fact("batchnorm", type(normal).__name__)
        if any(each.requires_grad and each.dtype in self.half for each in module.parameters()):
            self.recorder.fact("low-precision-model", type(module).__name__)
