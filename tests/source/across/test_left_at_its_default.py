"""A parameter that one call leaves at its default and another gives is what its default says in the first."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

TESTS = """
    import torch
    from accelerate import Accelerator

    def made(rank, steps=1):
        return Accelerator(gradient_accumulation_steps=steps)

    def whole(model, loader):
        accelerator = made(0{first})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()

    def in_parts(model, loader, steps):
        accelerator = made(0{second})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [("", ", steps=steps", False), ("", "", True), (", steps=4", ", steps=steps", True)],
)
def test_a_default(lint: Lint, first: str, second: str, found: bool) -> None:
    seen = lint({"main.py": TESTS.format(first=first, second=second)})
    assert ("ACC301" in {code for _, code, _ in seen}) is found
