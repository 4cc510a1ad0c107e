"""Conditions that are the same on all ranks: on settings from a file, on what was reduced, on positions, and on what one rank tells all."""

from __future__ import annotations

import pytest

from tests.source.across.conftest import Lint

LOOP = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from omegaconf import OmegaConf
    from torch.nn.parallel import DistributedDataParallel as DDP

    def settings(path):
        parts = {parts}
        return {merged}

    def main(net, loader, path):
        dist.init_process_group("nccl")
        cfg = settings(path)
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
        for i, (x, y) in enumerate(loader):
            loss = F.cross_entropy(model(x), y) / cfg.accumulation
            {before}
            loss.backward()
            if (i + 1) % cfg.accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
"""
READ = ("OmegaConf.load(path)", "OmegaConf.merge(OmegaConf.load(part) for part in parts.bases)")
CHECKED = """
            checked = loss.detach().clone()
            {reduced}
            if checked.isnan().any():
                continue"""


@pytest.mark.parametrize(
    ("parts", "merged", "before", "found"),
    [
        (*READ, "pass", False),
        (*READ, CHECKED.format(reduced="dist.all_reduce(checked.data)"), False),
        (*READ, CHECKED.format(reduced="checked.data = checked.data / 2"), True),
    ],
)
def test_what_is_the_same_on_all_ranks(lint: Lint, parts: str, merged: str, before: str, found: bool) -> None:
    seen = lint({"main.py": LOOP.format(parts=parts, merged=merged, before=before)})
    assert ("ACC105" in {code for _, code, _ in seen}) is found


MULTIPLIER = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP

    def main(net, loader, limit):
        dist.init_process_group("nccl")
        model = DDP(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dual = torch.nn.Parameter(torch.zeros(()))
        dual_optimizer = torch.optim.SGD([dual], lr=0.1)
        for x, y in loader:
            cost = y.float().mean()
            if dist.get_rank() == 0:
                dual_loss = (limit - cost) * dual.exp()
                dual_optimizer.zero_grad()
                dual_loss.backward()
                dual_optimizer.step()
            {after}
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) * dual.exp().item()).backward()
            optimizer.step()
"""


@pytest.mark.parametrize(("after", "found"), [("dist.broadcast(dual, src=0)", False), ("pass", True)])
def test_what_one_rank_tells_all(lint: Lint, after: str, found: bool) -> None:
    seen = lint({"main.py": MULTIPLIER.format(after=after)})
    assert ("ACC105" in {code for _, code, _ in seen}) is found


SOLVER = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP
    from elsewhere import build

    class Solver:
        def __init__(self, net, config):
            dist.init_process_group("nccl")
            self.model = DDP(net)
            self.{name} = build(config)
            self.seen = 0

        def step(self, x, y):
            for title, part in self.{name}.items():
                if part["first"] > self.seen:
                    continue
                loss = F.cross_entropy(self.model(x), y)
                part["module"].zero_grad()
                loss.backward()
                part["module"].step()
            self.seen += 1
"""


@pytest.mark.parametrize("name", ["optimizers", "optimizer_and_scheduler"])
def test_optimizers_that_are_gone_over_are_no_data(lint: Lint, name: str) -> None:
    assert lint({"main.py": SOLVER.format(name=name)}) == set()


GAN = """
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Model:
        def __init__(self, generator, judge, opt):
            torch.distributed.init_process_group("nccl")
            self.generator, self.judge = DDP(generator), DDP(judge)
            self.optimizer_g = torch.optim.Adam(self.generator.parameters())
            self.optimizer_d = torch.optim.Adam(self.judge.parameters())
            self.start, self.every = opt["start"], opt["every"]

        def optimize_parameters(self, {position}):
            self.optimizer_g.zero_grad()
            made = self.generator(self.given)
            if {position} % self.every == 0 and {position} > self.start:
                loss = torch.nn.functional.l1_loss(made, self.wanted)
                loss.backward()
                self.optimizer_g.step()
            if {position} > self.start:
                self.optimizer_d.zero_grad()
                self.judge(made.detach()).mean().backward()
                self.optimizer_d.step()
"""


@pytest.mark.parametrize("position", ["current_iter", "step"])
def test_a_position_is_no_data(lint: Lint, position: str) -> None:
    assert "ACC105" not in {code for _, code, _ in lint({"main.py": GAN.format(position=position)})}
