"""Ignite's own update functions: `supervised_training_step` and what `create_supervised_trainer` makes."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import NONE, Known, Opaque, Value, actor_of
from accumlint.source.vocabulary.base import as_actor
from accumlint.source.vocabulary.engines import accumulation, division, literal_of
from accumlint.source.vocabulary.torch_training import emit_backward, replace_loss
from accumlint.trace import Actor, Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

SETTING = "gradient_accumulation_steps"


@dataclass(eq=False)
class Supervised:
    """One of Ignite's update functions, with what it was made from."""

    call: Call
    model: Value
    optimizer: Actor | None
    criterion: Value
    k: Known
    scaler: Actor | None

    @classmethod
    def of(cls, state: Machine, call: Call) -> Supervised:
        """What a call that makes one says."""
        k = accumulation(state, call.keywords.get(SETTING), literal_of(call, SETTING), SETTING)
        scaler = state.force(call.keywords["scaler"]) if "scaler" in call.keywords else NONE
        off = isinstance(scaler, Known) and not scaler.value
        own = as_actor(state, scaler, Role.SCALER) or Actor(state.uid(), "scaler", Role.SCALER, known=True)
        optimizer = state.force(call.argument(1, "optimizer") or NONE)
        return cls(
            call,
            state.force(call.argument(0, "model") or NONE),
            as_actor(state, optimizer, Role.OPTIMIZER),
            state.force(call.argument(2, "loss_fn") or NONE),
            k,
            None if off else own,
        )

    def play(self, state: Machine, node: ast.Call, iteration: int, batch: Value) -> Value:
        """One iteration at the call that runs the engine: zero in the first of a window, step in the last."""
        assert isinstance(self.k.value, int)
        targets = (self.optimizer,) if self.optimizer is not None else ()
        if (iteration - 1) % self.k.value == 0:
            state.recorder.emit(Kind.ZERO, node, targets=targets)
        loss = self._loss(state, node, batch)
        if isinstance(loss, Opaque) and self.scaler is not None:
            loss = replace_loss(state, loss, self.scaler)
        emit_backward(state, self._bare(node), loss, factors=division(state, self.k, self.call.node, SETTING))
        if self.k.value > 1:
            state.recorder.fact("engine-divides", self.call.node)
        if iteration % self.k.value == 0:
            state.recorder.emit(Kind.STEP, node, targets=targets, scaler=self.scaler)
            if self.scaler is not None:
                state.recorder.emit(Kind.SCALER_UPDATE, node, scaler=self.scaler)
        return loss

    def _bare(self, node: ast.Call, *args: Value) -> Call:
        return replace(self.call, node=node, args=list(args), keywords={})

    def _loss(self, state: Machine, node: ast.Call, batch: Value) -> Value:
        inputs, targets = (state.item(batch, Known(at), node) for at in (0, 1))
        given = state.forward_of(self._bare(node, inputs), self.model) if actor_of(self.model) else self.model
        return state.force(state.call_value(self.criterion, [given, targets], node))
