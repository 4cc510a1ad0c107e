"""The beginning in a rank: makes the recorder and installs the probes, once torch has been imported."""

from __future__ import annotations

import importlib

from accumlint.runtime import children
from accumlint.runtime.census import Census
from accumlint.runtime.factors import Factors
from accumlint.runtime.patches import Patches
from accumlint.runtime.rankreport import report_of
from accumlint.runtime.recorder import Recorder
from accumlint.runtime.settings import Settings
from accumlint.runtime.stop import Stopper

# In this order: those that only describe come before those that read what they have described.
PROBES = (
    "optimizer",
    "amp",
    "gradients",
    "data",
    "ddp",
    "fsdp",
    "apex",
    "accelerate",
    "collectives",
    "loss",
    "forward",
    "checksums",
    "compiled",
)


def start(settings: Settings) -> Recorder:
    """Observes this process from now on."""
    recorder = Recorder(settings)
    patches = Patches()
    for name in PROBES:
        try:
            importlib.import_module(f"accumlint.runtime.probes.{name}").install(recorder, patches)
        except Exception as error:
            recorder.trouble(f"probe {name}: {type(error).__name__}: {error}")
    recorder.listeners += [Factors(recorder), Census(recorder)]
    recorder.on_release(patches.undo)
    return recorder


def observe(settings: Settings) -> Stopper:
    """Observes this process as one of a run, to its end: what was recorded goes to the controller."""
    recorder = start(settings)
    stopper = Stopper(recorder, report_of)
    recorder.stopper = stopper
    patches = Patches()
    children.install(recorder, stopper, patches)
    recorder.on_release(patches.undo)
    stopper.start()
    return stopper
