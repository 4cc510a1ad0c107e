"""`accumlint show`."""

from __future__ import annotations

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
