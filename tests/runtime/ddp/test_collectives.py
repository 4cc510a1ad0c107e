"""Collectives that the user calls."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.ddp.observing import observed
from tests.runtime.ddp.ranks import run

WORLD = 2


def _train(how: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

    with observed() as recorder:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        if how == "leaf hooks":
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: (dist.all_reduce(gradient), gradient)[1])
        for _ in range(2):
            for _ in range(2):
                count = torch.tensor([3 + dist.get_rank()])
                dist.all_reduce(count)
                model(torch.randn(4, 5, generator=generator)).square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            if how in {"each", "data"}:
                for gradient in gradients:
                    dist.all_reduce(gradient if how == "each" else gradient.data, op=dist.ReduceOp.SUM)
            elif how == "asynchronous":
                for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                    work.wait()
            elif how == "flat":
                flat = _flatten_dense_tensors(gradients)
                dist.all_reduce(tensor=flat)
                for gradient, reduced in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
                    gradient.copy_(reduced)
            optimizer.step()
            optimizer.zero_grad()
        recorder.settle()
        facts = {fact["name"] for fact in recorder.facts}
        return {
            "rows": recorder.events(),
            "facts": facts,
            "troubles": recorder.troubles,
            "final": [each.tolist() for each in model.parameters()],
        }


@pytest.mark.parametrize(("how", "rows", "sampled"), [("each", 2, True), ("data", 2, True), ("asynchronous", 2, False), ("flat", 2, True)])
def test_gradients_reduced_by_hand(how: str, rows: int, sampled: bool) -> None:
    one, other = run(lambda: _train(how), WORLD)
    assert one["troubles"] == other["troubles"] == []
    assert one["facts"] == {"manual-reduce", "rank-agreed"}
    assert one["final"] == other["final"]
    found = [[row for row in report["rows"] if row["kind"] == "reduce"] for report in (one, other)]
    assert len(found[0]) == rows
    for first, second in zip(*found, strict=True):
        assert first["options"] == ["manual"]
        assert first["numbers"]["elements"] == 75
        assert first["numbers"]["operation"] == "sum"
        assert first["numbers"]["backward"] is None
        assert ("after" in first["numbers"]) == sampled
        if sampled:
            sums = [a + b for a, b in zip(first["numbers"]["before"], second["numbers"]["before"], strict=True)]
            assert first["numbers"]["after"] == pytest.approx(sums, rel=1e-5, abs=1e-6)


def test_gradients_reduced_in_hooks_of_the_user() -> None:
    for report in run(lambda: _train("leaf hooks"), WORLD):
        found = [row for row in report["rows"] if row["kind"] == "reduce"]
        backwards = [row["index"] for row in report["rows"] if row["kind"] == "backward"]
        assert [row["numbers"]["backward"] for row in found] == backwards
        assert all(row["options"] == ["manual"] and row["numbers"]["elements"] == 75 for row in found)


def test_a_count_is_no_gradient() -> None:
    for report in run(lambda: _train("none"), WORLD):
        assert report["facts"] == {"rank-agreed"}
        assert not [row for row in report["rows"] if row["kind"] == "reduce"]
