"""Actions that wait for a module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from accumlint.runtime.imports import when_imported
from accumlint.runtime.patches import Patches


class _Recorder:
    active = True

    def __init__(self) -> None:
        self.troubles: list[str] = []

    def trouble(self, text: str) -> None:
        self.troubles.append(text)


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "awaited_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("value = 1\n")
    finders = list(sys.meta_path)
    yield _Recorder(), Patches()
    for name in ("awaited_package", "awaited_package.part"):
        sys.modules.pop(name, None)
    sys.meta_path[:] = finders


def test_an_action_runs_after_the_module_has_been_executed(waiting: Any) -> None:
    recorder, patches = waiting
    seen: list[int] = []
    when_imported(recorder, patches, "awaited_package.part", lambda module: seen.append(module.value))
    when_imported(recorder, patches, "awaited_package.part", lambda module: seen.append(10 * module.value))
    import awaited_package  # type: ignore[import-not-found]

    assert seen == []
    import awaited_package.part  # type: ignore[import-not-found]

    assert seen == [1, 10]
    assert "exec_module" not in vars(awaited_package.part.__loader__)
    when_imported(recorder, patches, "awaited_package.part", lambda module: seen.append(module.value + 1))
    assert seen == [1, 10, 2]


def test_what_an_action_raises_does_not_reach_the_import(waiting: Any) -> None:
    recorder, patches = waiting
    when_imported(recorder, patches, "awaited_package.part", lambda module: module.missing)
    import awaited_package.part

    assert awaited_package.part.value == 1
    assert len(recorder.troubles) == 1


def test_nothing_is_left_after_undoing(waiting: Any) -> None:
    recorder, patches = waiting
    before = list(sys.meta_path)
    when_imported(recorder, patches, "awaited_package.part", lambda module: recorder.trouble("late"))
    patches.undo()
    assert sys.meta_path == before
    import awaited_package.part  # noqa: F401

    assert recorder.troubles == []
