"""What the Trainer of Transformers does with a loss before its backward: read from the frame of its training step."""

from __future__ import annotations

import os
import sys
from types import FrameType
from typing import Any

TRUSTED = "trusted"  # of a backward: a framework has counted the targets, and takes the loss as divided by them
_FILE = os.path.join("transformers", "trainer.py")
_DEEPEST = 12  # frames between the training step and the backward


def takes_as_it_is(depth: int = 2) -> bool:
    """Whether the backward that begins is that of a Trainer which was handed the window's count and divides the loss by nothing."""
    frame: FrameType | None = sys._getframe(depth)
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_code.co_name == "training_step" and frame.f_code.co_filename.endswith(_FILE):
            return _is_scaled(frame.f_locals.get("self"), frame.f_locals.get("num_items_in_batch"))
        frame = frame.f_back
    return False


def _is_scaled(trainer: Any, count: Any) -> bool:
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    given = getattr(trainer, "compute_loss_func", None) is not None
    return given or (bool(getattr(trainer, "model_accepts_loss_kwargs", False)) and count is not None)
