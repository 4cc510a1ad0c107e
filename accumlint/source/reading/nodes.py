"""Walking over syntax trees, faster than the standard library does: without contexts and other leaves that carry nothing."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

_PLAIN_FIELDS = frozenset(
    """
    ctx op ops id attr arg name names kwd_attrs n s kind type_comment level module asname conversion
    """.split()
)
_fields: dict[type[ast.AST], tuple[str, ...]] = {}
FEW = 24  # nodes, that are sooner gone through than looked up


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
    for name in ("_inside", "_places"):
        node.__dict__.pop(name, None)


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
    """The nodes of some kinds in a tree, as a walk over it comes to them; of what was remembered they are looked up."""
    inside = stretch_of(tree)
    if inside is None or inside[2] - inside[1] < FEW:
        return [node for node in walk(tree) if node.__class__ in kinds]
    nodes, first, last = inside
    return [nodes[at] for at in places_of(nodes, first, last, *kinds)]


def stands_in(tree: ast.AST, kinds: Sequence[type[ast.AST]]) -> bool:
    """Whether there is a node of some kinds in a tree."""
    inside = stretch_of(tree)
    if inside is None or inside[2] - inside[1] < FEW:
        return any(node.__class__ in kinds for node in walk(tree))
    return any(places_of(*inside, kind) for kind in kinds)


def places_of(nodes: list[ast.AST], first: int, last: int, *kinds: type[ast.AST]) -> list[int]:
    """Where the nodes of some kinds stand in a stretch of a remembered list, which is sorted by kind once."""
    root = nodes[0].__dict__
    places: dict[type[ast.AST], list[int]] | None = root.get("_places")
    if places is None:
        places = root["_places"] = defaultdict(list)
        for at, node in enumerate(nodes):
            places[node.__class__].append(at)
    whole = first == 0 and last == len(nodes)
    found: list[int] = []
    for kind in kinds:
        known = places.get(kind)
        if known:
            found += known if whole else known[bisect_left(known, first) : bisect_left(known, last)]
    if len(kinds) > 1:
        found.sort()
    return found


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
