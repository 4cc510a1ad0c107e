"""The way from a backward's roots to the losses behind them, as far as it is made of scalings, sums and selections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

MARK = "accumlint"  # in a node's metadata: the recorded calls by output number
MAX_VISITS = 4000
MAX_NAMES = 4

# What is linear in its first input and hands each element of its gradient on as it is.
_PASSING = frozenset(
    """Sum Nansum View UnsafeView ReshapeAlias Squeeze Unsqueeze ToCopy Clone Alias Select Slice Narrow Index IndexSelect Gather
    MaskedSelect MaskedFill Unbind Split SplitWithSizes T Transpose Permute Cat Stack Add Where AsStrided Detach""".split()
)
_SPREADING = frozenset({"Expand", "Repeat"})
_NAME = re.compile(r"(\w+?)Backward\d*")
_COPY = "torch::autograd::CopyBackwards"
_SINK = "_DDPSinkBackward"

# "mul" or "div" with a number, or with a tensor of one element that is still on its device.
Operand = tuple[str, Any]


# The steps from a root to a node: the steps before, the node, and by which of its inputs it is left.
Path = tuple[Any, Any, int] | None


@dataclass(slots=True)
class Way:
    """From a loss to the roots: the scalars met, in that order; None where the way is no chain of scalings, or not the only one."""

    operands: list[Operand] | None


@dataclass(slots=True)
class Found:
    """What lies behind the roots. `unknown` names what was met that is no recorded loss; `complete` says that nothing was."""

    ways: dict[int, Way] = field(default_factory=dict)  # by id of the recorded call
    unknown: list[str] = field(default_factory=list)
    complete: bool = True

    def stops(self, name: str) -> None:
        self.complete = False
        if name not in self.unknown and len(self.unknown) < MAX_NAMES:
            self.unknown.append(name)


def search(roots: tuple[Any, ...], readable: Callable[[Any], bool]) -> Found:
    """Walks from the roots to the recorded losses.

    `readable` says of a recorded call whether the scalars that multiplications have saved since may be read: a checkpoint
    unpacks its saved tensors only once.
    """
    found = Found()
    waiting: list[tuple[Any, int, Path]] = []
    for root in roots:
        if root.grad_fn is not None:
            waiting.append((root.grad_fn, root.output_nr, None))
        elif root.requires_grad:
            found.stops("a leaf")
    for _ in range(MAX_VISITS):
        if not waiting:
            return found
        node, output, path = waiting.pop()
        call = node.metadata.get(MARK, {}).get(output)
        if call is not None:
            found.ways[id(call)] = Way(None if id(call) in found.ways else _operands_along(path, readable(call)))
        elif _linear(node) is None:
            found.stops(node.name().removeprefix("torch::autograd::"))
        else:
            waiting += [(each, number, (path, node, side)) for side, each, number in _following(node, output)]
    found.stops("a graph of many operations")
    return found


def _following(node: Any, output: int) -> Iterator[tuple[int, Any, int]]:
    """The nodes before one, with the inputs that they come in by."""
    for side, (each, number) in enumerate(node.next_functions):
        # The sink of a data-parallel model hands each of its outputs through.
        if each is not None and (node.name() != _SINK or side == output):
            yield side, each, number


def _linear(node: Any) -> str | None:
    """The operation of a node that is linear in all inputs that have a graph, or None."""
    name = node.name()
    if name in {_COPY, _SINK}:
        return "ToCopy"
    match = _NAME.fullmatch(name)
    operation = match.group(1) if match else ""
    branches = [following is not None for following, _ in node.next_functions]
    if operation == "Mul":
        return operation if sum(branches) == 1 else None
    if operation == "Div":
        rounds = getattr(node, "_saved_rounding_mode", None) is not None
        return None if rounds or (len(branches) > 1 and branches[1]) else operation
    if operation in {"Neg", "Sub", "Rsub", "Mean"} or operation in _PASSING or operation in _SPREADING:
        return operation
    return None


def _operands_along(path: Path, readable: bool) -> list[Operand] | None:
    """The scalars of a way, from the loss to the root."""
    operands: list[Operand] = []
    while path is not None:
        path, node, side = path
        try:
            own = _operands(node, side, readable)
        except Exception:
            return None  # freed, changed in place, or of another version of torch: the scalars stay unknown
        if own is None:
            return None
        operands += own
    return operands


def _operands(node: Any, side: int, readable: bool) -> list[Operand] | None:
    operation = _linear(node)
    if operation in _SPREADING:
        return None
    if operation == "Neg":
        return [("mul", -1.0)]
    if operation == "Mean":
        return [("div", float(_mean_over(node)))]
    if operation in {"Add", "Sub", "Rsub"}:
        return _added(node, side, operation or "")
    if operation not in {"Mul", "Div"}:
        return []
    if not readable:
        return None
    value = scalar(node._saved_other if side == 0 else node._saved_self)
    return None if value is None else [("mul" if operation == "Mul" else "div", value)]


def _added(node: Any, side: int, operation: str) -> list[Operand]:
    alpha = float(getattr(node, "_saved_alpha", 1))
    factor = alpha if side == (0 if operation == "Rsub" else 1) else 1.0
    if (operation == "Sub" and side == 1) or (operation == "Rsub" and side == 0):
        factor = -factor
    return [] if factor == 1.0 else [("mul", factor)]


def _mean_over(node: Any) -> int:
    """Number of elements that a mean runs over."""
    sizes = node._saved_self_sym_sizes
    dims = getattr(node, "_saved_dim", None)
    if not dims:
        return math.prod(sizes)
    return math.prod(sizes[dim if dim < 1 << 63 else dim - (1 << 64)] for dim in dims)


def scalar(value: Any) -> Any:
    """A number as a float; a tensor of one element as a float on the CPU and as a copy elsewhere; None for others."""
    if isinstance(value, (int, float)):
        return float(value)
    if value is None or not hasattr(value, "numel") or value.numel() != 1 or type(value).__name__ == "DTensor":
        return None
    return float(value) if value.device.type == "cpu" else value.detach().clone().reshape(())
