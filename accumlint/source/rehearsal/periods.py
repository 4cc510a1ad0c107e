"""What tests take counters modulo of: of several periods that of the step is K."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from accumlint.source.reading.nodes import every, walk
from accumlint.trace import Kind

if TYPE_CHECKING:
    from accumlint.source.rehearsal.state import State

UPDATES = frozenset({Kind.STEP, Kind.SCALER_UPDATE})


def clears_otherwise(state: State, node: ast.If) -> bool:
    """`if step % eval_every == 0: …; zero_grad()` beside `if step % k == 0: optimizer.step()`: the period of the step is K."""
    function = state.frame.function
    if UPDATES & (state.index.kinds(node.body) | state.index.kinds(node.orelse)) or function is None:
        return False
    own = _moduli(node.test)
    others = state.index.once("periods of steps", function.node, lambda one: _periods_of_steps(state, one))
    return bool(own and others) and own.isdisjoint(others)


def is_modulus(test: ast.expr, text: str) -> bool:
    """Whether a test takes something modulo what is spelled so."""
    return any(text in modulus for modulus in _moduli(test))


def _periods_of_steps(state: State, function: ast.AST) -> frozenset[str]:
    gates = (part for part in every(function, ast.If) if isinstance(part, ast.If))
    steps = (gate.test for gate in gates if UPDATES & state.index.kinds(gate.body) and state.gates_update(gate.body))
    return frozenset[str]().union(*map(_moduli, steps))


def _moduli(test: ast.expr) -> frozenset[str]:
    return frozenset(ast.unparse(part.right) for part in walk(test) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod))
