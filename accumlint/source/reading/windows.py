"""Windows that the source tells by itself: lists of micro-batches, by the loops over them, and sizes that stand in place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.trace import Kind

PASSING = frozenset({"enumerate", "tqdm", "trange", "zip", "list", "iter", "reversed", "progress"})
LARGEST = 16  # a window in place that is rehearsed as long as it is
Lines = tuple[int, int]


def windows_by_name(index: Index) -> Mapping[str, list[Lines]]:
    """The names of what a loop goes backward over, item by item, with the step after it; and the lines of the functions where they do."""
    found: dict[str, list[Lines]] = defaultdict(list)
    inside = {
        id(loop): (function.lineno, function.end_lineno or function.lineno)
        for function in every(index.tree, ast.FunctionDef, ast.AsyncFunctionDef)  # outer ones come first
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for loop in every(function, ast.For, ast.AsyncFor)
    }
    for loop in every(index.tree, ast.For, ast.AsyncFor):
        if isinstance(loop, (ast.For, ast.AsyncFor)) and Kind.BACKWARD in (kinds := index.kinds(loop.body)) and Kind.STEP not in kinds:
            source = loop.iter
            while isinstance(source, ast.Call) and terminal(source.func) in PASSING and source.args:
                source = source.args[0]
            if isinstance(source, ast.Name):
                found[source.id].append(inside.get(id(loop), (0, 2**62)))
    return found


def is_window(index: Index, name: ast.expr | None) -> bool:
    """Whether a name means such a list where it stands."""
    if not isinstance(name, ast.Name):
        return False
    places = index.once("windows", index.tree, lambda _: windows_by_name(index)).get(name.id, ())
    return any(first <= name.lineno <= last for first, last in places)


def literal_window(index: Index) -> int:
    """The largest number in place whose multiples an update waits for, `(i + 1) % 8 == 0`; 0 where there is none of a usual size."""
    return index.once("literal window", index.tree, lambda _: _literal_window(index))


def _literal_window(index: Index) -> int:
    assigned = {
        target.id: node.value
        for node in every(index.tree, ast.Assign)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = 0
    for node in every(index.tree, ast.If):
        if isinstance(node, ast.If) and _holds_update(index, node):
            for part in walk(node.test):
                test = assigned.get(part.id) if isinstance(part, ast.Name) else part
                found = max([found, *(_moduli(test) if test is not None else ())])
    return found


def _holds_update(index: Index, node: ast.If) -> bool:
    if Kind.STEP in index.kinds(node.body) ^ index.kinds(node.orelse):
        return True
    return any(isinstance(part, ast.Continue) for part in node.body) and Kind.STEP in index.kinds(index.following(node))


def _moduli(test: ast.AST) -> Iterator[int]:
    remainders = (part.right for part in walk(test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod))
    values = (right.value for right in remainders if isinstance(right, ast.Constant))
    yield from (value for value in values if type(value) is int and value <= LARGEST)
