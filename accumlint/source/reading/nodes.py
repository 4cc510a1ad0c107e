"""Walking over syntax trees, faster than the standard library does: without contexts and other leaves that carry nothing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_PLAIN_FIELDS = frozenset(
    """
    ctx op ops id attr arg name names kwd_attrs n s kind type_comment level module asname conversion
    """.split()
)
_fields: dict[type[ast.AST], tuple[str, ...]] = {}


def remember(tree: ast.Module) -> list[ast.AST]:
    """Lists once what walks over the parts of a tree yield; gives what a walk over the whole yields. The parts must not change any more."""
    found: list[ast.AST] = [tree]
    for statement in tree.body:
        found += inside_of(statement)
    tree.__dict__.pop("_places", None)
    tree._inside = (found, 0, len(found))  # type: ignore[attr-defined]
    return found


def inside_of(statement: ast.stmt) -> list[ast.AST]:
    """What a walk over a statement at the top level yields: every part of it knows its stretch of that list."""
    known: tuple[list[ast.AST], int, int] | None = statement.__dict__.get("_inside")
    if known is not None:
        return known[0]
    inside: list[Any] = []
    stack: list[Any] = [statement]
    while stack:
        current = stack.pop()
        kind = current.__class__
        if kind is int:  # where the inside of a node ends
            inside[current]._inside = (inside, current, len(inside))
            continue
        names = _fields.get(kind)
        if names is None:
            names = _fields[kind] = _children_of(kind)
        if names:
            stack.append(len(inside))
            for name in names:
                value = getattr(current, name, None)
                if value.__class__ is list:
                    stack.extend([each for each in reversed(value) if each is not None])
                elif value is not None and isinstance(value, ast.AST):
                    stack.append(value)
        inside.append(current)
    return inside


def forget_inside(node: ast.AST) -> None:
    """A node is about to be changed."""
    node.__dict__.pop("_inside", None)
    node.__dict__.pop("_places", None)


def stretch_of(node: ast.AST) -> tuple[list[ast.AST], int, int] | None:
    """The remembered list that a node and what it holds stand in, and where."""
    known: tuple[list[ast.AST], int, int] | None = node.__dict__.get("_inside")
    return known


def walk(node: ast.AST, skip: Callable[[ast.AST], bool] | None = None) -> Iterable[ast.AST]:
    """Every node of a tree in source order, parents before children; operators and contexts are left out.

    What `skip` names is left out with everything inside.
    """
    if skip is None:
        inside: tuple[list[ast.AST], int, int] | None = node.__dict__.get("_inside")
        if inside is not None:
            return inside[0][inside[1] : inside[2]]
        if _fields.get(node.__class__) == ():
            return (node,)
    return _walk(node, skip)


def every(tree: ast.AST, *kinds: type[ast.AST]) -> list[ast.AST]:
    """The nodes of some kinds in a tree, as a walk over it comes to them; a remembered tree is sorted by kind once."""
    inside: tuple[list[ast.AST], int, int] | None = tree.__dict__.get("_inside")
    if inside is None or inside[1] or len(inside[0]) != inside[2]:
        return [node for node in walk(tree) if node.__class__ in kinds]
    places: dict[type[ast.AST], list[int]] | None = tree.__dict__.get("_places")
    if places is None:
        places = defaultdict(list)
        for at, node in enumerate(inside[0]):
            places[node.__class__].append(at)
        tree._places = places  # type: ignore[attr-defined]
    found = [at for kind in kinds for at in places.get(kind, ())]
    if len(kinds) > 1:
        found.sort()
    return [inside[0][at] for at in found]


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
