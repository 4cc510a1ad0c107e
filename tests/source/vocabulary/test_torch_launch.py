"""torch.multiprocessing: what is launched is rehearsed with what it is given."""

from __future__ import annotations

from tests.source.across.conftest import Lint, lint

__all__ = ["lint"]

SPAWNED = """\
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def worker(rank, args, loader):
    model = torch.nn.Linear(4, 2)
    if args.distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def main(args, loader):
    args.distributed = {distributed}
    mp.spawn(worker, nprocs=args.processes, args=(args, loader))


if __name__ == "__main__":
    main(parser.parse_args(), torch.utils.data.DataLoader(data))
"""


def test_a_spawned_worker_has_the_settings_of_its_launcher(lint: Lint) -> None:
    found = lint({"main.py": SPAWNED.format(distributed=True)})
    assert found == {("main.py", "ACC103", "(F.cross_entropy(model(x), y) / args.accum).backward()")}
    assert lint({"main.py": SPAWNED.format(distributed=False)}) == set()


EVALUATES = """\
import torch
import torch.nn.functional as F


def main(args, loader, net):
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.{flag}:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "it.pt")
    if args.{flag}:
        return
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / args.accum).backward()
        if (i + 1) % args.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_run_that_only_evaluates_is_not_the_one_that_trains(lint: Lint) -> None:
    for flag in ("eval", "evaluate", "test_only"):
        assert {each[1] for each in lint({"main.py": EVALUATES.replace("{flag}", flag)})} == {"ACC103"}
