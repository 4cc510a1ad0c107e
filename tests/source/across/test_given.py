"""What a function that nobody in the file calls is given: a word that it asks for is the same on every rank."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

LOSS = """\
import torch
import torch.distributed as dist


class Loss:
    def __init__(self, generator, critic):
        self.generator, self.critic = generator, critic

    def accumulate_gradients(self, PARAMETER, real, noise, optimizer, scale):
        assert dist.get_world_size() > 1
        of_generator = TEST
        if of_generator:
            (-self.critic(self.generator(noise)).mean() * scale).backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("parameter", "test", "codes"),
    [
        ("phase", 'phase in ["G", "both"]', set()),
        ("phase", 'phase == "G"', set()),
        ("phase", "phase[0] > real.mean()", {"ACC105"}),
    ],
)
def test_a_word_is_no_data(lint: Lint, parameter: str, test: str, codes: set[str]) -> None:
    found = lint({"loss.py": LOSS.replace("PARAMETER", parameter).replace("TEST", test)}, "loss.py")
    assert {code for _, code, _ in found} & {"ACC105"} == codes
