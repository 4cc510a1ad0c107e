"""Targets that a language model shifts by one: where the source drops the first, and whether that one counted."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from accumlint.source.reading.nodes import every, walk


def drops_the_first(index: ast.expr) -> bool:
    """`labels[:, 1:]`, `labels[..., 1:]`"""
    last = index.elts[-1] if isinstance(index, ast.Tuple) and index.elts else index
    return (
        isinstance(last, ast.Slice)
        and last.upper is None
        and last.step is None
        and isinstance(last.lower, ast.Constant)
        and last.lower.value == 1
    )


def name_of(labels: ast.expr) -> str:
    """`labels` of `labels`, `batch.labels` and `batch["labels"]`; "" of anything else."""
    if isinstance(labels, ast.Subscript):
        return str(labels.slice.value) if isinstance(labels.slice, ast.Constant) else name_of(labels.value)
    return labels.attr if isinstance(labels, ast.Attribute) else labels.id if isinstance(labels, ast.Name) else ""


def fills_behind(tree: ast.AST, ignored: Iterable[ast.AST]) -> bool:
    """Whether the index that losses ignore is only ever written behind the targets of a sample: then its first one counts."""
    found = list(ignored)
    if not found:
        return False
    behind = {id(part) for filled in (*padded_behind(tree), *_set_behind(tree)) for part in walk(filled)}
    return all(id(node) in behind for node in found)


def padded_behind(tree: ast.AST) -> Iterator[ast.AST]:
    """What is filled up to a common length: `labels + [-100] * missing`, `pad_sequence(…)`, `labels.masked_fill(labels == pad, -100)`."""
    for node in every(tree, ast.BinOp, ast.Call):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not isinstance(node.left, ast.List):
            yield node.right
        elif isinstance(node, ast.Call):
            yield from _padded(node)


def _set_behind(tree: ast.AST) -> Iterator[ast.AST]:
    """`labels[length:] = -100`, `labels[labels == pad] = -100`"""
    for node in every(tree, ast.Assign):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and _is_behind(node.targets[0].slice):
            yield node.value


def _padded(call: ast.Call) -> Iterator[ast.AST]:
    name = name_of(call.func)
    if name == "pad_sequence":
        left = any(word.arg == "padding_side" and getattr(word.value, "value", "") == "left" for word in call.keywords)
        yield from () if left else (call,)
    elif name == "pad" and len(call.args) > 1 and isinstance(call.args[1], (ast.Tuple, ast.List)) and call.args[1].elts:
        first = call.args[1].elts[0]
        yield from (call,) if isinstance(first, ast.Constant) and first.value == 0 else ()
    elif name in {"masked_fill", "masked_fill_", "where"} and call.args and _is_behind(call.args[0]):
        yield call


def _is_behind(mask: ast.expr) -> bool:
    """Whether a mask or an index leaves the first target: `labels == pad`, `positions >= length`, `length:`."""
    last = mask.elts[-1] if isinstance(mask, ast.Tuple) and mask.elts else mask
    if isinstance(last, ast.Slice):
        return last.lower is not None and last.upper is None
    if not isinstance(last, ast.Compare) or len(last.ops) != 1:
        return False
    if isinstance(last.ops[0], ast.Eq):
        return "pad" in ast.unparse(last.comparators[0]).lower()
    return isinstance(last.ops[0], (ast.GtE, ast.Gt)) and "len" in ast.unparse(last.comparators[0]).lower()
