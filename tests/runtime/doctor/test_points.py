"""The list of hook points is that of the probes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accumlint.runtime.doctor import inspection
from accumlint.runtime.doctor.points import POINTS

pytest.importorskip("torch")

# What the probes replace, one name a line: the agent is started in a process of its own, for it changes torch.
PATCHED = """
import torch, torch.distributed.fsdp, torch.distributed._composable
from accumlint.runtime import agent, patches, settings
class Seen(patches.Patches):
    def replace(self, owner, name, make):
        where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
        print(f"{where}.{name}")
        super().replace(owner, name, make)
agent.Patches = Seen
agent.start(settings.Settings.from_json(%r))
"""
SETTINGS = {
    "token": "00",
    "folder": ".",
    "steps": 1,
    "timeout": 1.0,
    "reference": "auto",
    "graceful": False,
    "keep_going": False,
    "objective": "token",
    "controller": 0,
    "host": "here",
}


def resolved(name: str) -> tuple[int, str] | None:
    """The same for all spellings of one attribute."""
    owner: Any = inspection.resolve(name.rpartition(".")[0])
    return None if inspection.resolve(name) is None else (id(owner), name.rpartition(".")[2])


def test_private_names_that_the_probes_replace_are_listed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PATCHED % json.dumps(SETTINGS)], capture_output=True, text=True, check=True, cwd=tmp_path)
    replaced = done.stdout.split()
    assert len(replaced) > 30
    listed = {resolved(name) for point in POINTS for name in point.names} - {None}
    private = [name for name in replaced if any(part.startswith("_") and not part.startswith("__") for part in name.split("."))]
    assert [name for name in private if resolved(name) not in listed] == []


def test_every_needed_point_is_in_this_torch() -> None:
    assert [point.names for point in POINTS if point.needed and not any(inspection.has(name) for name in point.names)] == []


def test_names_are_resolved_through_modules_and_classes() -> None:
    assert inspection.has("torch.optim.lr_scheduler.LRScheduler.step")
    assert not inspection.has("torch.optim.lr_scheduler.LRScheduler.leap")
    assert not inspection.has("torch.no_such_module.step")
    assert inspection.has("torch.distributed._composable.replicate._ReplicateState.init")  # a module and a function of one name
