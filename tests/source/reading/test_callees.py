"""Which functions of a module a call can mean."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.index import Index

MODULE = """
def main(args):
    loss.backward()

def make():
    def inner(x):
        x.backward()
    return inner

class Head:
    def __init__(self):
        self.main = nn.Sequential(nn.Linear(1, 1))
        self.inner = make()
        self.wrapped = torch.compile(wrapped)

    def forward(self, x):
        CALL

def wrapped(x):
    x.backward()
"""


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        ("self.main(x)", []),
        ("main(x)", ["main"]),
        ("self.inner(x)", ["inner"]),
        ("self.wrapped(x)", ["wrapped"]),
        ("tasks.main(x)", ["main"]),
    ],
)
def test_an_attribute_that_a_constructor_fills_is_no_function_of_its_name(call: str, meant: list[str]) -> None:
    tree = ast.parse(MODULE.replace("CALL", call))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node) == call]
    assert [function.name for function in Index(tree).callees(calls[0])] == meant


def test_what_an_import_calls_otherwise_is_no_function_of_the_file_itself() -> None:
    tree = ast.parse("from measure import main as evaluate\n\ndef main():\n    evaluate()\n    main()\n")
    index = Index(tree)
    calls = {ast.unparse(node): index.callees(node) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert calls["evaluate()"] == []
    assert [function.name for function in calls["main()"]] == ["main"]
