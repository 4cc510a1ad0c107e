"""How many elements of a sum by hand count: those that its mask leaves. A loss that is zero by itself still counts."""

from __future__ import annotations

from typing import Any

from accumlint.runtime.ledger.graph import operation_of

MAX_STEPS = 8
# Operations that keep the number of elements.
_KEEPING = frozenset("Neg Div View UnsafeView ReshapeAlias Squeeze Unsqueeze ToCopy Clone Alias T Transpose Permute".split())


def valid_elements(summed: Any, readable: bool) -> Any:
    """A number, or a tensor of one element. Where the mask cannot be read, or is one of several, the elements other than zero."""
    elements = summed.numel()
    try:
        found = [_left(mask, keeps, elements) for mask, keeps in _masks(summed.grad_fn)] if readable else [None]
    except Exception:
        found = [None]  # changed in place since, or of another version of torch
    if not found:
        return elements
    return _not_zero(summed) if len(found) > 1 or found[0] is None else found[0]


def _not_zero(tensor: Any) -> Any:
    return (tensor.detach() != 0).sum()  # several times as fast as torch.count_nonzero on a CPU


def _left(mask: Any, keeps: bool, elements: int) -> Any:
    size = mask.numel()
    if not size or elements % size:
        return None
    number = _not_zero(mask) * (elements // size)
    return number if keeps else elements - number


def _masks(node: Any) -> list[tuple[Any, bool]]:
    """The tensors that select or weigh the elements, with whether what is not zero in them is kept."""
    found: list[tuple[Any, bool]] = []
    for _ in range(MAX_STEPS):
        if node is None:
            break
        operation = operation_of(node.name())
        branches = [following for following, _ in node.next_functions]
        if operation not in _KEEPING and (operation not in {"Mul", "MaskedFill", "Where"} or sum(map(bool, branches)) != 1):
            break
        if operation == "Mul":
            factor = node._saved_other if branches[0] is not None else node._saved_self
            if factor.numel() != 1:
                found.append((factor, True))
        elif operation == "MaskedFill":
            found.append((node._saved_mask, False))
        elif operation == "Where":
            # The inputs that have nodes are the two values; the condition has none.
            found.append((node._saved_condition, branches.index(next(filter(None, branches))) == len(branches) - 2))
        node = next(filter(None, branches), None)
    return found
