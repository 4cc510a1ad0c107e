"""What a function that nobody here calls is given: which of its parameters are settings of the call, and which are data."""

from __future__ import annotations

import ast
import re

from accumlint.source.reading.nodes import walk

DATA_NAME = re.compile(r"batch|data|input|sample|image|target|label|token|(^|_)[xy](_|$)|example|loss", re.IGNORECASE)


def flags(function: ast.AST) -> frozenset[str]:
    """The names that a function asks for their truth, or compares with a constant: settings of the call, not its data."""
    found = {part.left.id for part in walk(function) if isinstance(part, ast.Compare) and isinstance(part.left, ast.Name) and _spells(part)}
    pending: list[ast.expr] = [part.test for part in walk(function) if isinstance(part, (ast.If, ast.IfExp, ast.Assert))]
    while pending:
        test = pending.pop()
        if isinstance(test, ast.Name):
            found.add(test.id)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            pending.append(test.operand)
        elif isinstance(test, ast.BoolOp):
            pending.extend(test.values)
        elif isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and not isinstance(test.ops[0], (ast.Is, ast.IsNot)):
            plain = all(isinstance(part, ast.Constant) for part in test.comparators)
            if plain and not DATA_NAME.search(test.left.id):
                found.add(test.left.id)
    return frozenset(found)


def _spells(test: ast.Compare) -> bool:
    """Whether something is compared with words: `phase in ["G", "D"]`."""
    sides = [side for each in test.comparators for side in (each.elts if isinstance(each, (ast.List, ast.Tuple, ast.Set)) else [each])]
    return bool(sides) and all(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
