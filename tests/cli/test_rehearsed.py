"""What a run takes from the source: the script's own loop, through the files and settings of its project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from accumlint.cli.rehearsed import rehearsed
from accumlint.trace import Kind, Trace

MAIN = """
import torch
from updates import back, update

chunks_per_update = 4
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, batch in enumerate(torch.utils.data.DataLoader(torch.randn(32, 4))):
    loss = model(batch).mean() / chunks_per_update
    back(loss)
    if (number + 1) % chunks_per_update == 0:
        update(optimizer)
"""
UPDATES = """
def back(loss):
    loss.backward()


def update(optimizer):
    optimizer.step()
    optimizer.zero_grad()
"""


def run_of(folder: Path) -> list[dict[str, Any]]:
    """The report of a run that came through a backward in the second file, called by the first."""
    stack = [[str(folder / "updates.py"), 3, "back"], [str(folder / "train.py"), 10, "<module>"]]
    return [{"script": str(folder / "train.py"), "events": [{"kind": "backward", "at": 0}], "stacks": [stack]}]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(MAIN)
    (tmp_path / "updates.py").write_text(UPDATES)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    return tmp_path


def places(traces: list[Trace], kind: Kind) -> set[tuple[str, int]]:
    return {(Path(event.place.path).name, event.place.line) for trace in traces for event in trace.of(kind)}


def test_the_loop_is_followed_into_the_files_that_it_calls(project: Path) -> None:
    traces = rehearsed(run_of(project))
    assert places(traces, Kind.BACKWARD) == {("updates.py", 3)}
    assert places(traces, Kind.STEP) == {("updates.py", 7)}
    assert places(traces, Kind.FORWARD) == {("train.py", 9)}
    assert {trace.accumulation.text for trace in traces if trace.accumulation} == {"chunks_per_update"}


def test_a_file_that_is_gone_gives_nothing(project: Path) -> None:
    reports = run_of(project)
    (project / "train.py").unlink()
    (project / "updates.py").unlink()
    assert rehearsed(reports) == []


def test_settings_that_cannot_be_read_lose_no_run(project: Path) -> None:
    (project / "pyproject.toml").write_text("[tool.accumlint]\nselekt = []\n")
    assert places(rehearsed(run_of(project)), Kind.STEP) == {("updates.py", 7)}
