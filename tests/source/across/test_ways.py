"""Which way through the code a training takes: not the one that raises, nor one that only shares a name with it."""

from __future__ import annotations

from pathlib import Path

from accumlint.source.reading.parse import Source, parse
from accumlint.source.rehearsal.rehearse import rehearsals
from accumlint.trace import Kind
from tests.source.across.conftest import Lint

LOOP = """\
import torch
import torch.nn.functional as F
{before}

def train(config, net, loader, collection=None):
{setup}
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / config.accum).backward()
        if (i + 1) % config.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
FOUND = {("main.py", "ACC103", "(F.cross_entropy(model(x), y) / config.accum).backward()")}


def test_what_a_caller_must_give_is_given(lint: Lint) -> None:
    setup = "    if collection is None:\n        raise ValueError(collection)"
    assert lint({"main.py": LOOP.format(before="", setup=setup)}) == FOUND


def test_a_side_whose_helper_refuses_k_is_not_taken(lint: Lint) -> None:
    before = "\nclass Packed:\n    def __init__(self, config):\n        self.accum = config.accum\n        assert self.accum == 1\n"
    setup = "    if config.packed:\n        loader = Packed(config)\n    else:\n        loader = iter(loader)"
    assert lint({"main.py": LOOP.format(before=before, setup=setup)}) == FOUND


TRAINER = """\
from torch.nn import Module


class Trainer(Module):
    def train_step(self):
        self.model.train()
        for _ in range(self.grad_accum_every):
            loss = self.model(next(self.data))
            (loss / self.grad_accum_every).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self):
        while self.steps < self.most:
            self.train_step()
"""


def test_a_mode_is_no_method_of_whoever_holds_the_model(tmp_path: Path) -> None:
    source = parse(TRAINER.encode(), str(tmp_path / "main.py"))
    assert isinstance(source, Source)
    assert [rehearsal.function for rehearsal in rehearsals(source) if rehearsal.traces(2)] == ["train"]


SUMMED = """\
import torch


def train(net, loader, accum):
    model = torch.nn.parallel.DistributedDataParallel(net, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        loss, {second} = model(x, y)
        loss.backward()
        if (i + 1) % accum == 0:
            for p in model.parameters():
                p.grad.mul_(torch.distributed.get_world_size())
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_model_that_tells_how_many_targets_there_were_may_give_their_sum(lint: Lint) -> None:
    assert {each[1] for each in lint({"main.py": SUMMED.format(second="logits")})} == {"ACC202", "ACC212"}
    assert lint({"main.py": SUMMED.format(second="target_count")}) == set()


CHOICE = """\
import torch
import torch.nn.functional as F


def quick(model, loader, optimizer):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def evaluate(model, loader, optimizer):
    for x, y in loader:
        print(model(x).argmax())


def thorough(model, loader, optimizer):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def main(args, model, loader, optimizer):
    if args.mode == "quick":
        loop = quick
    elif args.mode == "evaluate":
        loop = evaluate
    else:
        loop = thorough
    for epoch in range(args.epochs):
        loop(model, loader, optimizer)


if __name__ == "__main__":
    main(args, model, loader, optimizer)
"""


def test_every_choice_of_a_loop_has_its_line(tmp_path: Path) -> None:
    source = parse(CHOICE.encode(), str(tmp_path / "main.py"))
    assert isinstance(source, Source)
    module = next(iter(rehearsals(source)))
    assert module.function == "<module>"
    lines = {event.place.line for trace in module.traces(2) for event in trace.of(Kind.STEP)}
    assert lines == {line for line, text in enumerate(CHOICE.split("\n"), 1) if "optimizer.step()" in text}


TRIAL = """\
import torch
import torch.nn.functional as F


def train(net, loader, longest, accum):
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(9):
        F.cross_entropy(model(longest), longest).backward()
        model.zero_grad()
        for i, (x, y) in enumerate(loader):
            with model.no_sync() if (i + 1) % accum else nullcontext():
                (F.cross_entropy(model(x), y) / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
"""


def test_gradients_of_a_trial_run_are_thrown_away(lint: Lint) -> None:
    assert "ACC103" not in {each[1] for each in lint({"main.py": TRIAL})}
    kept = TRIAL.replace("        model.zero_grad()\n", "")
    assert "ACC103" in {each[1] for each in lint({"main.py": kept})}


DEFAULTS = """\
from yacs.config import CfgNode as CN

_C = CN()
_C.SOLVER = CN()
_C.SOLVER.ACCUMULATE_STEPS = 1
_C.SOLVER.ACCUMULATE_GRAD = False
"""
CONFIGURED = """\
import torch
import torch.nn.functional as F
from defaults import _C as cfg


def train(net, loader):
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if not cfg.SOLVER.ACCUMULATE_GRAD:
            optimizer.step()
            optimizer.zero_grad()
        elif (i + 1) % cfg.SOLVER.ACCUMULATE_STEPS == 0:
            for p in model.parameters():
                p.grad.div_(cfg.SOLVER.ACCUMULATE_STEPS)
            optimizer.step()
            optimizer.zero_grad()
"""


def test_what_a_table_of_settings_says_is_only_the_default(lint: Lint) -> None:
    found = lint({"main.py": CONFIGURED, "defaults.py": DEFAULTS})
    assert found == {("main.py", "ACC103", "F.cross_entropy(model(x), y).backward()")}


MARKED = """\
import numpy as np
import torch
import torch.nn.functional as F


def train(net, loader, accum, marks):
    model = torch.nn.parallel.DistributedDataParallel(net, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = set((np.linspace(0, 1, marks) * len(loader)).astype(int) * accum)
    for i, (x, y) in enumerate(loader):
        if i in probes:
            F.cross_entropy(model(x), y).backward()
            model.zero_grad()
        (F.cross_entropy(model(x), y) / accum).backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_set_of_numbers_of_steps_is_the_same_on_every_rank(lint: Lint) -> None:
    assert "ACC105" not in {each[1] for each in lint({"main.py": MARKED})}
    split = MARKED.replace("probes = set((np.linspace(0, 1, marks) * len(loader)).astype(int) * accum)", "probes = 0")
    assert "ACC105" in {each[1] for each in lint({"main.py": split.replace("if i in probes:", "if x.sum() > probes:")})}
