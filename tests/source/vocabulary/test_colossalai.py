"""A booster divides by nothing, and its `no_sync` is read when its plugin's wrapper reads it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest

from accumlint.linter import lint_file

PROGRAM = """
import torch
import torch.nn.functional as F
from contextlib import nullcontext
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin


def main(args, loader):
    net = torch.nn.Linear(8, 2)
    booster = Booster(plugin={plugin}())
    model, optimizer, _, loader, _ = booster.boost(net, torch.optim.Adam(net.parameters()), dataloader=loader)
    assert len(loader) % args.accum == 0
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % args.accum == 0
{body}
        if last:
            optimizer.step()
            optimizer.zero_grad()
"""
BACKWARD_ONLY = """
loss = F.cross_entropy(model(x), y) / args.accum
with nullcontext() if last else booster.no_sync(model, optimizer):
    booster.backward(loss, optimizer)
"""
BOTH = """
with nullcontext() if last else booster.no_sync(model, optimizer):
    loss = F.cross_entropy(model(x), y) / args.accum
    booster.backward(loss, optimizer)
"""


def codes(tmp_path: Path, body: str, plugin: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(plugin=plugin, body=indent(dedent(body), " " * 8)))
    return sorted({finding.code for finding in lint_file(str(script))})


@pytest.mark.parametrize(
    ("plugin", "body", "expected"),
    [
        ("LowLevelZeroPlugin", BACKWARD_ONLY, []),
        ("TorchDDPPlugin", BACKWARD_ONLY, ["ACC101"]),
        ("TorchDDPPlugin", BOTH, []),
        ("LowLevelZeroPlugin", BOTH.replace(" / args.accum", ""), ["ACC202"]),
    ],
)
def test_booster(tmp_path: Path, plugin: str, body: str, expected: list[str]) -> None:
    assert codes(tmp_path, body, plugin) == expected
