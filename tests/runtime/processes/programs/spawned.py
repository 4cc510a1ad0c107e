"""Starts its own ranks: `spawned.py METHOD`, by spawn or by fork."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


def rank_main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    folder = os.getcwd()
    torch.multiprocessing.start_processes(rank_main, (tempfile.mktemp(dir=folder),), WORLD, start_method=sys.argv[1])
    Path("after").write_text("the ranks are done")
