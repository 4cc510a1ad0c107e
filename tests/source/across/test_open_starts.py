"""Loops whose counters, gates, pieces and engines are open in places: what nobody can know is taken as the code means it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.findings import Severity
from accumlint.linter import lint_file

HEAD = """
import itertools
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
"""

RESUMED = """
def main(loader, args, k):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 1
    if args.resume:
        start = torch.load(args.resume)["updates"] * k + 1
    data = iter(loader)
    for step in {counting}:
        loss = model(next(data)).square().mean() / k
        loss.backward()
        if step % k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

EXECUTOR = """
from somewhere import Base

class Executor(Base):
    def one(self, batch):
        loss = self.model(batch).square().mean() / self.every
        loss.backward()
        if self.every == 1 or self.status["iteration"] % self.every == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, loader):
        for batch in loader:
            self.fire(self.hooks)
            self.one(batch)
"""

REMAINDER = """
from somewhere import Base

class Pieces(Base):
    def run(self, loader):
        for batch in loader:
            for piece in batch.chunk(self.config.micro_acc_steps):
                loss = self.model(piece).square().mean()
                loss.div(self.config.grad_acc_steps * self.config.micro_acc_steps).backward()
            _, left = divmod(self.global_step + 1, self.config.grad_acc_steps)
            if left == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.global_step += 1
"""

TURNS = """
def main(loader, build):
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = [build(one), build(other)]
    for index, batch in enumerate(loader):
        optimizer = optimizers[index % len(optimizers)]
        optimizer.zero_grad()
        loss = other(one(batch)).square().mean()
        loss.backward()
        optimizer.step()
"""

PIECES = """
def main(loader, args):
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = args.global_batch_size // dist.get_world_size()
    for batch in loader:
        optimizer.zero_grad()
        for at in range((size - 1) // args.micro + 1):
            end = min((at + 1) * args.micro, size)
            last = end == size
            with model.no_sync() if args.sharded and not last else torch.enable_grad():
                loss = (model(batch[at * args.micro : end]) - 1).square().mean(1).sum() / size
                loss.backward()
        optimizer.step()
"""

SCALED = """
from torch.amp.grad_scaler import OptState

def unscale(scaler, optimizer):
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is not OptState.UNSCALED:
        scaler.unscale_(optimizer)

def main(loader, model, clip):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.cuda.amp.GradScaler()
    for batch in loader:
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if clip.norm:
            scaler.unscale_(optimizer)
        if clip.value:
            unscale(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
"""

LEFT_OVER = """
def main(loader, model, args, scaler):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(loader):
        if args.half:
            with torch.autocast("cuda"):
                outputs = model(batch)
        else:
            outputs = model(batch)
            loss = outputs.square().mean()
        if args.k > 1:
            loss = loss / args.k
        if args.half:
            scaler.scale(loss).backward()
        else:
            loss.backward()
        if (step + 1) % args.k == 0:
            if args.half:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
"""


def found(folder: Path, text: str, name: str = "train.py") -> list[str]:
    path = folder / name
    path.write_text(HEAD + text, encoding="utf-8")
    return sorted({finding.code for finding in lint_file(str(path)) if finding.severity is Severity.ERROR})


EPOCHS = """
def main(loader, args, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = torch.load(args.resume)
    last = -1
    for epoch in range(done["epoch"] + 1, args.epochs):
        for i, x in enumerate(loader):
            step = i + len(loader) * epoch
            loss = model(x).square().mean() / args.k
            loss.backward()
            if step - last >= args.k:
                optimizer.step()
                optimizer.zero_grad()
                last = step
"""


def test_a_resumed_run_begins_where_a_fresh_one_does(tmp_path: Path) -> None:
    assert found(tmp_path, EPOCHS) == []


@pytest.mark.parametrize(
    ("counting", "expected"),
    [
        ("range(start, args.total + 1)", []),
        ("itertools.count(start)", []),
        ("range(args.total)", ["ACC306"]),
        ("range(torch.load(args.resume)['updates'] * k, args.total)", ["ACC306"]),
    ],
)
def test_a_resumed_run_counts_from_where_a_fresh_one_does(tmp_path: Path, counting: str, expected: list[str]) -> None:
    assert found(tmp_path, RESUMED.format(counting=counting)) == expected


@pytest.mark.parametrize(
    "text",
    [EXECUTOR, REMAINDER, TURNS, PIECES, SCALED, LEFT_OVER],
    ids=["gate", "remainder", "turns", "pieces", "scaler", "left over"],
)
def test_what_cannot_be_known_is_no_mistake(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []


def test_the_last_piece_that_does_not_synchronise_is_found(tmp_path: Path) -> None:
    assert "ACC102" in found(tmp_path, PIECES.replace("and not last", "and last"))


ENGINE = """
from accelerate import Accelerator

{extra}
shared = None

def get_accelerator():
    global shared
    if shared is None:
        shared = Accelerator()
    return shared
"""
BASE = """
from torch import nn
import torch
from tools import get_accelerator

class Base:
    def __init__(self, config):
        self.accelerator = get_accelerator()
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
{settings}

    def run(self, loader):
        for batch in loader:
            with self.accelerator.accumulate(self.model):
                self.one(batch)
"""
OWN = """
from base import Base

class Own(Base):
    def one(self, batch):
        self.optimizer.zero_grad()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


def test_an_engine_of_another_file_whose_k_is_one(tmp_path: Path) -> None:
    """Its making lies two files away, and behind a constructor of many settings."""
    (tmp_path / "tools.py").write_text(
        ENGINE.format(extra="NAMES = " + repr([f"name_{number}" for number in range(600)])), encoding="utf-8"
    )
    settings = "\n".join(f"        self.setting_{number} = config[{number}]" for number in range(60))
    (tmp_path / "base.py").write_text(BASE.format(settings=settings), encoding="utf-8")
    assert found(tmp_path, OWN, "own.py") == []


HANDED_OVER = """
class Trainer:
    def one(self, batch):
        loss = self.model(batch).square().mean()
        self.accelerator.backward(loss)
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, batches):
        while self.going():
            with self.accelerator.accumulate(self.model):
                self.forward_and_back(batches)
"""


def test_an_engine_that_is_handed_over_into_its_window(tmp_path: Path) -> None:
    assert found(tmp_path, "from accelerate import Accelerator\n" + HANDED_OVER) == []


WAYS_OF_CALLING = """
def collate(batch):
    return nn.utils.rnn.pad_sequence(batch), nn.utils.rnn.pad_sequence(batch, padding_value=-100)

def main(loader, args, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, labels) in enumerate(loader):
        loss = model.forward(x, labels=labels).loss.mean() / args.k
        loss.backward()
        if (step + 1) % args.k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

OWN_FORWARD = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)

def main(loader, args):
    net = Net()
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        loss = {model}.forward(x).square().mean() / args.k
        loss.backward()
        if (step + 1) % args.k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_a_forward_that_is_called_by_its_name(tmp_path: Path) -> None:
    assert found(tmp_path, WAYS_OF_CALLING) == ["ACC201"]


@pytest.mark.parametrize(("model", "expected"), [("model", []), ("net", ["ACC108"]), ("model.module", ["ACC108"])])
def test_a_forward_by_its_name_goes_round_a_wrapper_or_not(tmp_path: Path, model: str, expected: list[str]) -> None:
    assert found(tmp_path, OWN_FORWARD.replace("{model}", model)) == expected


HELPER = """
class Trainer:
    def __init__(self, net, args):
        self.model = DDP(net)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.args = args

    def forward(self, model, batch):
        return model(batch).square().mean()

    def train(self, loader):
        for step, batch in enumerate(loader):
            loss = self.forward(self.model, batch) / self.args.k
            loss.backward()
            if (step + 1) % self.args.k == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
"""


def test_a_helper_that_is_called_forward_is_none(tmp_path: Path) -> None:
    assert found(tmp_path, HELPER) == []


CONSTANTS = """
devices = 1
batch_size = 64 / devices
micro_batch_size = 4
accumulation_iters = batch_size // micro_batch_size

def main(loader, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(loader):
        loss = model(x).square().mean() / accumulation_iters
        loss.backward()
        if step % accumulation_iters == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_k_is_a_quotient_of_constants(tmp_path: Path) -> None:
    assert found(tmp_path, CONSTANTS) == ["ACC306"]


AVERAGED = """
from accelerate import Accelerator

def main(loader, model, ema, args):
    accelerator = Accelerator(gradient_accumulation_steps=args.k)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        {update}
"""


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        ("accelerator.unwrap_model(ema).update()", {"ACC311"}),
        ("accelerator.unwrap_model(model).update()", set()),
        ("if accelerator.sync_gradients: accelerator.unwrap_model(ema).update()", set()),
    ],
)
def test_an_average_that_is_unwrapped_first(tmp_path: Path, update: str, expected: set[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + AVERAGED.replace("{update}", update), encoding="utf-8")
    assert {finding.code for finding in lint_file(str(path))} - {"ACC103"} == expected


ROWS = """
def main(loader, args, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss(reduction="none")
    for step, (x, y, mask) in enumerate(loader):
        logits = model(x)
        losses = criterion(logits.view(-1, logits.size(-1)), y.view(-1)).view(logits.size(0), logits.size(1)) * mask
        loss = {mean}
        loss.backward()
        if (step + 1) % args.k == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("mean", "expected"),
    [
        ("(torch.sum(losses, axis=1) / torch.sum(mask, axis=1)).mean()", {"ACC202"}),
        ("(losses.sum(1) / mask.sum(1)).mean() / args.k", set()),
        ("losses.sum() / mask.sum() / args.k", set()),
        ("losses.sum() / mask.sum()", {"ACC202"}),
    ],
)
def test_the_mean_of_each_sequence_counts_one(tmp_path: Path, mean: str, expected: set[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + ROWS.replace("{mean}", mean), encoding="utf-8")
    assert {finding.code for finding in lint_file(str(path))} & {"ACC201", "ACC202", "ACC206"} == expected
