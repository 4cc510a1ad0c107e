"""What a number makes of a weight that it multiplies or divides: K, the number of ranks, or a plain number."""

from __future__ import annotations

import ast
import re
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from accumlint.source.rehearsal.counts import last_part
from accumlint.source.rehearsal.values import Known, Root
from accumlint.weight import Factor, Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.state import State

LARGEST_NUMBER = 10**12
WORLD_NAME = re.compile(
    r"world_size|num_processes|n_?gpus?$|num_gpus|dp_size|num_replicas|ddp_world|nprocs|(^|_)world$|dp_degree|data_parallel_size",
    re.IGNORECASE,
)


@lru_cache(8_192)
def counts_ranks(text: str) -> bool:
    """Whether a number is one of ranks, by its name."""
    return "//" not in text and WORLD_NAME.search(last_part(text)) is not None  # a share of something is no number of ranks


def fraction(value: Any) -> Fraction | None:
    """A finite number as a fraction; None for anything else."""
    if isinstance(value, (int, float, Fraction)) and -LARGEST_NUMBER < value < LARGEST_NUMBER:
        return Fraction(value).limit_denominator(10**6)
    return None


def _in_place_again(state: State, value: Known, power: int, node: ast.AST) -> Root | None:
    """The K that a number in place is, written out once more: `Accelerator(gradient_accumulation_steps=4)` and `loss / 4`.

    A half may be the mean of two losses.
    """
    if power > 0 or not isinstance(node, ast.Constant) or type(value.value) is not int or value.value <= 2:
        return None
    known = state.world.knowledge.accumulations.values()
    return next((root for root in known if root.kind == "constant" and root.default == value.value), None)


def number_factor(state: State, value: Known, power: int, node: ast.AST, text: str, place: Any) -> Factor:
    accumulations = state.world.knowledge.accumulations
    number = fraction(value.value)
    own = [root for root in value.roots if root.key in accumulations or root.kind == "window"]
    again = _in_place_again(state, value, power, node)
    if again is not None:
        return Factor(Quantity.ACCUMULATION, power, Fraction(state.world.k), text, place, root=again.text)
    if own and number is not None and 0 < number < 1:
        power, number = -power, 1 / number  # 1 / K, worked out before
    if own:
        return Factor(Quantity.ACCUMULATION, power, number, text, place, root=own[0].text)
    if counts_ranks(text):
        return Factor(Quantity.WORLD, power, None, text, place)
    literal = isinstance(node, ast.Constant) or isinstance(value.value, float) or bool(value.roots)
    if not literal and power < 0 and number is not None:
        return Factor(Quantity.ACCUMULATION, power, number, text, place, root=text)
    return Factor(Quantity.CONSTANT, power, number, text, place, root=value.root.text if value.root is not None else "")
