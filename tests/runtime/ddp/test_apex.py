"""apex's wrapper, by a stand-in with the same methods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ddp.observing import observed
from tests.runtime.ddp.ranks import run

WORLD = 2
STAND_IN = """
import torch
import torch.distributed as dist


class DistributedDataParallel(torch.nn.Module):
    def __init__(self, module, gradient_average=True):
        super().__init__()
        self.module, self.gradient_average, self._disable_allreduce = module, gradient_average, False
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter):
        if not self._disable_allreduce:
            flat = self.allreduce_bucket([parameter.grad], 0, False)
            parameter.grad.copy_(flat.view_as(parameter.grad))

    def allreduce_bucket(self, bucket, bucket_idx, force_default_stream):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat)
        return flat.div_(dist.get_world_size()) if self.gradient_average else flat

    def disable_allreduce(self):
        self._disable_allreduce = True

    def enable_allreduce(self):
        self._disable_allreduce = False

    def forward(self, *inputs):
        return self.module(*inputs)
"""


def _train(folder: str, *, average: bool) -> dict[str, Any]:
    import importlib

    import torch

    sys.path.insert(0, folder)
    with observed() as recorder:
        wrapper: Any = importlib.import_module("apex.parallel.distributed").DistributedDataParallel
        torch.manual_seed(0)
        model = wrapper(torch.nn.Linear(5, 3), gradient_average=average)
        for micro in range(3):
            if micro < 2:
                model.disable_allreduce()
            else:
                model.enable_allreduce()
            model(torch.full((2, 5), 1.0 + torch.distributed.get_rank())).sum().backward()
        recorder.settle()
        options = next(entry.options for entry in recorder.objects.entries if entry.wrapper == "apex DDP")
        return {"rows": recorder.events(), "options": options, "troubles": recorder.troubles}


@pytest.mark.parametrize(("average", "factor"), [(True, 0.5), (False, 1.0)])
def test_apex(tmp_path: Path, average: bool, factor: float) -> None:
    package = tmp_path / "apex" / "parallel"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "distributed.py").write_text(STAND_IN)
    reports = run(lambda: _train(str(tmp_path), average=average), WORLD)
    found = []
    for report in reports:
        assert report["troubles"] == []
        assert report["options"] == ([] if average else ["no-averaging"])
        backwards = [row for row in report["rows"] if row["kind"] == "backward"]
        assert [row["sync"] for row in backwards] == [False, False, True]
        assert [row["kind"] for row in report["rows"] if row["kind"].startswith("sync")] == ["sync-off", "sync-off", "sync-on"]
        found.append([row for row in report["rows"] if row["kind"] == "reduce"])
        assert [(row["numbers"]["backward"], row["options"]) for row in found[-1]] == [(backwards[2]["index"], [])] * 2
    for one, other in zip(*found, strict=True):
        sums = [a + b for a, b in zip(one["numbers"]["before"], other["numbers"]["before"], strict=True)]
        assert one["numbers"]["after"] == pytest.approx([factor * value for value in sums])
