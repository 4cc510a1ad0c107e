"""Checksums: they change with any bit, not with the layout, and agree between ranks where the values do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.ddp.observing import observed
from tests.runtime.ddp.ranks import run

WORLD = 2


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "complex64", "int8", "bool"])
def test_a_checksum_changes_with_one_bit_and_not_with_the_layout(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from accumlint.runtime.probes.checksums import checksum

    tensor = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).mul(100).to(getattr(torch, dtype))
    other = torch.ones(3)
    value = int(checksum([tensor, other]))
    assert 0 <= value < 2**52
    assert int(checksum([tensor.clone(), other])) == value
    assert int(checksum([tensor.t().contiguous().t(), other])) == value
    assert int(checksum([torch.cat([tensor[:1], tensor])[1:], other])) == value
    assert int(checksum([other, tensor])) != value
    assert int(checksum([tensor, None, other])) != value
    assert int(checksum([tensor, other, None])) != value
    flipped = tensor.clone()
    if dtype == "bool":
        flipped[2, 3] = ~flipped[2, 3]
    else:
        flipped.view(torch.uint8)[2, 3] ^= 1
    assert int(checksum([flipped, other])) != value


def test_a_checksum_of_nothing() -> None:
    pytest.importorskip("torch")
    from accumlint.runtime.probes.checksums import checksum

    assert int(checksum([None, None])) != int(checksum([None]))


def _train(wrap: str) -> dict[str, Any]:
    import contextlib

    import torch
    import torch.distributed as dist

    with observed() as recorder:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 3))
        model = _wrapped(module, wrap)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        if wrap == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            with model.no_sync() if wrap == "unsynced" else contextlib.nullcontext():
                model(torch.randn(4, 5, generator=generator)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.settle()
        steps = [row for row in recorder.events() if row["kind"] == "step"]
        return {"steps": [(row["numbers"], row["options"]) for row in steps], "troubles": recorder.troubles}


def _wrapped(module: Any, wrap: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrap == "fully_shard":
        return fully_shard(module, mesh=init_device_mesh("cpu", (WORLD,)))
    if wrap in {"FULL_SHARD", "NO_SHARD"}:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy[wrap])
    if wrap == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    return module if wrap == "bare" else DistributedDataParallel(module)


def _steps(wrap: str) -> list[list[Any]]:
    """The steps of each rank."""
    reports = run(lambda: _train(wrap), WORLD)
    assert [report["troubles"] for report in reports] == [[]] * WORLD
    return [report["steps"] for report in reports]


@pytest.mark.parametrize(("wrap", "agree"), [("ddp", True), ("NO_SHARD", True), ("unsynced", False), ("bare", False)])
def test_ranks_agree_where_they_are_synchronised(wrap: str, agree: bool) -> None:
    one, other = _steps(wrap)
    assert len(one) == len(other) == 2
    for (first, _), (second, _) in zip(one, other, strict=True):
        assert len(first["grad_checksum"]) == len(first["parameter_checksum"]) == len(first["checksum_scope"]) == 1
        assert first["checksum_scope"][0]["elements"] == 5 * 8 + 8 + 8 * 3 + 3
        assert (first["grad_checksum"] == second["grad_checksum"]) == agree
        assert (first["parameter_checksum"] == second["parameter_checksum"]) == agree
    assert one[0][0]["parameter_checksum"] != one[1][0]["parameter_checksum"]


def test_a_parameter_that_the_wrapper_ignores_is_compared_by_itself() -> None:
    one, other = _steps("ignored")
    for (first, _), (second, _) in zip(one, other, strict=True):
        scopes = [(scope["wrapper"], scope["parameters"], scope["elements"]) for scope in first["checksum_scope"]]
        assert scopes == [("DDP", 3, 5 * 8 + 8 + 3), ("none", 1, 8 * 3)]
        assert first["grad_checksum"][0] == second["grad_checksum"][0]
        assert first["grad_checksum"][1] != second["grad_checksum"][1]


@pytest.mark.parametrize(("wrap", "parameters"), [("fully_shard", 4), ("FULL_SHARD", 1)])
def test_shards_are_not_compared(wrap: str, parameters: int) -> None:
    for steps in _steps(wrap):
        assert [(numbers["checksum_scope"], numbers["checksum_skipped"]) for numbers, _ in steps] == [([], parameters)] * 2


def test_the_parts_of_a_sharded_optimizer_are_told_from_the_whole() -> None:
    one, other = _steps("zero")
    assert [options for _, options in one] == [["shard"], []] * 2 or [options for _, options in one] == [[], ["shard"]] * 2
    whole = [[numbers for numbers, options in steps if not options] for steps in (one, other)]
    for first, second in zip(*whole, strict=True):
        assert first["grad_checksum"] == second["grad_checksum"]
        assert first["parameter_checksum"] == second["parameter_checksum"]
