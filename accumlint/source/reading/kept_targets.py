"""Whether what is written over targets leaves some of them: padding behind a sample, a prompt that is shorter than the sample."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

from accumlint.source.reading.nodes import every, walk
from accumlint.source.reading.shifted import padded_behind

FILLED = frozenset({"full", "full_like", "new_full"})
DRAWN = frozenset({"randint", "integers", "randrange"})


def leaves_some(tree: ast.AST, nodes: Iterable[ast.AST]) -> bool:
    """Whether every place where the ignored index is written keeps at least one target of a sample."""
    kept = {id(part) for call in _paddings(tree) for part in walk(call)}
    kept |= {id(part) for padded in padded_behind(tree) for part in walk(padded)}
    kept |= {id(part) for statement in _short_masks(tree) for part in walk(statement.value)}
    return all(id(node) in kept for node in nodes)


def _paddings(tree: ast.AST) -> Iterator[ast.expr]:
    """`pad_sequence(…)`, `F.pad(…)`, and tensors full of the index that samples are then copied into."""
    copied = {
        _name(target.value)
        for node in every(tree, ast.Assign)
        if isinstance(node, ast.Assign) and not isinstance(node.value, (ast.Constant, ast.UnaryOp))
        for target in node.targets
        if isinstance(target, ast.Subscript) and any(isinstance(part, ast.Slice) for part in walk(target.slice))
    }
    for node in every(tree, ast.Call, ast.Assign):
        if isinstance(node, ast.Call) and _name(node.func) in {"pad_sequence", "pad"}:
            yield node
        elif isinstance(node, ast.Assign) and _is_filled(node.value) and any(_name(target) in copied for target in node.targets):
            yield node.value


def _is_filled(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in FILLED


def _short_masks(tree: ast.AST) -> Iterator[ast.Assign]:
    """`labels[:, :prompt] = -100` and `labels[:, length:] = -100`, where numbers in place say that something is left."""
    for function in (*every(tree, ast.FunctionDef), tree):
        bounds, width = _drawn(function), _width(function)
        for node in walk(function):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Subscript):
                index = node.targets[0].slice
                last = index.elts[-1] if isinstance(index, ast.Tuple) and index.elts else index
                if isinstance(last, ast.Slice) and _keeps_some(last, bounds, width):
                    yield node


def _keeps_some(mask: ast.Slice, bounds: dict[str, tuple[int, int]], width: int) -> bool:
    if mask.upper is not None and mask.lower is None:
        return _range(mask.upper, bounds, (0, width))[1] < width
    return mask.lower is not None and mask.upper is None and _range(mask.lower, bounds, (0, 0))[0] >= 2


def _range(node: ast.expr, bounds: dict[str, tuple[int, int]], unknown: tuple[int, int]) -> tuple[int, int]:
    """Between which numbers an expression lies."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return (node.value, node.value)
    if isinstance(node, ast.Name):
        return bounds.get(node.id, unknown)
    return next(iter(_ranges_drawn(node)), unknown)


def _drawn(function: ast.AST) -> dict[str, tuple[int, int]]:
    """Names that are random numbers, all of their values between two literals."""
    found: dict[str, list[tuple[int, int] | None]] = defaultdict(list)
    for node in walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id].append(next(_ranges_drawn(node.value), None))
    return {name: ranges[0] for name, ranges in found.items() if len(ranges) == 1 and ranges[0] is not None}


def _ranges_drawn(value: ast.expr) -> Iterator[tuple[int, int]]:
    """`int(torch.randint(1, 9, (1,)))` lies between 1 and 8; in arithmetic nobody tells."""
    while isinstance(value, ast.Call) and _name(value.func) in {"int", "item"}:
        inner = value.args[0] if value.args else getattr(value.func, "value", None)
        if inner is None:
            return
        value = inner
    if not isinstance(value, ast.Call) or _name(value.func) not in DRAWN:
        return
    numbers = [part.value for part in value.args[:2] if isinstance(part, ast.Constant) and type(part.value) is int]
    if len(numbers) == 2:
        inclusive = isinstance(value.func, ast.Attribute) and _name(value.func.value) == "random" and _name(value.func) == "randint"
        yield numbers[0], numbers[1] - (0 if inclusive else 1)


def _width(function: ast.AST) -> int:
    """The least last dimension, written out, of the tensors that a function makes; 0 where there is none."""
    shapes = [
        arg.elts
        for node in walk(function)
        if isinstance(node, ast.Call)
        for arg in node.args
        if isinstance(arg, ast.Tuple) and arg.elts and all(isinstance(one, (ast.Constant, ast.Name)) for one in arg.elts)
    ]
    last = [shape[-1].value for shape in shapes if isinstance(shape[-1], ast.Constant) and type(shape[-1].value) is int]
    return min((number for number in last if number > 1), default=0)


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
