"""Fixtures that several tests share."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import planted

Write = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def patience() -> Iterator[None]:
    """Ends a test that hangs; how long it takes is not asserted."""

    def hangs(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def write(project: Path) -> Write:
    """Writes a file of the project, with the folders above it."""

    def written(name: str, text: str | bytes = planted.LOOP.format(end="")) -> Path:
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return written


@pytest.fixture
def plant(write: Write, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a training loop with a planted mistake: `plant("train.py", "ACC202")`."""
    monkeypatch.setattr("accumlint.linter._look", planted.look)

    def written(name: str, code: str = "", extra: str = "") -> Path:
        end = f"  # plant: {code}{extra}" if code else extra
        return write(name, planted.LOOP.format(end=end))

    return written
