"""Walking over syntax trees, faster than the standard library does: without contexts and other leaves that carry nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

_PLAIN_FIELDS = frozenset(
    """
    ctx op ops id attr arg name names kwd_attrs n s kind type_comment level module asname conversion
    """.split()
)
_fields: dict[type[ast.AST], tuple[str, ...]] = {}


def walk(node: ast.AST, skip: Callable[[ast.AST], bool] | None = None) -> Iterator[ast.AST]:
    """Every node of a tree in source order, parents before children; operators and contexts are left out.

    What `skip` names is left out with everything inside.
    """
    stack: list[ast.AST | None] = [node]
    while stack:
        current = stack.pop()
        # `**rest` in a dict and a keyword-only argument without a default leave a None.
        if current is None or (skip is not None and skip(current)):
            continue
        yield current
        kind = current.__class__
        names = _fields.get(kind)
        if names is None:
            names = _fields[kind] = _children_of(kind)
        for name in names:
            value = getattr(current, name, None)
            if value.__class__ is list:
                stack.extend(reversed(value))
            elif value is not None and isinstance(value, ast.AST):
                stack.append(value)


def _children_of(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields that can hold nodes, last first, so that a stack gives them back in order."""
    plain = set(_PLAIN_FIELDS)
    if kind in {ast.Import, ast.ImportFrom}:
        plain.discard("names")
    if kind in {ast.Constant}:
        return ()
    return tuple(name for name in reversed(kind._fields) if name not in plain)
