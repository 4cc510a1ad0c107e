"""Small training programs, the same with and without an observer."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

from tests.runtime.ddp.observing import bits

K = 3
UPDATES = 3
RELEASED = 2  # the observer leaves after so many updates, and the program goes on


def outcome(program: Callable[[Callable[[int], None]], dict[str, Any]], reference: str | None) -> dict[str, Any]:
    """What a program ended with; observed unless `reference` is None. "troubles" are the observer's own problems."""
    import torch

    random.seed(0)
    torch.manual_seed(1234)
    if reference is None:
        return {**program(lambda update: None), **_random_states()}
    from accumlint.runtime.agent import start
    from accumlint.runtime.settings import Settings

    recorder = start(Settings("0", "", steps=1000, reference=reference))
    try:
        found = program(lambda update: recorder.release() if update + 1 == RELEASED else None)
    finally:
        if recorder.active:
            recorder.release()
    kinds = {row.kind for row in recorder.rows}
    return {**found, **_random_states(), "troubles": recorder.troubles, "kinds": kinds}


def _random_states() -> dict[str, Any]:
    import torch

    return {"torch": bytes(torch.get_rng_state().tolist()), "random": random.getstate()}


def train(
    done: Callable[[int], None],
    *,
    wrap: str = "",
    options: dict[str, Any] | None = None,
    optimizer: str = "AdamW",
    amp: str = "",
    model: dict[str, Any] | None = None,
    no_sync: bool = False,
    hook: bool = False,
    clip: bool = False,
    average: bool = False,
    set_to_none: bool = True,
    loss: str = "cross_entropy",
) -> dict[str, Any]:
    """Trains a small classifier for `UPDATES` windows of `K` micro-batches; `done(update)` is called after each."""
    import torch

    module = _wrapped(_network(**(model or {})), wrap, options or {})
    if hook:
        _own_hook(module)
    steps = _optimizer(optimizer, module)
    schedule = torch.optim.lr_scheduler.StepLR(steps, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp == "float16")
    mean = torch.optim.swa_utils.AveragedModel(module) if average else None
    generator = torch.Generator().manual_seed(_rank())
    losses = []
    for update in range(UPDATES):
        for micro in range(K):
            inputs, targets = torch.randn(6, 10, generator=generator), torch.randint(-1, 4, (6,), generator=generator)
            with _synchronised(module, wrap, on=not no_sync or micro == K - 1):
                with torch.autocast("cpu", getattr(torch, amp)) if amp else contextlib.nullcontext():
                    value = _loss(loss, module(inputs), targets) / K
                scaler.scale(value).backward()
            losses.append(bits(value))
        if clip:
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad(set_to_none=set_to_none)
        schedule.step()
        if mean is not None:
            mean.update_parameters(module)
        done(update)
    return {
        "parameters": [bits(each) for each in module.parameters()],
        "buffers": [bits(each) for each in module.buffers()],
        "optimizer": _state_bits(steps),
        "losses": losses,
        "average": [bits(each) for each in mean.parameters()] if mean is not None else [],
        "scale": scaler.get_scale(),
    }


def _loss(name: str, output: Any, targets: Any) -> Any:
    import torch.nn.functional as functional

    if name == "cross_entropy":
        return functional.cross_entropy(output, targets, ignore_index=-1)
    if name == "sum":
        return functional.cross_entropy(output, targets, ignore_index=-1, reduction="sum") / 20
    if name == "none":
        each = functional.cross_entropy(output, targets, ignore_index=-1, reduction="none")
        return each.sum() / (targets != -1).sum().clamp(min=1)
    return functional.mse_loss(output, functional.one_hot(targets.clamp(min=0), 4).to(output.dtype))


def _state_bits(optimizer: Any) -> list[tuple[str, Any]]:
    import torch

    return [
        (name, bits(value) if isinstance(value, torch.Tensor) else value)
        for state in optimizer.state.values()
        for name, value in sorted(state.items())
        if isinstance(value, (torch.Tensor, int, float))
    ]


def _optimizer(name: str, module: Any) -> Any:
    import torch

    if name == "fused":
        return torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    if name == "SGD":
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def _network(*, dropout: float = 0.0, normalised: bool = False, checkpoint: bool | None = None, unused: bool = False) -> Any:
    """`checkpoint` is the value of `use_reentrant`, None for no checkpoint."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint as again

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(10, 33)
            self.middle = nn.Sequential(nn.Linear(33, 33), nn.GELU(), nn.Dropout(dropout))
            self.norm: nn.Module = nn.BatchNorm1d(33) if normalised else nn.Identity()
            self.side = nn.Linear(33, 33)
            self.last = nn.Linear(33, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.norm(torch.tanh(self.first(inputs)))
            hidden = self.middle(hidden) if checkpoint is None else again(self.middle, hidden, use_reentrant=checkpoint)
            return self.last(hidden if unused else hidden + self.side(hidden))

    return Network()


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def _wrapped(module: Any, wrap: str, options: dict[str, Any]) -> Any:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    if wrap == "ddp":
        return DistributedDataParallel(module, **options)
    if wrap == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        strategy = ShardingStrategy[options.get("strategy", "FULL_SHARD")]
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), sharding_strategy=strategy, use_orig_params=True)
    if wrap == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(module.middle, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    return module


def _synchronised(module: Any, wrap: str, *, on: bool) -> Any:
    if wrap == "fsdp2":
        module.set_requires_gradient_sync(on)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if on or not wrap else module.no_sync()


def _own_hook(module: Any) -> None:
    import torch.distributed as dist

    def halved(state, bucket):  # torch looks at the annotations
        """Sums over the ranks, and halves what comes back."""
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0].mul_(0.5))

    module.register_comm_hook(None, halved)
