"""Walks over trees whose order is kept, and over others."""

from __future__ import annotations

import ast

from accumlint.source.reading.nodes import every, remember, walk

CODE = """
import a.b as c
@decorate(1)
def f(x: int, *rest, y=2, z, **more):
    for i, (p, q) in enumerate(x):
        if (i + 1) % y == 0 and {**more, "k": [p for p in q if p]}:
            return lambda t: t
    try:
        with a as b, c: del b
    except E as e: raise X from e
    finally: pass

class C(B, metaclass=M):
    field: int = 3
    def m(self): return f"{self.field!r:>{width}}"
match f(1):
    case [C(field=n), {"a": w, **others}] if n: pass
"""


def test_a_remembered_tree_is_walked_in_the_same_order_everywhere() -> None:
    tree = ast.parse(CODE)
    before = {id(node): [id(part) for part in walk(node)] for node in ast.walk(tree)}
    remember(tree)
    assert {id(node): [id(part) for part in walk(node)] for node in ast.walk(tree)} == before


def test_statements_are_shared_by_trees() -> None:
    tree = ast.parse(CODE)
    remember(tree)
    other = ast.Module([*tree.body[1:], *ast.parse("y = 1").body], [])
    expected = [id(part) for statement in other.body for part in walk(statement)]
    remember(other)
    assert [id(part) for part in walk(other)] == [id(other), *expected]


def test_what_is_skipped_is_skipped_in_remembered_trees_too() -> None:
    tree = ast.parse(CODE)
    remember(tree)
    found = [node for node in walk(tree, lambda node: isinstance(node, ast.ClassDef)) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in found] == ["f"]


def test_nodes_of_some_kinds_are_found_as_a_walk_comes_to_them() -> None:
    tree = ast.parse(CODE)
    kinds = (ast.Name, ast.Call, ast.Return, ast.Module)
    wanted = [id(node) for node in walk(tree) if isinstance(node, kinds)]
    assert [id(node) for node in every(tree, *kinds)] == wanted
    remember(tree)
    assert [id(node) for node in every(tree, *kinds)] == wanted
    for part in ast.walk(tree):
        assert [id(node) for node in every(part, *kinds)] == [id(node) for node in walk(part) if isinstance(node, kinds)]
