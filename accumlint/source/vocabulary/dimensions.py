"""What a reduction of a tensor runs over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import Known, Value

if TYPE_CHECKING:
    from accumlint.source.rehearsal.state import Call


def _dimension(call: Call) -> Value | None:
    """What a reduction is told to run over."""
    own = call.args[1:] if call.path.startswith("torch.") and not call.path.endswith("nn") else call.args
    return call.keywords.get("dim", call.keywords.get("axis", own[0] if own else None))


def has_dimension(call: Call) -> bool:
    return _dimension(call) is not None


def is_over_samples(call: Call) -> bool:
    """`losses.mean(0)`: what is left are the elements of one sample."""
    dimension = _dimension(call)
    return isinstance(dimension, Known) and type(dimension.value) is int and dimension.value == 0
