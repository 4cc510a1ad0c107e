"""Catalyst (21 to 22): the callbacks with which a runner goes backward and steps.

`OptimizerCallback(accumulation_steps=K)` gates the step and the zero only: nobody divides by K. `BackwardCallback` clips in every batch.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.iterate import MOST_TURNS
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import NONE, Instance, Items, Known, Mapping, Opaque, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary.base import Handler, as_actor, receiver_of
from accumlint.source.vocabulary.engines import accumulation, literal_of
from accumlint.source.vocabulary.played import entered, kinds_of, turn
from accumlint.source.vocabulary.torch_training import emit_backward
from accumlint.trace import Actor, Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"catalyst"})
SETTING = "accumulation_steps"
SIEVE = ((b"OptimizerCallback", b"catalyst"),)


@dataclass(eq=False)
class Callback:
    """A callback with the call that made it; K is that of an OptimizerCallback."""

    call: Call
    k: Known | None = None


def optimizer_callback(state: Machine, call: Call) -> Value | None:
    """`OptimizerCallback("loss", accumulation_steps=K)`."""
    state.covered.add(id(call.node))
    return _made(state, Callback(call, accumulation(state, call.argument(1, SETTING), literal_of(call, SETTING, 1), SETTING)))


def backward_callback(state: Machine, call: Call) -> Value | None:
    """`BackwardCallback("loss", grad_clip_fn=…)`."""
    return _made(state, Callback(call))


def _made(state: Machine, callback: Callback) -> Thing:
    made = Thing(make_actor(Role.OTHER, callback.call.name))
    state.memory[("catalyst", made.actor.uid)] = callback
    return made


def train(state: Machine, call: Call) -> Value | None:
    """`runner.train(model=…, loaders=…, callbacks=[…])`."""
    given = state.force(call.keywords["callbacks"]) if "callbacks" in call.keywords else NONE
    parts = given.items if isinstance(given, Items) else list(given.items.values()) if isinstance(given, Mapping) else []
    known = [one for part in parts if (one := _callback_of(state, part)) is not None]
    updating = next((one for one in known if one.k is not None), None)
    if updating is None:
        return None
    clipping = next((one for one in known if one.k is None), None)
    _Run(state, call, updating, clipping).play()
    return NONE


def _callback_of(state: Machine, value: Value) -> Callback | None:
    value = state.force(value)
    return state.memory.get(("catalyst", value.actor.uid)) if isinstance(value, Thing) else None


class _Run:
    """A runner's loop over one loader, with the callbacks in their order: backward, clip, step, zero."""

    def __init__(self, state: Machine, call: Call, updating: Callback, clipping: Callback | None) -> None:
        self.state = state
        self.call = call
        self.updating = updating
        self.clipping = clipping
        self.runner = state.force(receiver_of(call) or NONE)
        self.model = state.force(call.keywords.get("model", NONE))
        optimizer = state.force(call.keywords.get("optimizer", NONE))
        self.optimizer: Actor | None = as_actor(state, optimizer, Role.OPTIMIZER)

    def play(self) -> None:
        line = self.call.node.lineno
        loaders = self.state.force(self.call.keywords.get("loaders", NONE))
        loader = loaders.items.get("train", NONE) if isinstance(loaders, Mapping) else loaders
        plan = self.state.plan(loader, self.call.node)
        count = min(plan.count, MOST_TURNS) if plan.data else self.state.world.batches
        entry = entered(self.state, line)
        for at in range(count):
            with turn(self.state, OpenTurn(line, at, entry, endless=True)):
                self.state.recorder.new_data()
                self._batch(plan.item(at) if plan.data else self.state.datum(self.call.node, "batch"), at + 1)

    def _batch(self, batch: Value, number: int) -> None:
        own = self.runner.cls.find("handle_batch") if isinstance(self.runner, Instance) else None
        if own is not None:
            self.state.call_value(self.state.attribute(self.runner, "handle_batch", self.call.node), [batch])
        if own is None or Kind.BACKWARD not in kinds_of(self.state, own):
            self._backward(self._loss(batch) if own is None else self._told_loss())
        self._update(number)

    def _backward(self, loss: Value) -> None:
        explicit = self.clipping.call if self.clipping is not None else self.call
        emit_backward(self.state, replace(explicit, args=[], keywords={}), loss)
        if self.clipping is not None and "grad_clip_fn" in self.clipping.call.keywords:
            self.state.recorder.emit(Kind.CLIP, self.clipping.call.node, targets=self._targets())

    def _update(self, number: int) -> None:
        k = self.updating.k.value if self.updating.k is not None else 1
        assert isinstance(k, int)
        if number % k == 0:
            self.state.recorder.emit(Kind.STEP, self.updating.call.node, targets=self._targets())
            self.state.recorder.emit(Kind.ZERO, self.updating.call.node, targets=self._targets())

    def _targets(self) -> tuple[Actor, ...]:
        return (self.optimizer,) if self.optimizer is not None else ()

    def _loss(self, batch: Value) -> Value:
        node: ast.Call = self.call.node
        inputs, targets = (self.state.item(batch, Known(at), node) for at in (0, 1))
        bare = replace(self.call, args=[inputs], keywords={})
        given = self.state.forward_of(bare, self.model) if actor_of(self.model) is not None else inputs
        return self.state.force(self.state.call_value(self.call.keywords.get("criterion", NONE), [given, targets], node))

    def _told_loss(self) -> Value:
        """What `handle_batch` put into `self.batch_metrics`."""
        node = self.call.node
        metrics = self.state.attribute(self.runner, "batch_metrics", node)
        found = self.state.force(self.state.item(metrics, Known("loss"), node))
        return found if isinstance(found, Opaque) else NONE


KINDS = {"OptimizerCallback": {Kind.BACKWARD, Kind.STEP, Kind.ZERO}}
LOOPS = ("OptimizerCallback",)
TRACKED = ("OptimizerCallback", "BackwardCallback")
FUNCTIONS: dict[str, Handler] = {"OptimizerCallback": optimizer_callback, "BackwardCallback": backward_callback}
METHODS: dict[str, Handler] = {**FUNCTIONS, "train": train}
