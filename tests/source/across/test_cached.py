"""What is kept from run to run rests on all files that a loop was followed into."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accumlint.cli import run

LOOP = """\
import torch.nn.functional as F
from {module} import {name}


def train(model, loader, optimizer, accum):
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / accum).backward()
        {name}(optimizer, i, accum)
"""
RIGHT = """\
def finish(optimizer, i, accum):
    if (i + 1) % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
WRONG = RIGHT.replace("        optimizer.zero_grad", "    optimizer.zero_grad")


def write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")
    os.utime(path, ns=(0, hash(text) % 10**9 + 10**9))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("pyproject.toml", "")
    write("train.py", LOOP.format(module="parts", name="finish"))
    write("parts.py", RIGHT)


def lint(capsys: pytest.CaptureFixture[str]) -> list[str]:
    run(["check", ".", "--output-format", "concise"])
    return [line.split(" ")[0] for line in capsys.readouterr().out.split("\n") if "ACC" in line]


@pytest.mark.usefixtures("project")
def test_a_followed_file_that_changes_is_followed_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(capsys) == lint(capsys) == []
    write("parts.py", WRONG)
    assert lint(capsys) == lint(capsys) == ["parts.py:4:5:"]
    write("parts.py", RIGHT)
    assert lint(capsys) == []


@pytest.mark.usefixtures("project")
def test_a_module_that_takes_the_place_of_another_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint(capsys) == []
    os.mkdir("parts")
    write("parts/__init__.py", WRONG)
    assert lint(capsys) == ["parts/__init__.py:4:5:"]


@pytest.mark.usefixtures("project")
def test_a_file_that_was_no_part_of_a_loop_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    write("parts.py", "def finish(optimizer, i, accum):\n    pass\n")
    write("main.py", "from loop import fit\n\n\ndef train(model, loader, optimizer, accum):\n    fit(model, loader, optimizer, accum)\n")
    write("loop.py", "def fit(model, loader, optimizer, accum):\n    pass\n")
    assert lint(capsys) == []
    write("parts.py", WRONG)
    write("loop.py", LOOP.format(module="parts", name="finish").replace("def train", "def fit"))
    assert lint(capsys) == ["parts.py:4:5:"]


@pytest.mark.usefixtures("project")
def test_a_finding_is_said_once_and_obeys_the_file_that_it_stands_in(capsys: pytest.CaptureFixture[str]) -> None:
    write("parts.py", WRONG)
    write("other.py", LOOP.format(module="parts", name="finish"))
    assert lint(capsys) == ["parts.py:4:5:"]
    write("parts.py", WRONG.replace("zero_grad()", "zero_grad()  # accumlint: ignore[ACC302]"))
    assert lint(capsys) == []
    write("parts.py", WRONG)
    write("pyproject.toml", '[tool.accumlint.per-file-ignores]\n"parts.py" = ["ACC302"]\n')
    assert lint(capsys) == []


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("named", [["train.py"], ["train.py", "other.py"], ["parts.py", "train.py"]])
def test_named_files_report_what_they_lead_to(capsys: pytest.CaptureFixture[str], named: list[str]) -> None:
    write("parts.py", WRONG)
    write("other.py", LOOP.format(module="parts", name="finish"))
    run(["check", *named, "--output-format", "concise"])
    assert capsys.readouterr().out.count("parts.py:4:5:") == 1
