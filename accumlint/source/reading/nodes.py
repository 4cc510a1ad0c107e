"""Walking over syntax trees, faster than the standard library does: without contexts and other leaves that carry nothing."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

_PLAIN_FIELDS = frozenset(
    """
    ctx op ops id attr arg name names kwd_attrs n s kind type_comment level module asname conversion
    """.split()
)
_fields: dict[type[ast.AST], tuple[str, ...]] = {}
_REMEMBERED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor, ast.While)


class _End:
    """Stands on the stack where the inside of a remembered node ends."""

    __slots__ = ("node", "start")

    def __init__(self, node: Any, start: int) -> None:
        self.node = node
        self.start = start


def remember(tree: ast.Module) -> None:
    """Lists once what walks over a tree, its functions, classes and loops yield. The tree must not change any more."""
    inside: list[ast.AST] = []
    stack: list[Any] = [_End(tree, 0), *reversed(tree.body)]
    while stack:
        current = stack.pop()
        kind = current.__class__
        if kind is _End:
            current.node._inside = inside[current.start :]
            continue
        inside.append(current)
        if kind in _REMEMBERED:
            stack.append(_End(current, len(inside)))
        names = _fields.get(kind)
        if names is None:
            names = _fields[kind] = _children_of(kind)
        for name in names:
            value = getattr(current, name, None)
            if value.__class__ is list:
                stack.extend(each for each in reversed(value) if each is not None)
            elif value is not None and isinstance(value, ast.AST):
                stack.append(value)


def walk(node: ast.AST, skip: Callable[[ast.AST], bool] | None = None) -> Iterator[ast.AST]:
    """Every node of a tree in source order, parents before children; operators and contexts are left out.

    What `skip` names is left out with everything inside.
    """
    if skip is None:
        inside: list[ast.AST] | None = getattr(node, "_inside", None)
        return _walk(node, None) if inside is None else chain((node,), inside)
    return _walk(node, skip)


def _walk(node: ast.AST, skip: Callable[[ast.AST], bool] | None) -> Iterator[ast.AST]:
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


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right inside a node, last first; operators and contexts are left out."""
    kind = node.__class__
    names = _fields.get(kind)
    if names is None:
        names = _fields[kind] = _children_of(kind)
    found: list[ast.AST] = []
    for name in names:
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [each for each in reversed(value) if each is not None]
        elif value is not None and isinstance(value, ast.AST):
            found.append(value)
    return found


def _children_of(kind: type[ast.AST]) -> tuple[str, ...]:
    """The fields that can hold nodes, last first, so that a stack gives them back in order."""
    plain = set(_PLAIN_FIELDS)
    if kind in {ast.Import, ast.ImportFrom}:
        plain.discard("names")
    if kind in {ast.Constant}:
        return ()
    return tuple(name for name in reversed(kind._fields) if name not in plain)
