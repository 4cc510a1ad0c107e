"""The user's source behind a measured event: its text, and the test that gates a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache

from accumlint.trace import Guard, Place

Site = Sequence[object]  # path, line, column, end line, end column, function
MAX_TEXT = 120
LEAVES = (ast.Continue, ast.Return, ast.Break, ast.Raise)


def place_of(site: Site) -> Place:
    path, line, column, end_line, end_column = site[:5]
    return Place(str(path), int(str(line)), int(str(column)), int(str(end_line)), int(str(end_column)))


def text_of(site: Site) -> str:
    """The call as the source spells it, on one line."""
    place = place_of(site)
    lines = _lines(place.path)
    if not 0 < place.line <= len(lines):
        return ""
    if not place.end_line:
        return " ".join(lines[place.line - 1].split())[:MAX_TEXT]
    found = lines[place.line - 1 : place.end_line]
    # Columns are counted in bytes.
    whole = [line.encode() for line in found]
    whole[-1] = whole[-1][: place.end_column - 1]
    whole[0] = whole[0][place.column - 1 :]
    return " ".join(b" ".join(whole).decode("utf-8", "replace").split())[:MAX_TEXT]


def gate_of(stack: Sequence[Site], inside: Sequence[Sequence[Site]]) -> Guard | None:
    """The test that decides whether an event happens after the events `inside`: around it and not around those, or leaving before it."""
    found = _deciding(stack, inside)
    best = next((test for test in found if test.counts), found[0]) if found else None
    return Guard(best.place, best.text, "gate") if best is not None else None


def comes_by_count(stack: Sequence[Site], inside: Sequence[Sequence[Site]]) -> bool:
    """Whether an event beside those `inside` waits for a count alone, `step % every == 0`, and for nothing that the data decide."""
    found = _deciding(stack, inside)
    return bool(found) and all(test.periodic for test in found)


def _deciding(stack: Sequence[Site], inside: Sequence[Sequence[Site]]) -> list[_Test]:
    """Of the innermost function that has any, innermost first."""
    for site in stack:
        path, line = str(site[0]), int(str(site[1]))
        others = [int(str(other[1])) for each in inside for other in each if other[0] == path]
        found = [test for test in _tests(path, line) if not any(test.covers(other) for other in others)]
        if found:
            return found
    return []


class _Test:
    """An `if` that an event depends on, with the lines that it decides about."""

    def __init__(self, path: str, node: ast.If, first: int, last: int) -> None:
        test = node.test
        self.place = Place(path, test.lineno, test.col_offset + 1, test.end_lineno or 0, (test.end_col_offset or 0) + 1)
        self.text = " ".join(ast.unparse(test).split())[:MAX_TEXT]
        nodes = list(ast.walk(test))
        self.counts = any(isinstance(each, (ast.Mod, ast.Compare)) for each in nodes)
        self.periodic = any(isinstance(each, ast.Mod) for each in nodes) and not any(isinstance(each, ast.Call) for each in nodes)
        self._first, self._last = first, last

    def covers(self, line: int) -> bool:
        return self._first <= line <= self._last


def _tests(path: str, line: int) -> Iterator[_Test]:
    """Innermost first."""
    chain = _chain(path, line)
    for depth in range(len(chain) - 1, 0, -1):
        node, parent = chain[depth], chain[depth - 1]
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.For, ast.While, ast.With, ast.If, ast.Module, ast.Try)):
            yield from _leaving_before(path, parent, node)
        if isinstance(parent, ast.If) and node is not parent.test:
            body = parent.body if node in parent.body else parent.orelse
            yield _Test(path, parent, body[0].lineno, body[-1].end_lineno or line)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return


def _leaving_before(path: str, parent: ast.AST, node: ast.AST) -> Iterator[_Test]:
    """`if …: continue` in the same block before the statement: it decides about all that follows."""
    for body in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(body, list) and node in body:
            at = body.index(node)
            for earlier in reversed(body[:at]):
                if isinstance(earlier, ast.If) and not earlier.orelse and isinstance(earlier.body[-1], LEAVES):
                    yield _Test(path, earlier, (earlier.end_lineno or earlier.lineno) + 1, body[-1].end_lineno or 10**9)


@cache
def _chain(path: str, line: int) -> tuple[ast.AST, ...]:
    """The nodes from the module down to the statement at a line."""
    found: list[ast.AST] = []
    node: ast.AST | None = _tree(path)
    while node is not None:
        found.append(node)
        below = (
            each
            for each in ast.iter_child_nodes(node)
            if isinstance(each, (ast.stmt, ast.ExceptHandler)) and each.lineno <= line <= (each.end_lineno or 0)
        )
        node = next(below, None)
    return tuple(found)


@cache
def _tree(path: str) -> ast.AST | None:
    try:
        return ast.parse("\n".join(_lines(path)))
    except (SyntaxError, ValueError, RecursionError):
        return None


@cache
def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().split("\n")
    except OSError:
        return []
