"""A file that does part of what a loop of another file makes whole is looked at as its callers run it, however the files are named."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from accumlint.cli import run

FILES = {
    "stepping.py": """\
import torch


class Stepping:
    def __init__(self, model, optimizer, scheduler, accumulate):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.accumulate, self.micro = accumulate, 0

    def learn(self, x, y):
        (torch.nn.functional.mse_loss(self.model(x), y) / self.accumulate).backward()
        self.micro += 1

    def advance(self):
        self.scheduler.step()
        if self.micro % self.accumulate == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
""",
    "passes.py": """\
def run_pass(stepping, loader):
    for x, y in loader:
        stepping.learn(x, y)
        stepping.advance()
""",
    "train.py": """\
import torch
from passes import run_pass
from stepping import Stepping

model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
data = torch.utils.data.TensorDataset(torch.randn(60, 5), torch.randn(60, 1))
run_pass(Stepping(model, optimizer, scheduler, 3), torch.utils.data.DataLoader(data, batch_size=5))
""",
}
NAMED = [names for size in (1, 2, 3) for names in itertools.permutations(FILES, size) if names != ("passes.py",)]


def found(capsys: pytest.CaptureFixture[str], *names: str) -> list[tuple[str, str, int]]:
    run(["--isolated", "--no-cache", "--output-format", "json", *names])
    listed = json.loads(capsys.readouterr().out)
    return [(Path(each["filename"]).name, each["code"], each["location"]["row"]) for each in listed]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text("")
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("names", [*NAMED, (".",)], ids="+".join)
def test_the_same_is_found(capsys: pytest.CaptureFixture[str], names: tuple[str, ...]) -> None:
    assert found(capsys, *names) == [("stepping.py", "ACC305", 14)]


def test_without_a_caller_nothing_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").unlink()
    assert found(capsys, "stepping.py", "passes.py") == []
