"""mmengine's optimizer wrapper: its counter, its division, and what it does at the boundary."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import NONE, Known, Mapping, Opaque, Root, Value
from accumlint.source.vocabulary.engines import ONE, division
from accumlint.source.vocabulary.torch_training import emit_backward, replace_loss
from accumlint.trace import Actor, Kind
from accumlint.weight import Factor

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

SETTING = "accumulative_counts"


@dataclass(eq=False)
class OptimWrapper:
    """One optimizer wrapper in a rehearsal. `k` is None where the wrapper was made elsewhere."""

    optimizer: Actor
    k: Known | None
    scaler: Actor | None
    clips: bool
    count: int = 0
    total: int | None = None  # of micro-batches in the run, where the wrapper was told

    def window(self, state: Machine) -> Known:
        """K: the wrapper's own, or the one that the code around a wrapper made elsewhere speaks of."""
        if self.k is not None:
            return self.k
        roots = list(state.world.knowledge.accumulations.values())
        return Known(state.world.k, frozenset({roots[0]}), roots[0]) if roots else ONE

    def assume_accumulation(self, state: Machine, node: ast.AST) -> None:
        """Takes the wrapper for one that accumulates: what is done with it makes no sense otherwise."""
        root = Root(("mmengine", SETTING), SETTING)
        state.world.knowledge.accumulations.setdefault(root.key, root)
        self.k = Known(state.world.k, frozenset({root}), root)

    def updates(self, state: Machine, count: int) -> bool:
        """Whether the wrapper steps after so many backwards."""
        size = self.window(state).value
        assert isinstance(size, int)
        return count % size == 0 or count == self.total

    def told(self, state: Machine, answer: bool) -> Known:
        """The wrapper's answer to a question about the boundary, as a condition that K gates."""
        root = self.window(state).root
        roots = frozenset({root}) if root is not None else frozenset()
        return Known(answer, roots, None, roots)

    def division(self, state: Machine, node: ast.AST) -> tuple[Factor, ...]:
        """What the wrapper divides a loss by: K, or the size of a last window that is shorter."""
        k = self.window(state)
        assert isinstance(k.value, int)
        factors = division(state, k, node, SETTING)
        rest = self.total % k.value if self.total is not None else 0
        if rest and self.total is not None and self.count >= self.total - rest:
            return tuple(replace(factor, value=Fraction(rest)) for factor in factors)
        return factors

    def update(self, state: Machine, call: Call, loss: Value) -> None:
        """`update_params`."""
        self.backward(state, call, loss, self.division(state, call.node))
        if self.updates(state, self.count):
            self.step(state, call.node)
            self.zero(state, call.node)

    def backward(self, state: Machine, call: Call, loss: Value, factors: tuple[Factor, ...] = ()) -> Value:
        if isinstance(loss, Opaque) and self.scaler is not None:
            loss = replace_loss(state, loss, self.scaler)
        if factors:
            state.recorder.fact("engine-divides", call.node)
        emit_backward(state, call, loss, factors=factors)
        self.count += 1
        return NONE

    def step(self, state: Machine, node: ast.AST) -> Value:
        targets = (self.optimizer,)
        if self.clips:
            if self.scaler is not None:
                state.recorder.emit(Kind.UNSCALE, node, targets=targets, scaler=self.scaler)
            state.recorder.emit(Kind.CLIP, node, targets=targets)
        state.recorder.emit(Kind.STEP, node, targets=targets, scaler=self.scaler)
        if self.scaler is not None:
            state.recorder.emit(Kind.SCALER_UPDATE, node, scaler=self.scaler)
        return NONE

    def zero(self, state: Machine, node: ast.AST) -> Value:
        state.recorder.emit(Kind.ZERO, node, targets=(self.optimizer,))
        return NONE


def total_of(state: Machine, losses: Value, node: ast.AST) -> Value:
    """The loss that a dict of losses adds up to; that of one not followed is a mean."""
    if isinstance(losses, Mapping):
        terms = [value for name, value in losses.items.items() if "loss" in str(name)]
        return state.force(terms[0]) if len(terms) == 1 else state.opaque(("sum", id(node), state.steps), "loss", *terms, attached=True)
    return state.attribute(losses, "loss", node)
