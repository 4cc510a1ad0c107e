"""Megatron core 0.20: `forward_step` gives what the model returned and a loss function, which the schedule calls for every micro-batch.

The schedule divides a loss that comes with its report alone by the number of micro-batches; one that comes with a number of tokens as
well is divided by them. Steps and synchronisation are the framework's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.arithmetic import OF_EACH
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import Call
from accumlint.source.rehearsal.values import NONE, Function, Items, Known, Opaque, Root, Thing, make_actor
from accumlint.source.vocabulary.base import Entry
from accumlint.source.vocabulary.engines import division
from accumlint.source.vocabulary.played import entered, name_helper, turn
from accumlint.source.vocabulary.torch_training import emit_backward
from accumlint.trace import Evidence, Kind, Role
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

PACKAGES = frozenset({"megatron"})
SIEVE = ((b"def forward_step", b"megatron"),)

K_TEXT = "get_num_microbatches()"
STEPS = frozenset({"forward_step", "forward_step_func"})
LOSS_AND_REPORT = 2  # with a number of tokens between them, the schedule divides by that


def entries(index: Index) -> Iterator[Entry]:
    """The forward steps of the source that give a loss function."""
    for name in sorted(STEPS):
        for function in index.functions.get(name, ()):
            if function not in index.owner and len(function.args.args) >= 2 and _returned(function) is not None:
                yield Entry(function, drive)


def _returned(function: FunctionNode) -> ast.Return | None:
    """`return output, partial(loss_func, loss_mask)`."""
    for part in walk(function):
        if isinstance(part, ast.Return) and isinstance(part.value, ast.Tuple) and len(part.value.elts) == 2:
            given = part.value.elts[1]
            if isinstance(given, ast.Name) or (isinstance(given, ast.Call) and terminal(given.func) == "partial"):
                return part
    return None


def drive(state: Machine, function: Function) -> None:
    """Plays two windows; that there are several micro-batches in one is only assumed, unless the loss is divided by their number."""
    returned = _returned(function.node) if not isinstance(function.node, ast.Lambda) else None
    if returned is None:
        return
    root = Root(("megatron", "k"), K_TEXT)
    state.world.knowledge.learn_accumulation(root)
    k = Known(state.world.k, frozenset({root}), root)
    model, optimizer = Thing(make_actor(Role.MODEL, "model")), make_actor(Role.OPTIMIZER, "optimizer")
    batches = state.opaque(("megatron", "batches"), "data_iterator")
    node = ast.copy_location(ast.Call(ast.Name("forward_step", ast.Load()), [], []), returned)
    entry = entered(state, function.node.lineno)
    for at in range(2 * state.world.k):
        with turn(state, OpenTurn(function.node.lineno, at, entry, endless=True, micro=True)):
            state.recorder.new_data()
            begun = len(state.recorder.events)
            given = state.force(state.call_function(function, [batches, model], {}, None))
            loss = _loss(state, given)
            if loss is None:
                return
            if loss.weight is None or not loss.weight.of(Quantity.ACCUMULATION):
                state.recorder.fact("assumes-k", function.node)
            name_helper(state, function.node, begun)
            emit_backward(state, Call(node, "backward", "", NONE, None, [loss], {}), loss, factors=division(state, k, node, K_TEXT))
            if (at + 1) % state.world.k == 0:
                for kind in (Kind.STEP, Kind.ZERO):
                    state.recorder.emit(kind, node, targets=(optimizer,), options=frozenset({"gated"}))


def _loss(state: Machine, given: object) -> Opaque | None:
    """The loss that the schedule divides by the number of micro-batches; None where it divides by tokens, or nobody knows."""
    if not isinstance(given, Items) or len(given.items) != 2:
        return None
    output = state.force(given.items[0])
    if isinstance(output, Opaque):
        output.causes |= {OF_EACH}
    made = state.force(state.call_value(given.items[1], [output]))
    if not isinstance(made, Items) or len(made.items) != LOSS_AND_REPORT:
        return None
    loss = state.force(made.items[0])
    if isinstance(loss, Opaque) and loss.weight is not None:
        terms = tuple(replace(term, weight=_masks_vary(state, term.weight)) for term in loss.weight.terms)
        loss.weight = replace(_masks_vary(state, loss.weight), terms=terms)
    return loss if isinstance(loss, Opaque) and loss.forwards else None


def _masks_vary(state: Machine, weight: Weight) -> Weight:
    """The sum of a loss mask counts what it leaves, which may be nothing."""
    found: list[Factor] = []
    for factor in weight.factors:
        masks = factor.quantity is Quantity.UNITS and not factor.implicit and "mask" in factor.text
        if masks and factor.place is not None and not factor.guarded:
            known = state.recorder.facts.setdefault("may-lose-targets", [])
            known.append(Evidence(factor.place, "a mask may leave none"))
        found.append(replace(factor, uneven=True) if masks else factor)
    return replace(weight, factors=tuple(found))
