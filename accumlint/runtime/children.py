"""What happens around a rank: workers of loaders stay silent, processes that are started as ranks report, their parents stop too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accumlint.runtime.mailbox import Mailbox
from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder

if TYPE_CHECKING:
    from accumlint.runtime.stop import Stopper

Function = Callable[..., Any]
LONGEST = 88  # bytes of a path that leave room for the name of a socket


def install(recorder: Recorder, stopper: Stopper, patches: Patches) -> None:
    """Follows the processes that this one starts, or that it is."""
    import multiprocessing.process

    import torch
    from torch.utils.data._utils import worker

    if stopper.here:
        _keep_sockets(stopper.mailbox)
    patches.replace(worker, "_worker_loop", lambda original: _silent(recorder, original))
    process = multiprocessing.process.BaseProcess
    patches.replace(process, "run", lambda original: _observed(stopper, original))
    patches.replace(process, "_bootstrap", lambda original: _farewell(stopper, original))
    patches.replace(process, "join", lambda original: _followed(stopper, original))
    if torch.distributed.is_available():
        # Functions are looked up in both places.
        for owner in (torch.distributed.distributed_c10d, torch.distributed):
            patches.replace(owner, "init_process_group", lambda original: _reborn(recorder, stopper, original))
            patches.replace(owner, "destroy_process_group", lambda original: _leaving(recorder, original))
    os.register_at_fork(after_in_child=stopper.forked)


def _keep_sockets(box: Mailbox) -> None:
    """Puts the sockets of multiprocessing into the folder of the run: processes that are ended cannot remove theirs."""
    from multiprocessing import process

    folder = box.path(f"pymp-{os.getpid()}")
    if len(folder) < LONGEST:
        os.makedirs(folder, exist_ok=True)
        process.current_process()._config.setdefault("tempdir", folder)  # type: ignore[attr-defined]


def _silent(recorder: Recorder, original: Function) -> Function:
    def worker_loop(*arguments: Any, **options: Any) -> Any:
        recorder.active = False
        return original(*arguments, **options)

    return worker_loop


def _observed(stopper: Stopper, original: Function) -> Function:
    """An error in a process of multiprocessing is swallowed further up, or exchanged for an exit status."""

    def run(this: Any) -> Any:
        try:
            return original(this)
        except Exception as error:
            stopper.failed(error)
            raise
        except SystemExit as error:
            if error.code and isinstance(error.__context__, Exception):
                stopper.failed(error.__context__)
            raise

    return run


def _farewell(stopper: Stopper, original: Function) -> Function:
    """A process of multiprocessing may end without the interpreter's usual exit."""

    def bootstrap(this: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return original(this, *arguments, **options)
        finally:
            stopper.script_ended()

    return bootstrap


def _followed(stopper: Stopper, original: Function) -> Function:
    def join(this: Any, *arguments: Any, **options: Any) -> Any:
        result = original(this, *arguments, **options)
        stopper.child_joined(this)
        return result

    return join


def _reborn(recorder: Recorder, stopper: Stopper, original: Function) -> Function:
    """A forked process that joins a group is a rank, and starts afresh; what it inherited belongs to its parent."""

    def init_process_group(*arguments: Any, **options: Any) -> Any:
        if stopper.is_forked and stopper.successor is None:
            try:
                from accumlint.runtime import agent

                stopper.successor = agent.observe(recorder.settings)
            except Exception as error:
                recorder.trouble(f"a forked rank: {type(error).__name__}: {error}")
        return original(*arguments, **options)

    return init_process_group


def _leaving(recorder: Recorder, original: Function) -> Function:
    """Without the group the ranks could not end together any more."""

    def destroy_process_group(*arguments: Any, **options: Any) -> Any:
        recorder.passing()
        return original(*arguments, **options)

    return destroy_process_group
