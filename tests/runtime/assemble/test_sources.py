"""The gate of a step is read from the source around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from accumlint.runtime.assemble.sources import gate_of, text_of

SCRIPT = """\
for i, batch in enumerate(loader):
    if use_amp:
        scaler.scale(loss).backward()
    else:
        loss.backward()
    if (i + 1) % K == 0:
        if use_amp:
            scaler.step(optimizer)
        else:
            optimizer.step()
"""
LEAVING = """\
for i, batch in enumerate(loader):
    loss.backward()
    if (i + 1) % K:
        continue
    optimizer.step()
"""
UNGATED = """\
if training:
    for batch in loader:
        loss.backward()
        optimizer.step()
"""


def site(path: Path, line: int) -> tuple[object, ...]:
    return (str(path), line, 1, 0, 0, "<module>")


@pytest.mark.parametrize(
    ("source", "step", "backward", "test"),
    [(SCRIPT, 10, 5, "(i + 1) % K == 0"), (SCRIPT, 8, 3, "(i + 1) % K == 0"), (LEAVING, 5, 2, "(i + 1) % K"), (UNGATED, 4, 3, None)],
)
def test_gate(tmp_path: Path, source: str, step: int, backward: int, test: str | None) -> None:
    path = tmp_path / f"train{step}{len(source)}.py"
    path.write_text(source)
    found = gate_of([site(path, step)], [[site(path, backward)]])
    assert (found.text if found else None) == test


def test_text_is_cut_at_bytes(tmp_path: Path) -> None:
    path = tmp_path / "umlaut.py"
    path.write_text('größe = "ü"; loss.backward()\n', encoding="utf-8")
    start = 'größe = "ü"; '.encode().__len__() + 1
    assert text_of((str(path), 1, start, 1, start + len("loss.backward()"), "<module>")) == "loss.backward()"
