"""Caps the depth of a tree, so that no recursive walk over it can overflow.

Programs nest some twenty levels; a thousand come from generated tables and from chains (`a + b + c + …`, a long `elif`).
What lies below the cap is cut off when no training call is in it, so that one such expression does not cost the file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from accumlint.source.reading.nodes import children

MAX_EXPRESSION = 60
MAX_BLOCKS = 100
LEAVES = frozenset({ast.Name, ast.Constant})  # they hold nothing

_TRAINING_CALLS = frozenset({"backward", "manual_backward", "step", "zero_grad", "no_sync", "unscale_", "clip_grad_norm_", "accumulate"})


def limit_depth(tree: ast.Module) -> ast.AST | None:
    """Cuts what is nested too deeply; returns the first node that is too deep and cannot be cut."""
    level: list[ast.AST] = list(tree.body)
    for _ in range(MAX_BLOCKS):
        blocks: list[ast.AST] = []
        for node in level:
            for child in reversed(children(node)):
                if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
                    blocks.append(child)
                elif _may_be_deep(child):
                    guilty = _limit_expression(child)
                    if guilty is not None:
                        return guilty
        if not blocks:
            return None
        level = blocks
    return _cut_blocks(level)


def _may_be_deep(node: ast.AST) -> bool:
    """Each level takes a character at least, so a short piece of one line needs no walk."""
    if not isinstance(node, ast.expr):
        return not isinstance(node, (ast.expr_context, ast.operator, ast.alias))
    return node.end_lineno != node.lineno or (node.end_col_offset or 0) - node.col_offset > MAX_EXPRESSION


def _limit_expression(root: ast.AST) -> ast.AST | None:
    level: list[ast.AST] = [root]
    for _ in range(MAX_EXPRESSION):
        level = [child for node in level for child in children(node) if child.__class__ not in LEAVES]
        if not level:
            return None
    for node in level:
        guilty = _first_training_call(children(node))
        if guilty is not None:
            return guilty
        _cut_expressions(node)
    return None


def _cut_expressions(root: ast.AST) -> None:
    """Puts `...` where the node has operands, also behind the nodes that only hold operands (keywords, arguments)."""
    pending = [root]
    while pending:
        node = pending.pop()
        for name, value in ast.iter_fields(node):
            if isinstance(value, ast.expr):
                setattr(node, name, _stub(value))
            elif isinstance(value, list):
                pending.extend(each for each in value if isinstance(each, ast.AST) and not isinstance(each, ast.expr))
                setattr(node, name, [_stub(each) if isinstance(each, ast.expr) else each for each in value])
            elif isinstance(value, ast.AST):
                pending.append(value)


def _stub(node: ast.expr) -> ast.expr:
    context = getattr(node, "ctx", None)
    stub = ast.Name("_", context) if isinstance(context, (ast.Store, ast.Del)) else ast.Constant(...)
    return ast.copy_location(stub, node)


def _cut_blocks(level: list[ast.AST]) -> ast.AST | None:
    for node in level:
        guilty = _first_training_call([node])
        if guilty is not None:
            return guilty
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and statements:
                setattr(node, name, [ast.copy_location(ast.Pass(), statements[0])] if name == "body" else [])
    return None


def _first_training_call(roots: Iterable[ast.AST]) -> ast.AST | None:
    for root in roots:
        for node in ast.walk(root):
            if isinstance(node, ast.Attribute) and node.attr in _TRAINING_CALLS:
                return node
    return None
