"""Whether a value depends on the data that a model was given, or on parameters alone: a penalty is no loss of targets."""

from __future__ import annotations

from typing import Any

from accumlint.runtime.ledger.graph import MARK, MAX_VISITS, PASSAGE, Path, operation_of

# Where a layer takes its input in; an input that is data has no node.
_TAKES_DATA: dict[str, tuple[int, ...]] = {
    "Addmm": (1, 2),
    "Addmv": (1, 2),
    "Baddbmm": (1, 2),
    "Bmm": (0, 1),
    "Convolution": (0,),
    "Linear": (0,),
    "Mm": (0, 1),
    "Mv": (0, 1),
}
_SLOPE = "BackwardBackward"  # in the names of what a gradient of a gradient goes through
_TAKES_INDICES = frozenset({"Embedding", "EmbeddingBag"})


def comes_from_a_forward(node: Any, path: Path) -> bool:
    """Whether what a node reduces comes out of a recorded forward, and neither a recorded loss nor a gradient lies between.

    Inside of a forward, which lies on the path to the node then, a layer that takes data must lie behind it. In doubt, no.
    """
    inside = _passes(node, path)
    seen: set[Any] = set()
    waiting = [node]
    comes = False
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        if len(seen) >= MAX_VISITS:
            return False
        seen.add(each)
        if each is not node:
            metadata = each.metadata
            if MARK in metadata or _SLOPE in each.name():
                return False
            if PASSAGE in metadata:
                comes = True
                continue
        if inside and _takes_data(each):
            return True
        waiting += [following for following, _ in each.next_functions if following is not None]
    return comes


def _passes(node: Any, path: Path) -> bool:
    if PASSAGE in node.metadata:
        return True
    while path is not None:
        path, each, _ = path
        if PASSAGE in each.metadata:
            return True
    return False


def _takes_data(node: Any) -> bool:
    operation = operation_of(node.name())
    inputs = node.next_functions
    return operation in _TAKES_INDICES or any(side < len(inputs) and inputs[side][0] is None for side in _TAKES_DATA.get(operation, ()))
