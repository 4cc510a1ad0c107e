"""Trains on one process with loaders whose workers are forked and spawned, and says what it was given."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

K = 2


def main() -> None:
    print("arguments", *sys.argv[1:])
    print("site", getattr(sys.modules["sitecustomize"], "MARK", "none") if "sitecustomize" in sys.modules else "none")
    print("path", [each for each in sys.path if "inject" in each])
    model = torch.nn.Linear(4, 1)
    scaled = torch.compile(lambda loss: loss / K)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    forked = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="fork")
    spawned = DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="spawn")
    try:
        for step, ((x, y), _) in enumerate(zip(forked, spawned, strict=True)):
            loss = scaled(torch.nn.functional.mse_loss(model(x), y))
            loss.backward()
            if (step + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()
        Path("checkpoint").write_text("overwritten")
    finally:
        print("finally")


if __name__ == "__main__":
    main()
