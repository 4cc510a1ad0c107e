"""How the reports of a run grow: `python -m tests.benchmarks.reports [--ranks 256] [--strict]`.

Two real ranks are observed for each K; the reports of further ranks are copies of the second one's. Bytes that the ranks
leave, and seconds to assemble and judge them, must be linear in K x W: the last columns stay what they are.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from accumlint.judge import judge
from accumlint.rule import catalogue
from accumlint.runtime.assemble import assemble
from tests.runtime.runs import measure

SCRIPT = """
import contextlib

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

K = {k}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range({updates}):
    optimizer.zero_grad()
    for k in range(K):
        with contextlib.nullcontext() if k == K - 1 else model.no_sync():
            loss = cross_entropy(model(torch.randn(8, 16)), torch.randint(0, 4, (8,))) / K
            loss.backward()
    optimizer.step()
"""
UPDATES = 2
SLACK = 3.0  # the figures for one micro-batch of one rank may differ by this factor over the grid


class Figure(NamedTuple):
    """What one size of run comes to: bytes of all the ranks' reports, seconds to assemble and to judge them."""

    k: int
    world: int
    size: int
    assembling: float
    judging: float

    @property
    def cells(self) -> int:
        return self.k * self.world * UPDATES


def reports_of(k: int) -> list[dict[str, Any]]:
    """The reports of two ranks that were observed with K micro-batches an update."""
    reports = measure(SCRIPT.format(k=k, updates=UPDATES), 2)
    if any(report["ended"] not in {"updates", "script"} for report in reports):
        raise SystemExit(f"K = {k}: the ranks ended {[report['ended'] for report in reports]}")
    return reports


def widened(reports: list[dict[str, Any]], world: int) -> list[dict[str, Any]]:
    """As many ranks as wanted, the further ones like the second."""
    wide = [copy.deepcopy(reports[min(rank, 1)]) for rank in range(world)]
    for rank, report in enumerate(wide):
        report |= {"rank": rank, "local_rank": rank % 8, "world": world, "pid": 1000 + rank}
    return wide


def figure(k: int, world: int, reports: list[dict[str, Any]]) -> Figure:
    wide = widened(reports, world)
    size = sum(len(json.dumps(report)) for report in wide)
    rules = tuple(catalogue().values())
    gc.collect()
    assembling, assembly = timed(lambda: assemble(wide))
    judging, findings = timed(lambda: [finding for trace in assembly.traces for finding in judge(trace, rules)])
    wrong = {finding.code for finding in findings if finding.severity}
    if wrong:
        raise SystemExit(f"K = {k}, W = {world}: {', '.join(sorted(wrong))} reported of a run that is right")
    return Figure(k, world, size, assembling, judging)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds and the result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256, help="the most ranks (%(default)s)")
    parser.add_argument(
        "--strict", action="store_true", help=f"exit 1 where a figure for one cell differs by more than a factor of {SLACK:g}"
    )
    given = parser.parse_args()
    import torch  # noqa: F401  (the ranks are forked from here)

    print(f"{UPDATES} updates, CPU time; a cell is one micro-batch of one rank\n")
    print(f"{'K':>4} {'W':>4} {'reports':>10} {'assemble':>9} {'judge':>8}   {'bytes':>6} {'assemble':>9} {'judge':>8} a cell")
    found: list[Figure] = []
    for k in (4, 8, 16):
        reports = reports_of(k)
        for world in sorted({16, 64, given.ranks}):
            each = figure(k, world, reports)
            found.append(each)
            totals = f"{each.size / 2**20:6.1f} MiB {each.assembling:8.2f}s {each.judging:7.2f}s"
            cell = f"{each.size / each.cells:6.0f} {each.assembling / each.cells * 1e6:7.1f}µs {each.judging / each.cells * 1e6:6.1f}µs"
            print(f"{k:>4} {world:>4} {totals}   {cell}", flush=True)
    spreads = {
        "bytes": spread([each.size / each.cells for each in found]),
        "time": spread([(each.assembling + each.judging) / each.cells for each in found]),
    }
    print("\nlargest to smallest figure for a cell: " + ", ".join(f"{name} {value:.2f}" for name, value in spreads.items()))
    return int(given.strict and max(spreads.values()) > SLACK)


def spread(values: list[float]) -> float:
    return max(values) / min(values)


if __name__ == "__main__":
    sys.exit(main())
