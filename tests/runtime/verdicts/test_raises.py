"""A rank that raises by itself has done less than the others; that is the script's failure and no divergence."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.cli.rehearsed import rehearsed
from accumlint.rule import catalogue
from accumlint.runtime.measure import Question, measurement
from accumlint.verdict import Status, judged
from tests.runtime.runs import measure

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for i in range(8):
    {what}
    (nn.functional.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 1)) / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
RAISES = 'if rank == 1 and i == 3: raise ValueError("a bad sample")'
LEAVES = "if rank == 1 and i == 3: break"


@pytest.mark.parametrize(("what", "codes", "status"), [(RAISES, set(), Status.FAILED), (LEAVES, {"ACC105"}, Status.VIOLATED)])
def test_a_rank_that_raises_does_not_diverge(what: str, codes: set[str], status: Status, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(what=what), encoding="utf-8")
    reports = measure(script, 2)
    assert "error" in {report["ended"] for report in reports}
    shown = measurement(reports, Question(3, tuple(catalogue().values())), rehearsed=rehearsed(reports), failed=1)
    assert {finding.code for finding in shown.findings} - {"ACC103"} == codes
    assert judged(shown).status is status
