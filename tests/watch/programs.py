"""Small training steps on a model and an optimizer that were made before."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.runtime.ddp.observing import bits

K = 3


def network(*, dropout: float = 0.0, checkpoint: bool | None = None) -> Any:
    """A classifier of 10 inputs and 4 classes; `checkpoint` is None, or whether it is reentrant."""
    import torch
    from torch.utils.checkpoint import checkpoint as checkpointed

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.GELU(), torch.nn.Dropout(dropout))
            self.head = torch.nn.Linear(16, 4)

        def forward(self, inputs: Any) -> Any:
            if checkpoint is None:
                return self.head(self.inner(inputs))
            return self.head(checkpointed(self.inner, inputs.requires_grad_(), use_reentrant=checkpoint))

    torch.manual_seed(7)
    return Network()


def train(
    watching: Callable[[Any, Any, int], contextlib.AbstractContextManager[Any]],
    *,
    make: Callable[[Any], Any] = lambda model: model,
    optimizer: str = "AdamW",
    amp: str = "",
    clip: bool = False,
    updates: int = 4,
    rank: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Trains; the first update is made before anything is watched, each of the next two under `watching(model, optimizer, update)`."""
    import torch

    model = make(network(**options))
    kinds = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01}}
    steps = getattr(torch.optim, optimizer)(model.parameters(), **kinds[optimizer])
    schedule = torch.optim.lr_scheduler.StepLR(steps, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp == "float16")
    generator = torch.Generator().manual_seed(rank)
    losses = []

    def update() -> None:
        for micro in range(K):
            inputs, targets = torch.randn(6, 10, generator=generator), torch.randint(4, (6,), generator=generator)
            with synchronised(model, on=micro == K - 1):
                with torch.autocast("cpu", getattr(torch, amp)) if amp else contextlib.nullcontext():
                    loss = torch.nn.functional.cross_entropy(model(inputs), targets) / K
                scaler.scale(loss).backward()
            losses.append(bits(loss))
        if clip:
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
        schedule.step()

    for number in range(updates):
        with watching(model, steps, number) if number in (1, 2) else contextlib.nullcontext():
            update()
    state = [value for held in steps.state.values() for value in held.values()]
    return {
        "losses": losses,
        "parameters": [bits(each) for each in model.parameters()],
        "state": [bits(each) if hasattr(each, "detach") else each for each in state],
        "random": bytes(torch.get_rng_state().tolist()),
    }


@contextlib.contextmanager
def synchronised(model: Any, *, on: bool) -> Iterator[None]:
    """The reduction of the ranks' gradients in this micro-batch, or none."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
        yield
    elif on or not hasattr(model, "no_sync"):
        yield
    else:
        with model.no_sync():
            yield


def nothing(model: Any, optimizer: Any, update: int) -> contextlib.AbstractContextManager[Any]:
    """Watches nothing."""
    return contextlib.nullcontext()
