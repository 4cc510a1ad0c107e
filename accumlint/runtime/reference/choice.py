"""Which reference a run can afford."""

from __future__ import annotations

from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder


def install(recorder: Recorder, patches: Patches, ledger: Any) -> None:
    """Adds the reference to what listens."""
