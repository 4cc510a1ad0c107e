"""What is trained inside a watch, and after it, is what would be trained without, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accumlint
from tests.runtime.ddp.ranks import run
from tests.watch.programs import nothing, train

ALONE: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "SGD"},
    "adamw": {"clip": True},
    "dropout": {"dropout": 0.3},
    "checkpoint": {"checkpoint": False, "dropout": 0.3},
    "reentrant checkpoint": {"checkpoint": True, "dropout": 0.3},
    "scaler": {"amp": "float16", "clip": True},
    "bfloat16": {"amp": "bfloat16"},
}


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("reference", ["exact", "sketch", "off"])
def test_one_process(name: str, reference: Any) -> None:
    windows = []

    def watching(model: Any, optimizer: Any, update: int) -> Any:
        windows.append(accumlint.watch(model, optimizer, reference=reference))
        return windows[-1]

    torch.manual_seed(1)
    plain = train(nothing, **ALONE[name])
    torch.manual_seed(1)
    assert train(watching, **ALONE[name]) == plain
    for window in windows:
        window.raise_for_violations("warning")
        assert window.report.updates[0].micro_steps == 3
        assert not [limit for limit in window.report.limits if limit.startswith("internal")]


def _ddp(**options: Any) -> Any:
    return lambda model: torch.nn.parallel.DistributedDataParallel(model, **options)


def _own_hook(model: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def _fsdp1(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model.inner = FullyShardedDataParallel(model.inner, device_id=torch.device("cpu"))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _fsdp2(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.inner)
    return fully_shard(model)


def _replicate(model: Any) -> Any:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


TOGETHER: dict[str, dict[str, Any]] = {
    "ddp": {"make": _ddp(), "clip": True},
    "ddp, views": {"make": _ddp(gradient_as_bucket_view=True)},
    "ddp, unused": {"make": _ddp(find_unused_parameters=True), "optimizer": "SGD"},
    "ddp, small buckets": {"make": _ddp(bucket_cap_mb=0.0005)},
    "ddp, own hook": {"make": _own_hook},
    "ddp, scaler": {"make": _ddp(), "amp": "float16"},
    "fsdp1": {"make": _fsdp1},
    "fsdp2": {"make": _fsdp2},
    "replicate": {"make": _replicate},
}
ONCE_A_WINDOW = "Gradients are reduced once a window, in its last micro-batch (1 window)."


def _everything() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found = {}
    for name, options in TOGETHER.items():
        torch.manual_seed(1)
        plain = train(nothing, rank=rank, **options)
        windows = []

        def watching(model: Any, optimizer: Any, update: int, windows: list[Any] = windows) -> Any:
            windows.append(accumlint.watch(model, optimizer))
            return windows[-1]

        torch.manual_seed(1)
        observed = train(watching, rank=rank, **options)
        different = [key for key in plain if plain[key] != observed[key]]
        hooks = [window.report.checks[0].summary for window in windows]
        limits = [limit for window in windows for limit in window.report.limits]
        alone = [[(check.topic.name, check.state.name) for check in window.report.checks] for window in windows]
        codes = [finding.code for window in windows for finding in window.report.findings]
        for window in windows:
            window.gather()
        together = [[(check.topic.name, check.state.name) for check in window.report.checks] for window in windows]
        codes += [finding.code for window in windows for finding in window.report.findings]
        found[name] = {
            "different": different, "hooks": hooks, "limits": limits, "alone": alone, "together": together, "codes": codes,
            "sums": [update.weight_sum for window in windows for update in window.report.updates],
        }  # fmt: skip
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks(world: int) -> None:
    for rank, found in enumerate(run(_everything, world)):
        for name, one in found.items():
            where = (rank, name)
            assert one["different"] == [], where
            assert one["codes"] == [], where
            assert not [limit for limit in one["limits"] if limit.startswith("internal")], where
            for states in map(dict, one["alone"]):
                assert {states[topic] for topic in ("WEIGHTS", "SUM", "REDUCTION", "GRADIENT", "RANKS")} == {"NOT_OBSERVED"}, where
            if name == "ddp, own hook":
                assert any("communication hook had been registered before" in limit for limit in one["limits"])
                continue
            assert one["hooks"] == [ONCE_A_WINDOW] * 2, where
            for states in map(dict, one["together"]):
                wanted = {"HOOKS", "BOUNDARY", "ORDER", "WEIGHTS", "SUM", "REDUCTION"}
                assert {topic: states[topic] for topic in wanted} == dict.fromkeys(wanted, "CONFIRMED"), where
            assert one["sums"] == pytest.approx([1.0] * len(one["sums"]), rel=1e-5), where
