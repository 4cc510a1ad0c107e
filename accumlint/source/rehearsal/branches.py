"""If statements as they stand: what their sides hold and how they leave the path, seen once for all turns and worlds."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.reading.words import WRAPPER_NAMES
from accumlint.trace import Kind

WRAPPERS = WRAPPER_NAMES | {"fully_shard"}
EXITS = frozenset({("sys", "exit"), ("os", "_exit")})
LEAVING = (ast.Continue, ast.Break, ast.Return, ast.Raise)


@dataclass(frozen=True, slots=True)
class Branch:
    """What is seen of an if statement."""

    kinds: frozenset[Kind]  # of event, that its body can bring about
    other: frozenset[Kind]  # and its other side
    leaves: frozenset[str]  # how its body leaves the path
    other_leaves: frozenset[str]
    quiet: bool  # it brings nothing about, and keeps no books
    books: bool  # it keeps books
    own_books: bool  # its body does
    counts_down: bool
    is_main: bool
    wraps_otherwise: bool  # a model is wrapped on its other side alone


def seen(index: Index, node: ast.If) -> Branch:
    """The same for every question about an if statement."""
    return index.once("branch", node, lambda _: _look_at(index, node))


def _look_at(index: Index, node: ast.If) -> Branch:
    books = index.keeps_books(node)
    return Branch(
        index.kinds(node.body),
        index.kinds(node.orelse),
        frozenset(ways_out(node.body)),
        frozenset(ways_out(node.orelse)),
        not index.kinds(node) and not books,
        books,
        index.keeps_books(node.body),
        _counts_down(node),
        _is_main_guard(node.test),
        wraps_model(node.orelse) and not wraps_model(node.body),
    )


def wraps_model(statements: Sequence[ast.stmt]) -> bool:
    """Whether a wrapper that synchronises is put around a model."""
    return any(isinstance(part, ast.Call) and terminal(part.func) in WRAPPERS for statement in statements for part in walk(statement))


def ways_out(body: Sequence[ast.stmt]) -> set[str]:
    """How a block leaves the path at its end, if every way through it does."""
    if not body:
        return set()
    last = body[-1]
    if isinstance(last, LEAVING):
        return {type(last).__name__.lower()}
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and _ends_run(last.value.func):
        return {"raise"}
    if isinstance(last, ast.If) and last.orelse:
        first, second = ways_out(last.body), ways_out(last.orelse)
        return first | second if first and second else set()
    return set()


def _ends_run(function: ast.expr) -> bool:
    """Whether a call ends the run: `exit()`, `sys.exit(1)`."""
    if isinstance(function, ast.Name):
        return function.id in {"exit", "quit"}
    owner = function.value if isinstance(function, ast.Attribute) else None
    return isinstance(function, ast.Attribute) and isinstance(owner, ast.Name) and (owner.id, function.attr) in EXITS


def _counts_down(node: ast.If) -> bool:
    """`if passed_over > 0: passed_over -= 1; continue`: the batches that a resumed run has had already."""
    counted = {terminal(part.target) for part in node.body if isinstance(part, ast.AugAssign) and isinstance(part.op, ast.Sub)}
    return ways_out(node.body) == {"continue"} and any(terminal(part) in counted for part in walk(node.test))


def _is_main_guard(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id == "__name__"
