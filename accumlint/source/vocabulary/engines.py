"""What the vocabularies of engines share: K as it is given to one, and the division that an engine does by itself."""

from __future__ import annotations

import ast
from fractions import Fraction
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import Known, Opaque, Root, Value
from accumlint.trace import Actor, Role
from accumlint.weight import Factor, Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

ONE = Known(1)
HALF = frozenset({16, "16", "16-mixed"})  # the precisions that bring a scaler, as Lightning's Trainer and Fabric spell them


def precision_scaler(state: Machine) -> Actor:
    """The scaler of a precision plugin: the framework's own, which unscales before the step."""
    return Actor(state.uid(), "the precision plugin", Role.SCALER, known=True)


def literal_of(call: Call, name: str, position: int | None = None) -> ast.AST | None:
    """The expression that a call gives for an argument."""
    for keyword in call.node.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.node.args[position] if position is not None and position < len(call.node.args) else None


def accumulation(state: Machine, value: Value | None, node: ast.AST | None, name: str) -> Known:
    """K as an engine is told it: the number of this world, or 1 where nothing is given or the code fixes it to 1.

    An open setting that is given for K is K, whatever it is called: learning that restarts the rehearsal once.
    """
    if value is None:
        return ONE
    value = state.force(value)
    if isinstance(node, ast.Constant) and node.value == 1:
        return ONE
    value = state.named_constant(name, node, value)
    root = value.root if isinstance(value, Known) else Root(value.key, value.text or name) if isinstance(value, Opaque) else None
    if root is not None and root.kind in {"setting", "constant"}:
        state.world.knowledge.learn_accumulation(root)
        return Known(state.world.k, frozenset({root}), root)
    number = state.number(value)
    return number if number is not None and isinstance(number.value, int) and number.value >= 1 else ONE


def division(state: Machine, k: Known, node: ast.AST, text: str) -> tuple[Factor, ...]:
    """What dividing by its K makes of a loss that goes through an engine; nothing for an engine whose K is 1."""
    if k.value == 1:
        return ()
    root = k.root.text if k.root is not None else text
    return (Factor(Quantity.ACCUMULATION, -1, Fraction(k.value), text, state.recorder.place(node), implicit=True, root=root),)
