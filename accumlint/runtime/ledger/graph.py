"""The way from a backward's roots to the losses behind them, as far as it is made of scalings, sums and selections."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# In a node's metadata: the recorded calls by output number, a reduction that may be a loss, the output of a recorded forward.
MARK, BY_HAND, PASSAGE = "accumlint", "accumlint by hand", "accumlint passage"
MAX_VISITS = 4000
MAX_NESTED = 40  # reductions of reductions
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
    """What lies behind the roots. `unknown` names what was met that is no recorded loss; `complete` says that nothing was.

    `by_hand` holds the reductions that were taken for losses, which have a way like any other.
    """

    ways: dict[int, Way] = field(default_factory=dict)  # by id of the recorded call
    unknown: list[str] = field(default_factory=list)
    complete: bool = True
    by_hand: list[Any] = field(default_factory=list)

    def reaches(self, call: Any, operands: list[Operand] | None) -> None:
        self.ways[id(call)] = Way(None if id(call) in self.ways else operands)

    def takes(self, other: Found) -> None:
        """Adds what lies behind a node on the way."""
        for name, way in other.ways.items():
            self.ways[name] = Way(None) if name in self.ways else way
        self.by_hand += [call for call in other.by_hand if call not in self.by_hand]

    def stops(self, name: str) -> None:
        self.complete = False
        if name not in self.unknown and len(self.unknown) < MAX_NAMES:
            self.unknown.append(name)


def search(roots: tuple[Any, ...], readable: Callable[[Any], bool], counts: Callable[[Any, Path], bool] | None = None) -> Found:
    """Walks from the roots to the recorded losses.

    `readable` says of a recorded call whether the scalars that multiplications have saved since may be read: a checkpoint
    unpacks its saved tensors only once. With `counts` a reduction behind which no recorded loss lies is one itself, where
    `counts` says so of its node and the way to it.
    """
    found = Found()
    waiting: list[tuple[Any, int, Path]] = []
    for root in roots:
        if root.grad_fn is not None:
            waiting.append((root.grad_fn, root.output_nr, None))
        elif root.requires_grad:
            found.stops("a leaf")
    _Walk(readable, counts).to(found, waiting, 0)
    return found


@dataclass(slots=True)
class _Walk:
    readable: Callable[[Any], bool]
    counts: Callable[[Any, Path], bool] | None
    left: int = MAX_VISITS

    def to(self, found: Found, waiting: list[tuple[Any, int, Path]], depth: int) -> None:
        while waiting:
            if not self.left:
                found.stops("a graph of many operations")
                return
            self.left -= 1
            node, output, path = waiting.pop()
            metadata = node.metadata
            call = metadata.get(MARK, {}).get(output)
            if call is not None:
                found.reaches(call, _operands_along(path, self.readable(call)))
            elif self.counts is not None and BY_HAND in metadata and depth < MAX_NESTED:
                self._reduction(found, node, path, depth)
            elif _linear(node) is None:
                found.stops(node.name().removeprefix("torch::autograd::"))
            else:
                waiting += _steps(node, output, path)

    def _reduction(self, found: Found, node: Any, path: Path, depth: int) -> None:
        """The losses that are reduced here; the reduction itself where there are none."""
        behind, call = Found(), node.metadata[BY_HAND]
        self.to(behind, _steps(node, 0, path), depth + 1)
        if behind.complete and behind.ways:
            found.takes(behind)
        elif self.counts is not None and self.counts(node, path):
            found.reaches(call, _operands_along(path, self.readable(call)))
            found.takes(Found(by_hand=[call]))
        else:
            for name in behind.unknown or ["a leaf"]:
                found.stops(name)


def _steps(node: Any, output: int, path: Path) -> list[tuple[Any, int, Path]]:
    return [(each, number, (path, node, side)) for side, each, number in _following(node, output)]


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
    operation = operation_of(name)
    branches = [following is not None for following, _ in node.next_functions]
    if operation == "Mul":
        return operation if sum(branches) == 1 else None
    if operation == "Div":
        rounds = getattr(node, "_saved_rounding_mode", None) is not None
        return None if rounds or (len(branches) > 1 and branches[1]) else operation
    if operation in {"Neg", "Sub", "Rsub", "Mean"} or operation in _PASSING or operation in _SPREADING:
        return operation
    return None


def operation_of(name: str) -> str:
    """What a node of torch's own undoes, "" for others."""
    match = _NAME.fullmatch(name)
    return match.group(1) if match else ""


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
