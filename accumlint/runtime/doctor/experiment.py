"""One rank of the two-rank experiment, a script that imports torch alone: five ways to accumulate one update, and the full batch.

A float64 linear model on 20 targets, of which rank 0 has 2 + 6 and rank 1 has 4 + 8, in two micro-batches each. The
result is a JSON file: gradients, weights and the calls of the communication hook, for somebody else to judge.
"""

# No `from __future__ import annotations`: torch compares the annotation of a hook's bucket with the class itself.
import argparse
import contextlib
import json
import os
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TARGETS = 20
SPANS = ((slice(0, 2), slice(2, 8)), (slice(8, 12), slice(12, 20)))
MODEL_SEED = 42
DATA_SEED = 2026
# name: (loss, where no_sync is around the first micro-batch, hooked)
CASES = {
    "native": ("window", "forward and backward", False),
    "sync-each": ("window", "nowhere", True),
    "sync-final": ("window", "forward and backward", True),
    "backward-only": ("window", "backward", True),
    "mean-of-means": ("mean", "forward and backward", True),
}


def make_model() -> torch.nn.Linear:
    torch.manual_seed(MODEL_SEED)
    return torch.nn.Linear(4, 3, dtype=torch.float64)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [20, 4] float64 and classes [20]."""
    generator = torch.Generator().manual_seed(DATA_SEED)
    inputs = torch.randn(TARGETS, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (TARGETS,), generator=generator)


def numbers(tensors: Iterable[torch.Tensor]) -> list[float]:
    return [float(value) for tensor in tensors for value in tensor.detach().reshape(-1).cpu()]


def full_batch(device: torch.device) -> dict[str, Any]:
    """What one process makes of all the targets at once."""
    inputs, classes = (tensor.to(device) for tensor in make_data())
    model = make_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = cross_entropy(model(inputs), classes, reduction="sum") / TARGETS
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = numbers(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    optimizer.step()
    return {"loss": float(loss.detach()), "gradient": gradient, "weights": numbers(model.parameters())}


def accumulated(case: str, rank: int, device: torch.device, updates: int) -> dict[str, Any]:
    """What this rank has after `updates` windows; gradient and calls are those of the last window."""
    normalised, quiet, hooked = CASES[case]
    inputs, classes = (tensor.to(device) for tensor in make_data())
    model = DistributedDataParallel(make_model().to(device), device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world = dist.get_world_size()
    calls: list[int] = []

    def count(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        calls[-1] += 1
        return allreduce_hook(group, bucket)

    if hooked:
        model.register_comm_hook(dist.group.WORLD, count)
    gradient: list[float] = []
    for _ in range(updates):
        calls.clear()
        optimizer.zero_grad(set_to_none=True)
        for k, span in enumerate(SPANS[rank]):
            calls.append(0)
            first = k == 0
            with model.no_sync() if first and quiet == "forward and backward" else contextlib.nullcontext():
                if normalised == "window":
                    loss = cross_entropy(model(inputs[span]), classes[span], reduction="sum") * world / TARGETS
                else:
                    loss = cross_entropy(model(inputs[span]), classes[span]) / len(SPANS[rank])
                with model.no_sync() if first and quiet == "backward" else contextlib.nullcontext():
                    loss.backward()  # type: ignore[no-untyped-call]
        gradient = numbers(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        optimizer.step()
    return {"calls": list(calls) if hooked else None, "gradient": gradient, "weights": numbers(model.parameters())}


def end_with_parent() -> None:
    """Ends this process when whoever holds the other end of standard input is gone."""

    def wait() -> None:
        while os.read(0, 1):  # not through sys.stdin, whose lock would be held when the interpreter ends
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
    parser.add_argument("--store", help="file of the rendezvous; without one it is the environment's")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: the device of the rank's number where there are enough")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--updates", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--alone", action="store_true", help="do not compute the full batch")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    given = parser.parse_args()
    if given.lifeline:
        end_with_parent()
    torch.set_num_threads(1)
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", given.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    rendezvous: dict[str, Any] = {}
    if given.store:
        store = dist.FileStore(given.store, len(SPANS))  # type: ignore[attr-defined]
        rendezvous = {"store": store, "rank": given.rank, "world_size": len(SPANS)}
    dist.init_process_group(given.backend, timeout=timedelta(seconds=given.timeout), **rendezvous)
    result = {
        "rank": dist.get_rank(),
        "full_batch": None if given.alone else full_batch(device),
        "cases": {case: accumulated(case, dist.get_rank(), device, given.updates) for case in given.cases},
    }
    if given.out:
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(result, file)
    dist.destroy_process_group()
    if given.lifeline:
        os._exit(0)  # gloo's threads now and then abort an interpreter that shuts down


if __name__ == "__main__":
    main()
