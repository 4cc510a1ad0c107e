"""Ranks as processes forked from this one, which has imported torch already."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 90.0  # seconds


def run(work: Callable[[], Any], world: int) -> list[Any]:
    """What `work()` returned in each rank of a gloo group; raises RuntimeError with the first rank's traceback where one failed."""
    # Once for all ranks, what torch imports at the first step and what tests of sharding use.
    import torch._dynamo
    import torch.distributed._composable.replicate
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(work, rank, world, Path(folder)) for rank in range(world)]
        _wait(children)
        results = []
        for rank in range(world):
            found = Path(folder, f"{rank}.pickle")
            if not found.exists():
                raise RuntimeError(f"rank {rank} ended without a result: {_failure(Path(folder), world)}")
            results.append(pickle.loads(found.read_bytes()))
        return results


def _failure(folder: Path, world: int) -> str:
    texts = [Path(folder, f"{rank}.error") for rank in range(world)]
    return next((text.read_text(encoding="utf-8") for text in texts if text.exists()), "it hung or was killed")


def _fork(work: Callable[[], Any], rank: int, world: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        _start(rank, world, folder)
        result = work()
        part = folder / f"{rank}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"{rank}.pickle")
        _finish()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(code)


def _start(rank: int, world: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def _finish() -> None:
    """A rank that leaves early takes the connections of the others with it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()


def _wait(children: list[int]) -> None:
    deadline, left = time.monotonic() + LIMIT, set(children)
    while left and time.monotonic() < deadline:
        for child in tuple(left):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                left.discard(child)
                if status:
                    deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.005)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
