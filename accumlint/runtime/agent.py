"""The beginning in a rank: makes the recorder and installs the probes, once torch has been imported."""

from __future__ import annotations

import importlib

from accumlint.runtime.factors import Factors
from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder
from accumlint.runtime.settings import Settings

# In this order: those that only describe come before those that read what they have described.
PROBES = ("optimizer", "amp", "gradients", "data", "ddp", "fsdp", "loss", "forward")


def start(settings: Settings) -> Recorder:
    """Observes this process from now on."""
    recorder = Recorder(settings)
    patches = Patches()
    for name in PROBES:
        try:
            importlib.import_module(f"accumlint.runtime.probes.{name}").install(recorder, patches)
        except Exception as error:
            recorder.trouble(f"probe {name}: {type(error).__name__}: {error}")
    recorder.listeners.append(Factors(recorder))
    recorder.on_release(patches.undo)
    return recorder
