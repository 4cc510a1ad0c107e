"""What a function that nobody here calls is given, and how often: its settings and its data, and a pass over the data in each epoch."""

from __future__ import annotations

import ast
import re

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk

DATA_NAME = re.compile(r"batch|data|input|sample|image|target|label|token|(^|_)[xy](_|$)|example|loss", re.IGNORECASE)


def flags(function: ast.AST) -> frozenset[str]:
    """The names that a function asks for their truth, or compares with a constant: settings of the call, not its data."""
    arguments = getattr(function, "args", None)
    told = (*arguments.args, *arguments.kwonlyargs) if isinstance(arguments, ast.arguments) else ()
    found = {each.arg for each in told if isinstance(each.annotation, ast.Name) and each.annotation.id == "bool"}
    found |= {
        part.left.id for part in walk(function) if isinstance(part, ast.Compare) and isinstance(part.left, ast.Name) and _spells(part)
    }
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


EPOCH = re.compile(r"^(cur(rent)?_?)?epoch(_?(idx|index|id|num|number|i|no))?$", re.IGNORECASE)
ONE_EPOCH = re.compile(r"(^|_)epoch$", re.IGNORECASE)


def does_one_epoch(index: Index, entry: FunctionNode) -> bool:
    """Whether a function goes over the data once, as one that its caller runs in every epoch: by its name, or by the epoch it is told."""
    arguments = entry.args
    told = any(EPOCH.search(each.arg) for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
    if not (told or ONE_EPOCH.search(entry.name)):
        return False
    loops = [part for part in walk(entry) if isinstance(part, (ast.For, ast.AsyncFor, ast.While))]
    return not any(index.has_inner_backward_loop(loop) and not index.gates_outside_inner_loops(loop) for loop in loops)


def told_by_name(index: Index, function: str) -> frozenset[str]:
    """The parameters that some call of the file gives a function of this name by theirs."""
    return index.once("calls by name", index.tree, _keywords).get(function, frozenset())


def _keywords(tree: ast.AST) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for call in every(tree, ast.Call):
        if isinstance(call, ast.Call):
            found.setdefault(terminal(call.func), set()).update(word.arg for word in call.keywords if word.arg is not None)
    return {name: frozenset(words) for name, words in found.items()}
