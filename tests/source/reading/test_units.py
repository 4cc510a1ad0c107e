"""How often K is in a number, through the names that it is made of."""

from __future__ import annotations

import ast

import pytest

from accumlint.source.reading.counting import counts_batches
from accumlint.source.reading.units import Units

HEAD = """
updates_per_epoch = math.ceil(len(train_loader) / accum_steps)
max_updates = epochs * updates_per_epoch
effective = batch_size * accum_steps
if args.max_steps is None:
    args.max_steps = args.epochs * len(loader)
torn = len(loader) if a else len(loader) // accum_steps
shrunk = len(loader)
shrunk //= accum_steps
endless = endless + len(other)
"""


def degree(expression: str) -> int | None:
    tree = ast.parse(HEAD + f"it = {expression}\n")
    last = tree.body[-1]
    assert isinstance(last, ast.Assign)
    return Units(tree).degree(last.value, counts_batches)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("len(loader)", 0),
        ("epochs * len(loader)", 0),
        ("len(loader) // accum_steps", -1),
        ("int(len(loader) / accum_steps) * epochs", -1),
        ("max_updates", -1),
        ("max_updates * gradient_accumulation_steps", 0),
        ("len(loader) * accum_steps", 1),
        ("len(loader) * batch_size // effective", -1),
        ("args.max_steps", 0),
        ("-(-len(loader) // accum_steps)", -1),
        ("len(loader) // accum_steps + 1", -1),
        ("max(1, len(loader))", 0),
        ("torn", None),
        ("shrunk", None),
        ("endless", None),
        ("len(words)", None),
        ("args.total_steps", None),
        ("epochs", None),
    ],
)
def test_degree(expression: str, expected: int | None) -> None:
    assert degree(expression) == expected
