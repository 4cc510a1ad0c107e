"""mmcv (0.2 to 1.7): the hooks of its runner that go backward and step in the place of its own OptimizerHook.

The runner calls the model on each batch and then `after_train_iter(runner)` of the hook, with the loss in `runner.outputs`. The model is
wrapped by MMDistributedDataParallel where a launcher says so, and nothing switches the synchronisation off.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.index import Index
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import Call, unshifted
from accumlint.source.rehearsal.values import NONE, Function, Known, Mapping, Opaque, Root, Thing, Value, make_actor
from accumlint.source.vocabulary.base import Entry, Handler
from accumlint.source.vocabulary.played import turn
from accumlint.trace import Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

PACKAGES = frozenset({"mmcv"})
HOOK = "OptimizerHook"
METHOD = "after_train_iter"
COUNTERS = ("iter", "inner_iter", "_iter", "_inner_iter")  # of the batches before this one


def entries(index: Index) -> Iterator[Entry]:
    """The `after_train_iter` methods of optimizer hooks."""
    for cls in index.classes.values():
        if not any(terminal(base).endswith(HOOK) for base in cls.bases):
            continue
        for member in index.class_methods(cls):
            if member.name == METHOD and Kind.BACKWARD in index.kinds(member):
                yield Entry(member, drive)


def drive(state: Machine, function: Function) -> None:
    """Calls the hook as the runner does after each batch, with the loss of a model that may be wrapped; no tail is judged."""
    node = function.node
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    runner = state.opaque(("parameter", function.name, "runner"), "runner", name="runner")
    actor = make_actor(Role.MODEL, "runner.model", wrapper=Wrapper.DDP)
    model = runner.attributes["model"] = Thing(replace(actor, options=frozenset({"optional"})))
    state.recorder.fact("distributed", node)
    for at in range(state.world.batches):
        with turn(state, OpenTurn(node.lineno, at, 0, endless=True, micro=True)):
            state.recorder.new_data()
            runner.attributes |= dict.fromkeys(COUNTERS, Known(at))
            runner.attributes["outputs"] = Mapping({"loss": _loss(state, node, model)}, ("outputs", at), "runner.outputs")
            state.call_function(function, [runner], {}, None)


def _loss(state: Machine, node: ast.AST, model: Thing) -> Opaque:
    """What the model gave for this batch: a sum of losses whose making nobody has seen."""
    event = state.recorder.emit(Kind.FORWARD, node, model=model.actor, sync=state.synced(model), reaches=frozenset({model.actor.uid}))
    state.models[event.index] = model
    return state.opaque(("loss", event.index), "loss", forwards=frozenset({event.index}), attached=True, causes=frozenset({"loss"}))


def every(state: Machine, call: Call) -> Value | None:
    """`self.every_n_iters(runner, n)`: at every n-th batch."""
    period = state.force(call.argument(1, "n") or NONE)
    root: Root | None = period.root if isinstance(period, Known) else unshifted(period)[0] if isinstance(period, Opaque) else None
    if root is None or not state.recorder.turns:
        return None
    number = state.world.number(root)
    holds = bool(number) and (state.recorder.turns[-1].index + 1) % (number or 1) == 0
    return Known(holds, frozenset({root}), None, frozenset({root}), call.node)


METHODS: dict[str, Handler] = {"every_n_iters": every}
