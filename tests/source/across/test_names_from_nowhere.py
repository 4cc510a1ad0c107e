"""Names that came with a star from a module that is not there: a loss is taken by its name and its keywords."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

MAIN = """
    from {module} import *

    accumulate = 4

    def train(model, loader, optimizer):
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < accumulate:
                continue
            targets = sum((y != -100).sum() for _, y in window).clamp(min=1)
            for x, y in window:
                loss = {loss}
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            window = []
"""


@pytest.mark.parametrize(
    ("loss", "codes"),
    [
        ('F.cross_entropy(model(x), y, reduction="sum") / targets', set()),
        ('nn.functional.cross_entropy(model(x), y, reduction="sum") / targets', set()),
        ('token_loss(model(x), y, reduction="sum") / targets', set()),
        ("F.cross_entropy(model(x), y) / targets", {"ACC206"}),
    ],
)
def test_the_reduction_is_read(lint: Lint, loss: str, codes: set[str]) -> None:
    assert {code for _, code, _ in lint({"main.py": MAIN.format(module="common", loss=loss)})} == codes
