"""torch.multiprocessing: the function that is run in several processes, each with its number in front."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import NONE, Function, Items, Partial, Value
from accumlint.source.vocabulary.base import Handler

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

LAUNCHERS = frozenset({"spawn", "start_processes"})


def spawn(state: Machine, call: Call) -> Value | None:
    """`mp.spawn(worker, args=(args,), nprocs=n)`: one of the processes is rehearsed."""
    if not call.path.startswith("torch.multiprocessing"):
        return None
    function = state.force(call.argument(0, "fn") or NONE)
    if not isinstance(function, (Function, Partial)):
        return None
    given = state.force(call.argument(1, "args") or NONE)
    rank = state.opaque(("call", "get_rank"), "rank", causes=frozenset({"rank"}), name="rank")
    state.call_value(function, [rank, *(given.items if isinstance(given, Items) else ())])
    return NONE


FUNCTIONS: dict[str, Handler] = dict.fromkeys(LAUNCHERS, spawn)
