"""DistributedDataParallel averages under the recording hook as it does without one: to the last bit, for 2 and 3 ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from tests.runtime.ddp.observing import bits, observed
from tests.runtime.ddp.ranks import run

VIEWS = {"gradient_as_bucket_view": True}
SMALL = {"bucket_cap_mb": 0.003}
# Options of the wrapper, and of the loop below.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "no_sync": ({}, {"no_sync": True}),
    "views": (VIEWS, {}),
    "views kept": (VIEWS, {"zero": "fill"}),
    "views kept, no_sync": (VIEWS, {"zero": "fill", "no_sync": True}),
    "views cleared between forward and backward": (VIEWS, {"zero": "late"}),
    "many buckets": (SMALL, {"no_sync": True}),
    "many buckets, views kept": ({**SMALL, **VIEWS}, {"zero": "fill"}),
    "unused": ({"find_unused_parameters": True}, {"unused": True}),
    "unused, views kept": ({"find_unused_parameters": True, **VIEWS}, {"unused": True, "zero": "fill"}),
    "static": ({"static_graph": True}, {}),
    "static, views kept": ({"static_graph": True, **VIEWS}, {"zero": "fill"}),
    "bfloat16": ({}, {"dtype": "bfloat16"}),
    "float16, views kept": (VIEWS, {"dtype": "float16", "zero": "fill"}),
    "frozen": ({}, {"frozen": True}),
    "sparse": ({}, {"sparse": True}),
    "batched copies": ({"batched_grad_copy": True}, {}),
    "batched copies, views kept": ({"batched_grad_copy": True, **VIEWS}, {"zero": "fill"}),
    "a hook": ({}, {"hook": "fp16"}),
    "a built-in hook": ({}, {"hook": "ALLREDUCE"}),
    "a built-in compressing hook": ({}, {"hook": "FP16_COMPRESS"}),
    "delayed": ({"delay": True}, {}),
    "checkpoint": ({}, {"checkpoint": True, "no_sync": True}),
    "uneven": ({}, {"join": True}),
    "uneven, divided by those left": ({}, {"join": False}),
    "uneven, views kept, divided by those left": (VIEWS, {"join": False, "zero": "fill"}),
}

RACES = "delayed"  # torch does not wait for this reduction: two runs without a probe differ as well


@pytest.fixture(scope="module", params=[2, 3])
def both(request: pytest.FixtureRequest) -> tuple[list[Any], list[Any]]:
    """What every case ended with on each rank, without and with the probes."""
    return run(lambda: _all(observe=False), request.param), run(lambda: _all(observe=True), request.param)


@pytest.mark.parametrize("name", [name for name in CASES if name != RACES])
def test_the_average_is_the_same_to_the_last_bit(both: tuple[list[Any], list[Any]], name: str) -> None:
    plain, watched = both
    for rank, (one, other) in enumerate(zip(plain, watched, strict=True)):
        if isinstance(one[name], str):
            pytest.skip(one[name])
        assert one[name]["bits"] == other[name]["bits"], f"rank {rank}"


@pytest.mark.parametrize("name", CASES)
def test_a_reduction_is_seen_where_there_is_one(both: tuple[list[Any], list[Any]], name: str) -> None:
    _, watched = both
    for found in watched:
        if isinstance(found[name], str):
            pytest.skip(found[name])
        synchronised = found[name]["synchronised"]
        assert not found[name]["troubles"]
        assert found[name]["reduced"] == synchronised


def _all(*, observe: bool) -> dict[str, Any]:
    return {name: _case(*CASES[name], observe=observe) for name in CASES}


def _case(wrapper: dict[str, Any], loop: dict[str, Any], *, observe: bool) -> Any:
    import inspect

    from torch.nn.parallel import DistributedDataParallel

    known = inspect.signature(DistributedDataParallel.__init__).parameters
    if "batched_grad_copy" in wrapper and "batched_grad_copy" not in known:
        return "this version of torch copies gradients one by one only"
    with observed(observe=observe) as recorder:
        gradients, synchronised = _train(dict(wrapper), **loop)
        if recorder is None:
            return {"bits": gradients}
        backwards = [row.index for row in recorder.rows if row.kind == "backward"]
        reduced = {row.numbers["backward"] for row in recorder.rows if row.kind == "reduce"} - {None}
        return {
            "bits": gradients,
            "synchronised": synchronised,
            "reduced": [index in reduced for index in backwards],
            "troubles": recorder.troubles,
        }


def _train(
    wrapper: dict[str, Any],
    *,
    dtype: str = "float32",
    no_sync: bool = False,
    zero: str = "none",
    unused: bool = False,
    frozen: bool = False,
    sparse: bool = False,
    hook: str = "",
    checkpoint: bool = False,
    join: bool | None = None,
) -> tuple[list[list[bytes]], list[bool]]:
    """Three updates of three micro-batches; returns the gradients of each and the parameters, and which backwards should reduce."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    module = _Model(sparse=sparse, checkpoint=checkpoint).to(getattr(torch, dtype))
    if frozen:
        module.first.weight.requires_grad_(False)
    if wrapper.pop("delay", False):
        wrapper["delay_all_reduce_named_params"] = [("last.weight", module.last.weight), ("last.bias", module.last.bias)]
        wrapper["param_to_hook_all_reduce"] = module.first.weight
    model = DistributedDataParallel(module, **wrapper)
    if hook == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    elif hook:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank, size, generator = dist.get_rank(), dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    synchronised, kept = [], []
    uneven = model.join(divide_by_initial_world_size=join) if join is not None else contextlib.nullcontext()
    with uneven:
        for update in range(3 + (rank if join is not None else 0)):
            for micro in range(3):
                inputs = torch.randint(0, 50, (5, 4), generator=generator) if sparse else torch.randn(5, 11, generator=generator)
                off = no_sync and micro < 2
                with model.no_sync() if off else contextlib.nullcontext():
                    output = model(inputs if sparse else inputs.to(module.last.weight.dtype), skip=unused and (update + rank) % size == 0)
                    if zero == "late" and micro == 0:
                        optimizer.zero_grad()
                    (output**2).mean().backward()
                synchronised.append(not off)
            kept.append([b"" if each.grad is None else bits(each.grad) for each in model.parameters()])
            optimizer.step()
            if zero != "late":
                optimizer.zero_grad(set_to_none=zero == "none")
    kept.append([bits(each) for each in model.parameters()])
    return kept, synchronised


def _Model(*, sparse: bool, checkpoint: bool) -> Any:  # noqa: N802
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint as again

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first: Any = nn.Embedding(50, 8, sparse=True) if sparse else nn.Linear(11, 37)
            self.middle = nn.Linear(32 if sparse else 37, 41)
            self.side = nn.Linear(41, 41)
            self.last = nn.Linear(41, 7)

        def forward(self, inputs: torch.Tensor, *, skip: bool = False) -> torch.Tensor:
            hidden = torch.tanh(self.first(inputs).flatten(1))
            hidden = again(self.middle, hidden, use_reentrant=False) if checkpoint else self.middle(hidden)
            return self.last(torch.tanh(hidden if skip else self.side(hidden)))

    return Model()
