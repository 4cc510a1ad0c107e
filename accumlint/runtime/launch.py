"""The command line and the environment of the program that is observed."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from accumlint.runtime.settings import ENV, Settings

INJECT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "inject")
FOLDER_PREFIX = "accumlint-"
# Compiled code runs past the probes; this switches compilation off and leaves what it computes as it is.
COMPILE_OFF = {"TORCHDYNAMO_DISABLE": "1"}
# A run of a few updates is no experiment: trackers keep it to themselves, unless the user has set these.
TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "COMET_START_ONLINE": "0",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
}


@dataclass(frozen=True)
class Program:
    """What is run: a script or a module with its arguments, or any launcher's own command line.

    `processes` is the number of ranks to start on this machine, None for one plain process.
    """

    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()
    processes: int | None = None
    launcher: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line, the interpreter being the one that runs accumlint."""
        if self.launcher:
            return list(self.launcher)
        target = ["-m", self.module] if self.module else [self.script]
        if self.processes is None:
            return [sys.executable, *target, *self.arguments]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        # torchrun takes no option of the script for a shortened one of its own after "--".
        return [*torchrun, *(["-m"] if self.module else []), "--", target[-1], *self.arguments]


@dataclass(frozen=True)
class Launch:
    """A program ready to start. `settings` go to its ranks; `shows` is False where another controller of the same run reports."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    settings: Settings
    shows: bool = True


def prepare(program: Program, settings: Settings, environment: Mapping[str, str]) -> Launch:
    """Gives the run its token, names its folder (which is made when it is watched), and tells what its program needs."""
    token = secrets.token_hex(16)
    folder = os.path.join(os.path.realpath(tempfile.gettempdir()), FOLDER_PREFIX + token[:8])
    ready = replace(settings, token=token, folder=folder, controller=os.getpid(), host=socket.gethostname())
    if is_rank(program, environment) and ready.reference == "auto":
        ready = replace(ready, reference="sketch")  # ranks under controllers of their own share no folder
    shows = not is_rank(program, environment) or environment.get("RANK") == "0"
    return Launch(tuple(program.command()), observed(environment, ready), ready, shows)


def is_rank(program: Program, environment: Mapping[str, str]) -> bool:
    """Whether this controller was itself started as one rank of a run, and watches that rank only."""
    return not program.launcher and program.processes is None and "RANK" in environment and "WORLD_SIZE" in environment


def observed(environment: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The environment that makes every interpreter below it observe itself."""
    paths = [INJECT, *_entries(environment.get("PYTHONPATH", ""))]
    return {
        **TRACKERS_OFF,
        "PET_LOG_DIR": os.path.join(settings.folder, "torchelastic"),  # torchrun leaves its log folder behind otherwise
        **environment,
        **COMPILE_OFF,
        "PYTHONPATH": os.pathsep.join(paths),
        ENV: settings.to_json(),
    }


def _entries(path: str) -> Sequence[str]:
    """The entries of a PYTHONPATH; an empty one means the current folder to Python, so it stays, unless all is empty."""
    return path.split(os.pathsep) if path else ()
