"""The fixture in a project's own tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accumlint.config import read_toml

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest, torch

K = 4

@pytest.fixture
def setup():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def train_step(model, optimizer, counts):
    for count in counts:
        loss = torch.nn.functional.cross_entropy(model(torch.randn(count, 8)), torch.randint(4, (count,)))
        (loss / K).backward()
    optimizer.step()
    optimizer.zero_grad()

def test_right(accumulation_window, setup):
    with accumulation_window(*setup, at_least="warning") as window:
        train_step(*setup, [6] * K)
    window.require("weights", "gradient")

def test_wrong(accumulation_window, setup):
    with accumulation_window(*setup):
        train_step(*setup, [2, 6, 4, 8])

def test_too_few(accumulation_window, setup):
    with accumulation_window(*setup, 2):
        train_step(*setup, [6] * K)

def test_their_own(accumulation_window, setup):
    with accumulation_window(*setup, 2):
        assert 1 == 2, "theirs"
"""


def _pytest(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": "200"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "accumlint.pytest_plugin", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_training.py").write_text(TESTS)
    return _pytest(folder)


def test_a_wrong_step_fails_with_the_report(output: str) -> None:
    assert "3 failed, 1 passed" in output
    lines = [line.strip() for line in output.splitlines()]
    assert any(line.startswith("E") and "ACC201 mean-of-means (error)" in line for line in lines)
    assert any(line.startswith("E") and "--> test_training.py:15:" in line for line in lines)
    assert any("2 updates were expected, and 1 seen" in line for line in lines)
    assert "FAILED test_training.py::test_wrong - accumlint.watching.AccumulationError: VIOLATED: 1 of 1 update" in output


def test_their_own_failure_is_what_is_shown(output: str) -> None:
    assert "FAILED test_training.py::test_their_own - AssertionError: theirs" in output
    assert output.count("AccumulationError: ") == 4  # two failures, each with its line in the summary


def test_the_fixture_has_a_help(tmp_path: Path) -> None:
    assert "Watches a training step, and fails the test with the report" in _pytest(tmp_path, "--fixtures")


def test_pytest_starts_without_torch() -> None:
    script = """
import sys
before = set(sys.modules) | {"pytest"}
import pytest
before |= set(sys.modules)
import accumlint.pytest_plugin
print(sorted(name for name in set(sys.modules) - before if name != "__future__"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['accumlint', 'accumlint.pytest_plugin']\n"


def test_the_entry_point_names_the_plugin() -> None:
    project = read_toml((ROOT / "pyproject.toml").read_bytes(), "pyproject.toml")["project"]
    assert project["entry-points"]["pytest11"] == {"accumlint": "accumlint.pytest_plugin"}
