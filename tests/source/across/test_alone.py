"""Ranks of which only a followed library knows: the script that uses it starts none."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

PROFILE = """
    {imports}
    import torch
    from lib.model import Speech

    def profile(sizes):
        {setup}
        model = Speech()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for size in sizes:
            try:
                optimizer.zero_grad()
                model(torch.zeros(size, 4)).mean().backward()
                optimizer.step()
            except torch.cuda.OutOfMemoryError:
                print("too large", size)
"""
MODEL = """
    import torch
    import torch.distributed as dist
    from torch import nn

    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 1)

        def forward(self, x):
            return self.body(x)

        def metric(self, value):
            if dist.is_initialized() and dist.get_rank() == 0:
                print(value)
            dist.all_reduce(value)
            return value
"""
LAUNCH = """
    import torch.distributed as dist

    def launch():
        dist.init_process_group("nccl")
"""


@pytest.mark.parametrize(
    ("imports", "setup", "divergent"),
    [
        ("import os", "pass", False),
        ("import torch.distributed as dist", "rank = dist.get_rank()", True),
        ("from lib.launch import launch", "launch()", True),
    ],
)
def test_ranks_of_a_followed_library_are_not_those_of_the_script(lint: Lint, imports: str, setup: str, divergent: bool) -> None:
    files = {"main.py": PROFILE.format(imports=imports, setup=setup), "lib/__init__.py": "", "lib/model.py": MODEL, "lib/launch.py": LAUNCH}
    assert {code for _, code, _ in lint(files)} == ({"ACC105"} if divergent else set())
