"""A step that evaluates a closure comes after what the closure does, and trains the same bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.ddp.observing import bits, observed

UPDATES = 2


def _train(optimizer: str, options: dict[str, Any], *, positional: bool = True, micro_batches: int = 1) -> tuple[list[bytes], int]:
    """The parameters after the updates, and how often the closure was evaluated. All micro-batches but the last come before it."""
    import torch

    torch.manual_seed(3)
    model = torch.nn.Linear(4, 2)
    steps = getattr(torch.optim, optimizer)(model.parameters(), **options)
    evaluations = 0

    def evaluate() -> Any:
        nonlocal evaluations
        evaluations += 1
        if micro_batches == 1:
            steps.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets) / micro_batches
        loss.backward()
        return loss

    for _ in range(UPDATES):
        for _ in range(micro_batches - 1):
            (torch.nn.functional.mse_loss(model(torch.randn(3, 4)), torch.randn(3, 2)) / micro_batches).backward()
        inputs, targets = torch.randn(3, 4), torch.randn(3, 2)
        steps.step(evaluate) if positional else steps.step(closure=evaluate)
        if micro_batches > 1:
            steps.zero_grad()
    return [bits(each) for each in model.parameters()], evaluations


def _kinds(recorder: Any) -> list[str]:
    assert recorder.troubles == []
    return [row.kind for row in recorder.rows if row.kind in {"backward", "step", "zero"}]


@pytest.mark.parametrize("positional", [True, False])
def test_the_backward_of_a_closure_belongs_to_its_step(positional: bool) -> None:
    plain = _train("AdamW", {}, positional=positional, micro_batches=3)
    with observed() as recorder:
        assert _train("AdamW", {}, positional=positional, micro_batches=3) == plain
        assert recorder.updates == UPDATES
        assert _kinds(recorder) == ["backward", "backward", "backward", "step", "zero"] * UPDATES


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_every_evaluation_of_l_bfgs_has_its_update(search: str | None) -> None:
    options = {"lr": 0.1, "max_iter": 4, "line_search_fn": search}
    plain = _train("LBFGS", options)
    with observed() as recorder:
        found = _train("LBFGS", options)
        assert found == plain
        assert found[1] > UPDATES
        assert _kinds(recorder) == ["zero", "backward", "step"] * found[1]


def test_a_closure_that_raises_or_is_not_called_leaves_no_step_open() -> None:
    import torch

    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step()

    model = torch.nn.Linear(2, 1)
    steps = Deaf(model.parameters(), lr=0.1)

    def broken() -> Any:
        raise ValueError("of the closure")

    with observed() as recorder:
        model(torch.ones(1, 2)).sum().backward()
        steps.step(broken)
        with pytest.raises(ValueError, match="of the closure"):
            torch.optim.SGD(model.parameters(), lr=0.1).step(broken)
        steps.step()
        assert "backward" in _kinds(recorder)
        assert recorder.troubles == []
