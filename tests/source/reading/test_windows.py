"""Lists of micro-batches, told by the loops that go backward over their items."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.index import Index
from accumlint.source.reading.windows import is_window

SOURCE = """
def fit(model, windows, optimizer):
    for window in windows:
        for k, batch in enumerate({over}):
            model(batch).backward()
            {inside}
        optimizer.step()
        print(len(window))

def other(window):
    return len(window)
"""


@pytest.mark.parametrize(
    ("over", "inside", "found"),
    [
        ("window", "pass", [True, False]),
        ("tqdm(window)", "pass", [True, False]),
        ("reversed(window)", "pass", [True, False]),
        ("window.batches", "pass", [False, False]),
        ("window", "optimizer.step()", [False, False]),
    ],
)
def test_windows_by_name(over: str, inside: str, found: list[bool]) -> None:
    index = Index(ast.parse(SOURCE.format(over=over, inside=inside)))
    lengths = [part for part in ast.walk(index.tree) if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "len"]
    assert [is_window(index, each.args[0]) for each in sorted(lengths, key=lambda each: each.lineno)] == found
