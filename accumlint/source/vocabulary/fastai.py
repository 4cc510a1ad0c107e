"""fastai (2.0 to 2.8): a Learner with the callback `GradientAccumulation`, which divides and gates by itself.

`n_acc` counts samples, over the epochs; the step, the zero and the clips of later callbacks are held back until so many have been seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.iterate import MOST_TURNS
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import NONE, Items, Known, Root, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary.base import Handler, receiver_of
from accumlint.source.vocabulary.engines import accumulation, division, literal_of
from accumlint.source.vocabulary.played import entered, turn
from accumlint.source.vocabulary.torch_training import emit_backward
from accumlint.trace import Actor, Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"fastai"})
FITS = ("fit", "fit_one_cycle", "fit_flat_cos", "fit_sgdr", "fine_tune")
SIEVE = ((b"GradientAccumulation", b"fastai"),)


@dataclass(eq=False)
class Learner:
    """A Learner, as far as its updates depend on it."""

    loaders: Value
    model: Value
    loss: Value
    callbacks: list[Value]
    optimizer: Actor


def learner(state: Machine, call: Call) -> Value | None:
    """`Learner(dls, model, loss_func=…, cbs=[…])`."""
    made = Thing(make_actor(Role.ENGINE, "learner"))
    values = [state.force(call.argument(at, name) or NONE) for at, name in enumerate(("dls", "model", "loss_func"))]
    callbacks = _listed(state, call.keywords.get("cbs"))
    model = actor_of(values[1])
    optimizer = Actor(state.uid(), "learner.opt", Role.OPTIMIZER, base=model.uid if model is not None else None, known=True)
    state.memory[("fastai", made.actor.uid)] = Learner(values[0], values[1], values[2], callbacks, optimizer)
    return made


def _listed(state: Machine, value: Value | None) -> list[Value]:
    value = state.force(value) if value is not None else NONE
    return [state.force(one) for one in value.items] if isinstance(value, Items) else [value]


def gradient_accumulation(state: Machine, call: Call) -> Value | None:
    """`GradientAccumulation(n_acc=…)`: K is the number of samples over the batch size."""
    made = Thing(make_actor(Role.OTHER, "GradientAccumulation"))
    given = accumulation(state, call.argument(0, "n_acc"), literal_of(call, "n_acc", 0), "n_acc")
    root = given.root or Root(("fastai", "n_acc"), "n_acc")
    state.memory[("fastai accumulation", made.actor.uid)] = Known(state.world.k, frozenset({root}), root)
    state.world.knowledge.accumulations.setdefault(root.key, root)
    return made


def fit(state: Machine, call: Call) -> Value | None:
    """`learner.fit(epochs)` and its relatives."""
    owner = state.force(receiver_of(call) or NONE)
    known = state.memory.get(("fastai", owner.actor.uid)) if isinstance(owner, Thing) else None
    if known is None:
        return None
    state.covered.add(id(call.node))
    callbacks = known.callbacks + _listed(state, call.keywords.get("cbs"))
    sizes = (state.memory.get(("fastai accumulation", one.actor.uid)) for one in callbacks if isinstance(one, Thing))
    k = next((one for one in sizes if one is not None), None)
    if k is not None:
        _play(state, call, known, k)
    return NONE


def _play(state: Machine, call: Call, known: Learner, k: Known) -> None:
    line, node = call.node.lineno, call.node
    plan = state.plan(known.loaders, node)
    entry = entered(state, line)
    assert isinstance(k.value, int)
    for at in range(min(plan.count, MOST_TURNS) if plan.data else state.world.batches):
        with turn(state, OpenTurn(line, at, entry, endless=True, micro=True)):
            state.recorder.new_data()
            batch = plan.item(at) if plan.data else state.datum(node, "batch")
            inputs, targets = (state.item(batch, Known(one), node) for one in (0, 1))
            given = state.forward_of(replace(call, args=[inputs], keywords={}), known.model)
            loss = state.force(state.call_value(known.loss, [given, targets], node))
            emit_backward(state, replace(call, args=[], keywords={}), loss, factors=division(state, k, node, "n_acc"))
            state.recorder.fact("engine-divides", node)
            if (at + 1) % k.value == 0:
                state.recorder.emit(Kind.STEP, node, targets=(known.optimizer,))
                state.recorder.emit(Kind.ZERO, node, targets=(known.optimizer,))


KINDS = {name: {Kind.BACKWARD, Kind.STEP, Kind.ZERO} for name in FITS}
LOOPS = FITS
TRACKED = ("Learner", "vision_learner", "cnn_learner", "text_classifier_learner", "GradientAccumulation")
FUNCTIONS: dict[str, Handler] = {"Learner": learner, "GradientAccumulation": gradient_accumulation}
METHODS: dict[str, Handler] = dict.fromkeys(FITS, fit)
