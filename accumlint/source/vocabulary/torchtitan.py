"""torchtitan (0.1 to 0.2): recipes that fetch a window first and divide each sum of losses by the valid tokens of all ranks.

Its sharding is told to divide by nothing (`set_gradient_divide_factor(1.0)`), so nothing is multiplied by the number of ranks. The loop
is the recipe's own; what it shares with others are the reductions of `torchtitan.distributed.utils`, which give back a number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import Value
from accumlint.source.vocabulary import distributed
from accumlint.source.vocabulary.base import Handler

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"torchtitan"})


def dist_sum(state: Machine, call: Call) -> Value | None:
    """`dist_sum(count, mesh)`: the count of all ranks."""
    first = call.argument(0, "x")
    return distributed.all_reduce(state, replace(call, args=[first], keywords={})) if first is not None else None


FUNCTIONS: dict[str, Handler] = {"dist_sum": dist_sum, "dist_sum_tensor": dist_sum}
METHODS: dict[str, Handler] = dict(FUNCTIONS)
