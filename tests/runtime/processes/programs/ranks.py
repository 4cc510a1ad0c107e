"""Trains under DDP: `ranks.py MODE` goes wrong on rank 1 in the fourth micro-batch, or ends in one of several ways."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

K = 2


def trouble(mode: str) -> None:
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "hang":
        time.sleep(1000)
    if mode == "error":
        raise ValueError("broken on purpose")


def main(mode: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        if rank == 1 and step == 3:
            trouble(mode)
        loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.randn(8, 1)) / K
        loss.backward()
        if (step + 1) % K == 0:
            optimizer.step()
            optimizer.zero_grad()
        if step == 3:
            if rank == 0:
                Path("checkpoint").write_text("overwritten")
            dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
    dist.destroy_process_group()
