"""torchtune (0.2 to 0.7): recipes that weigh mean losses by their tokens and scale the gradients by those of the window.

Its losses are means over the tokens that are not ignored. FSDP2 averages over the ranks, so the gradients are scaled by the number of
ranks over all tokens. Nothing in it gates or divides by itself: the loop is the recipe's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import Items, Value
from accumlint.source.vocabulary import distributed
from accumlint.source.vocabulary.base import Handler

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"torchtune"})


def world_size_and_rank(state: Machine, call: Call) -> Value | None:
    """`get_world_size_and_rank()`."""
    world = distributed.world_size(state, call)
    rank = distributed.rank(state, call)
    return Items([world, rank], "tuple") if world is not None and rank is not None else None


FUNCTIONS: dict[str, Handler] = {"get_world_size_and_rank": world_size_and_rank}
