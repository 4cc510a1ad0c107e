"""How sure it is that a model under Fabric is wrapped: by what the constructor says."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.config import Settings
from accumlint.findings import Severity
from accumlint.linter import lint_data

SCRIPT = """
import sys
import lightning as L
import torch

fabric = L.Fabric({arguments})
fabric.launch()
model = torch.nn.Linear(8, 4)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader([]))
accumulate = 4
for i, (x, y) in enumerate(loader):
    fabric.backward(torch.nn.functional.cross_entropy(model(x), y) / accumulate)
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("arguments", "severities"),
    [
        ('devices=4, strategy="ddp"', [Severity.WARNING]),
        ('strategy="ddp"', [Severity.INFO]),
        ("devices=int(sys.argv[1])", [Severity.INFO]),
        ("devices=1", []),
    ],
)
def test_what_stands_in_the_source_is_surer_than_what_a_run_decides(tmp_path: Path, arguments: str, severities: list[Severity]) -> None:
    examined, _ = lint_data(str(tmp_path / "train.py"), SCRIPT.format(arguments=arguments).encode(), Settings())
    assert [each.severity for each in examined.findings if each.code == "ACC103"] == severities
