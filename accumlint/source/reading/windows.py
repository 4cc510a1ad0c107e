"""Lists that hold a window's micro-batches, told by the loops over them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.trace import Kind

PASSING = frozenset({"enumerate", "tqdm", "trange", "zip", "list", "iter", "reversed", "progress"})
Lines = tuple[int, int]


def windows_by_name(index: Index) -> Mapping[str, list[Lines]]:
    """The names of what a loop goes backward over, item by item, with the step after it; and the lines of the functions where they do."""
    found: dict[str, list[Lines]] = defaultdict(list)
    inside = {
        id(loop): (function.lineno, function.end_lineno or function.lineno)
        for function in every(index.tree, ast.FunctionDef, ast.AsyncFunctionDef)  # outer ones come first
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for loop in walk(function)
        if isinstance(loop, (ast.For, ast.AsyncFor))
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
