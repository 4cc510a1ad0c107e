"""Lists of micro-batches, told by the loops that go backward over their items."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.index import Index
from accumlint.source.reading.windows import is_window, literal_window

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


LITERAL = """
def fit(model, loader, optimizer, log):
    for i, batch in enumerate(loader):
        model(batch).backward()
        done = (i + 1) % {named} == 0
        if i % 50 == 0:
            log(i)
        {early}
        if {gate}:
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("named", "early", "gate", "window"),
    [
        ("8", "pass", "done", 8),
        ("8", "pass", "(i + 1) % 6 == 0", 6),
        ("8", "if not done:\n            continue", "True", 8),
        ("k", "pass", "done", 0),
        ("64", "pass", "done", 0),  # too long to be rehearsed
    ],
)
def test_a_window_in_place(named: str, early: str, gate: str, window: int) -> None:
    assert literal_window(Index(ast.parse(LITERAL.format(named=named, early=early, gate=gate)))) == window
