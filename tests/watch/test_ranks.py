"""One rank of several says what it can; all of them together say the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import accumlint
from tests.runtime.ddp.ranks import run

COUNTS = ((2, 6), (4, 8))  # targets by rank and micro-batch
K, W, N = 2, 2, 20


def _watched(
    step: Callable[[Any, Any, Any, Any], None], *, inner: bool = False, prepare: Callable[[Any], None] = lambda ddp: None
) -> dict[str, Any]:
    """What one rank's report says, and that of both, of a window whose micro-batches are given to `step(ddp, last, inputs, targets)`."""
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with accumlint.watch(model if inner else ddp, optimizer) as window:
        for micro, count in enumerate(COUNTS[dist.get_rank()]):
            step(ddp, micro == K - 1, torch.randn(count, 8), torch.randint(4, (count,)))
        optimizer.step()
        optimizer.zero_grad()
    alone = _told(window.report)
    text = window.text()
    gathered = window.gather()
    assert gathered is window.report
    return {"alone": alone, "together": _told(gathered), "text": text, "whole": window.text(), "rank": dist.get_rank()}


def _told(report: Any) -> dict[str, Any]:
    return {
        "codes": [finding.code for finding in report.findings],
        "checks": {check.topic.name: (check.state.name, check.summary) for check in report.checks},
        "sums": [update.weight_sum for update in report.updates],
        "errors": [update.gradient_error for update in report.updates],
        "ranks": [end.rank for end in report.ranks],
        "buckets": [update.buckets for update in report.updates],
    }


def _step(loss: Callable[[Any, Any], Any], *, sync_always: bool = False) -> Callable[[Any, Any, Any, Any], None]:
    def step(ddp: Any, last: bool, inputs: Any, targets: Any) -> None:
        ddp.require_backward_grad_sync = last or sync_always
        loss(ddp(inputs), targets).backward()

    return step


RIGHT = _step(lambda out, targets: cross_entropy(out, targets, reduction="sum") * W / N)
MEAN = _step(lambda out, targets: cross_entropy(out, targets) / K)
NO_WORLD = _step(lambda out, targets: cross_entropy(out, targets, reduction="sum") / N)
EVERY = _step(lambda out, targets: cross_entropy(out, targets, reduction="sum") * W / N, sync_always=True)


def _local(out: Any, targets: Any) -> Any:
    return cross_entropy(out, targets, reduction="sum") / sum(COUNTS[torch.distributed.get_rank()])


def test_right_on_two_ranks() -> None:
    for found in run(lambda: _watched(RIGHT), W):
        alone, together = found["alone"], found["together"]
        assert (alone["codes"], together["codes"]) == ([], [])
        assert alone["ranks"] == [found["rank"]]
        assert together["ranks"] == [0, 1]
        for topic in ("WEIGHTS", "SUM", "REDUCTION", "GRADIENT", "RANKS"):
            assert alone["checks"][topic][0] == "NOT_OBSERVED"
            assert "window.gather() compares them" in alone["checks"][topic][1]
            assert together["checks"][topic][0] == "CONFIRMED", topic
        assert alone["checks"]["HOOKS"][0] == together["checks"]["HOOKS"][0] == "CONFIRMED"
        assert together["buckets"] == [(0, 1), (0, 1)]
        assert alone["sums"] == [None]
        assert together["sums"] == pytest.approx([1.0, 1.0])
        assert together["errors"][0] < 1e-6


@pytest.mark.parametrize(
    ("step", "alone", "together", "total"),
    [
        (MEAN, ["ACC201"], ["ACC201"], 1.0),
        (NO_WORLD, [], ["ACC203"], 0.5),
        (_step(_local), [], ["ACC204"], 1.0),
        (EVERY, ["ACC103"], ["ACC103"], 1.0),
    ],
    ids=["mean", "no world size", "local denominator", "every micro-batch"],
)
def test_wrong_on_two_ranks(step: Any, alone: list[str], together: list[str], total: float) -> None:
    for found in run(lambda: _watched(step), W):
        assert found["alone"]["codes"] == alone
        assert found["together"]["codes"] == together
        assert found["together"]["sums"] == pytest.approx([total] * W)
        assert found["together"]["buckets"] == ([(1, 1), (1, 1)] if step is EVERY else [(0, 1), (0, 1)])


def test_the_model_inside_of_a_wrapper_is_enough() -> None:
    for found in run(lambda: _watched(RIGHT, inner=True), W):
        assert found["together"]["checks"]["HOOKS"][0] == "CONFIRMED"
        assert found["together"]["codes"] == []


def test_a_hook_of_the_users_own_hides_the_buckets() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    for found in run(lambda: _watched(RIGHT, prepare=lambda ddp: ddp.register_comm_hook(None, allreduce_hook)), W):
        assert found["together"]["codes"] == []
        assert {found["together"]["checks"][topic][0] for topic in ("HOOKS", "SUM", "REDUCTION")} == {"NOT_OBSERVED"}
        assert "a communication hook had been registered before" in " ".join(found["whole"].split())
