"""What a loss function counts: how many valid targets are in one call, and which of its elements they are.

A unit is what the function's own mean runs over: a valid target of a cross entropy (with class weights, one of weight),
one element of the unreduced loss elsewhere, a sequence of CTC. Everything stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = {NONE: "none", MEAN: "mean", SUM: "sum"}
IGNORED = -100

Arguments = Mapping[str, Any]


@dataclass(slots=True)
class Units:
    """The units of one call.

    `count` is a number, or a tensor of one element on the loss's device. `valid` marks the elements of an unreduced loss that
    count (None: all), `each` is the number of units in each of them (None: one). `factor` is what torch.nn.functional multiplies an
    unreduced loss by afterwards (its weight for each element).
    """

    count: Any
    elements: int
    sequences: int | None
    valid: Any = None
    each: Any = None
    factor: Any = None


Count = Callable[[Arguments], Units]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss function: the name that users know, its parameters in order, and how its units are counted."""

    name: str
    parameters: tuple[str, ...]
    count: Count

    def arguments(self, given: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.parameters, given, strict=False)), **named}


def targets(arguments: Arguments) -> Units:
    """Class indices, of which some may be ignored, or a probability for each class."""
    scores, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
    if target.is_floating_point():
        classes = scores.shape[0 if scores.dim() == 1 else 1]
        positions = scores.numel() // max(classes, 1)
        return Units(positions, positions, _sequences(target))
    ignored = arguments.get("ignore_index")
    valid = target != (IGNORED if ignored is None else ignored)
    if weight is None:
        return Units(valid.sum(), target.numel(), _sequences(target), valid)
    each = weight.detach()[target.clamp(0, weight.shape[0] - 1)].masked_fill(~valid, 0)
    return Units(each.sum(), target.numel(), _sequences(target), valid, each)


def elements(*names: str) -> Count:
    """One unit an element of what these arguments broadcast to."""

    def count(arguments: Arguments) -> Units:
        shape = _broadcast(arguments, names)
        return Units(shape.numel(), shape.numel(), shape[0] if len(shape) > 1 else None)

    return count


def pairs(*names: str) -> Count:
    """One unit a vector: the last dimension of what these arguments broadcast to is used up."""

    def count(arguments: Arguments) -> Units:
        shape = torch.Size(_broadcast(arguments, names)[:-1])
        return Units(shape.numel(), shape.numel(), shape[0] if len(shape) > 1 else None)

    return count


def samples(arguments: Arguments) -> Units:
    """One unit a row of the input."""
    scores = arguments["input"]
    number = scores.shape[0] if scores.dim() > 1 else 1
    return Units(number, number, None)


def sequences(arguments: Arguments) -> Units:
    """One unit a sequence. The mean divides each by its own length first: its unit is then the loss of one label."""
    scores = arguments["log_probs"]
    number = scores.shape[1] if scores.dim() == 3 else 1
    return Units(number, number, number)


def _broadcast(arguments: Arguments, names: tuple[str, ...]) -> torch.Size:
    shapes: Any = torch.broadcast_shapes  # has no types
    return torch.Size(shapes(*(arguments[name].shape for name in names)))


def _sequences(target: Any) -> int | None:
    return int(target.shape[0]) if target.dim() >= 2 else None


_CLASSES = ("input", "target", "weight", "reduction", "ignore_index")
_PLAIN = ("input", "target", "reduction")
_element = elements("input", "target")

# By the name under which torch.nn.functional looks them up in torch._C._nn …
IN_NN: dict[str, Loss] = {
    "cross_entropy_loss": Loss("cross_entropy", (*_CLASSES, "label_smoothing"), targets),
    "nll_loss_nd": Loss("nll_loss", _CLASSES, targets),
    "nll_loss": Loss("nll_loss", _CLASSES, targets),
    "nll_loss2d": Loss("nll_loss", _CLASSES, targets),
    "mse_loss": Loss("mse_loss", _PLAIN, _element),
    "l1_loss": Loss("l1_loss", _PLAIN, _element),
    "smooth_l1_loss": Loss("smooth_l1_loss", (*_PLAIN, "beta"), _element),
    "huber_loss": Loss("huber_loss", (*_PLAIN, "delta"), _element),
    "binary_cross_entropy": Loss("binary_cross_entropy", ("input", "target", "weight", "reduction"), _element),
    "soft_margin_loss": Loss("soft_margin_loss", _PLAIN, _element),
    "multi_margin_loss": Loss("multi_margin_loss", ("input", "target", "p", "margin", "weight", "reduction"), samples),
    "multilabel_margin_loss": Loss("multilabel_margin_loss", _PLAIN, samples),
}
# … and in torch.
IN_TORCH: dict[str, Loss] = {
    "binary_cross_entropy_with_logits": Loss(
        "binary_cross_entropy_with_logits", ("input", "target", "weight", "pos_weight", "reduction"), _element
    ),
    "kl_div": Loss("kl_div", (*_PLAIN,), _element),
    "ctc_loss": Loss(
        "ctc_loss", ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity"), sequences
    ),
    "poisson_nll_loss": Loss("poisson_nll_loss", ("input", "target", "log_input", "full", "eps", "reduction"), _element),
    "margin_ranking_loss": Loss(
        "margin_ranking_loss", ("input1", "input2", "target", "margin", "reduction"), elements("input1", "input2", "target")
    ),
    "triplet_margin_loss": Loss(
        "triplet_margin_loss",
        ("anchor", "positive", "negative", "margin", "p", "eps", "swap", "reduction"),
        pairs("anchor", "positive", "negative"),
    ),
    "cosine_embedding_loss": Loss(
        "cosine_embedding_loss", ("input1", "input2", "target", "margin", "reduction"), pairs("input1", "input2")
    ),
    "hinge_embedding_loss": Loss("hinge_embedding_loss", ("input", "target", "margin", "reduction"), _element),
}


def reduction(arguments: Arguments) -> int:
    """How a call reduces its loss; a name is taken for its number."""
    given = arguments.get("reduction", MEAN)
    if isinstance(given, str):
        return {name: number for number, name in REDUCTIONS.items()}.get(given, MEAN)
    return MEAN if given is None else int(given)
