"""`accumlint show`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from accumlint.cli import run

Show = Callable[..., tuple[int, str, str]]

LOOP = """\
def train(model, loader, optimizer, accum):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / accum
        loss.backward()
        if (i + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.fixture
def show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs the command in a folder with one script; returns the exit status and what it wrote."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LOOP, encoding="utf-8")

    def shown(target: str = "train.py", *options: str, columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        status = run(["show", target, *options])
        return status, *capsys.readouterr()

    return shown


def test_draws_a_loop_that_is_clean(show: Show) -> None:
    status, text, complaint = show()
    assert (status, complaint) == (0, "")
    rows = {line.split()[0]: line for line in text.split("\n") if line.strip()}
    assert text.startswith("train.py:")
    assert "K is `accum`, rehearsed with 3" in text
    assert rows["micro-batch"].split()[1:5] == ["1", "2", "3", "update"]
    assert rows["step"].count("●") == 1
    assert "weight of a target" in text


def test_draws_one_function(show: Show) -> None:
    assert show("train.py:train")[0] == 0
    status, text, complaint = show("train.py:evaluate")
    assert (status, text) == (2, "")
    assert "train.py: no training loop in `evaluate`; there are some in `train`." in complaint


def test_a_function_that_the_module_calls_is_found_by_its_name(show: Show) -> None:
    called = f"{LOOP}\n\nclass Runner:\n    def fit(self): ...\n\n\ntrain(model, loader, optimizer, 4)\n"
    Path("called.py").write_text(called, encoding="utf-8")
    status, text, _ = show("called.py:train")
    assert status == 0
    assert "step" in text
    assert "there are some in `train`." in show("called.py:fitted")[2]


def test_says_why_no_loop_was_found(show: Show) -> None:
    Path("engine.py").write_text(LOOP.replace("loss.backward()", "accelerator.backward(loss)"), encoding="utf-8")
    status, text, _ = show("engine.py")
    assert status == 0
    first, second = text.splitlines()
    assert first == "no training loop found in engine.py"
    assert second == "  a framework's engine does the backward: accelerator.backward(loss)"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_does_not_wait_for_a_pipe(show: Show) -> None:
    os.mkfifo("pipe.py")
    assert show("pipe.py") == (2, "", "accumlint: error: pipe.py: not a file\n")


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_keeps_the_width(show: Show, columns: int) -> None:
    assert max(len(line) for line in show(columns=columns)[1].split("\n")) <= columns


def test_colour(show: Show) -> None:
    assert "\x1b[" in show("train.py", "--color", "always")[1]
    assert "\x1b[" not in show("train.py", "--color", "never")[1]


def test_a_file_without_loops(show: Show) -> None:
    Path("plain.py").write_text("x = 1\n", encoding="utf-8")
    assert show("plain.py") == (0, "no training loop found in plain.py\n", "")


@pytest.mark.parametrize(("target", "said"), [("gone.py", "gone.py: cannot be read: No such file"), ("broken.py", "broken.py:1:")])
def test_what_cannot_be_read_is_one_line(show: Show, target: str, said: str) -> None:
    Path("broken.py").write_text("def f(:\n", encoding="utf-8")
    status, text, complaint = show(target)
    assert (status, text) == (2, "")
    assert complaint.startswith(f"accumlint: error: {said}")
    assert complaint.count("\n") == 1


def test_says_which_versions_of_frameworks_were_assumed(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    from accumlint.source.rehearsal.machine import Machine

    plain = Machine.after_backward
    monkeypatch.setattr(Machine, "after_backward", lambda self, *given: (self.allowed("accelerate"), plain(self, *given))[1])
    Path("uv.lock").write_text('[[package]]\nname = "accelerate"\nversion = "1.2.0"\n', encoding="utf-8")
    assert "\n  accelerate is 1.2.0, from uv.lock\n" in show()[1]
