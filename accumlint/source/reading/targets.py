"""Which targets a loss ignores, as far as the source says it: the index that is written into the labels."""

from __future__ import annotations

import ast
from collections.abc import Iterator

IGNORED = 100
WRITERS = frozenset({"masked_fill", "masked_fill_", "where", "full", "full_like", "fill_", "new_full", "pad", "index_fill_", "extend", "append"})


def find_ignored_targets(tree: ast.Module) -> Iterator[ast.AST]:
    """Every place where -100, or the constant named as `ignore_index`, is written into something."""
    names = _ignored_names(tree)
    written = _written(tree)
    for node in ast.walk(tree):
        if id(node) in written and (_is_minus_100(node) or (isinstance(node, ast.Name) and node.id in names)):
            yield node
        elif isinstance(node, ast.Call) and _name(node.func) == "pad_sequence":
            padding = next((keyword.value for keyword in node.keywords if keyword.arg == "padding_value"), None)
            if padding is not None and (_is_minus_100(padding) or (isinstance(padding, ast.Name) and padding.id in names)):
                yield node


def _is_minus_100(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and node.operand.value == IGNORED


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _ignored_names(tree: ast.Module) -> set[str]:
    """Names bound to -100, and names given as `ignore_index=`."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_minus_100(node.value):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.keyword) and node.arg == "ignore_index" and isinstance(node.value, ast.Name):
            names.add(node.value.id)
    return names


def _written(tree: ast.Module) -> set[int]:
    """The nodes that are written into something, rather than compared with or named as the index to ignore."""
    written: set[int] = set()
    for node in ast.walk(tree):
        values: list[ast.expr] = []
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Subscript) for target in node.targets):
            values = [node.value]
        elif isinstance(node, ast.Call) and _name(node.func) in WRITERS:
            values = list(node.args)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.left, ast.List):
            values = [node.left]
        elif isinstance(node, ast.IfExp):
            values = [node.body, node.orelse]
        written.update(id(part) for value in values for part in ast.walk(value) if not isinstance(part, ast.Compare))
    return written
