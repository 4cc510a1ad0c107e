"""DeepSpeed: the engine divides the loss by its K, counts the micro-batches in `step`, and updates where its window ends.

An engine does as follows.

    gradient_accumulation_steps   in the configuration; missing means 1. `engine.backward(loss)` divides by it
                                  (`scale_wrt_gas=False`: not).
    engine.step()                 is called in every micro-batch; off the boundary it only counts. Zeroing, clipping, unscaling and the
                                  scheduler that the engine was given belong to it.
    ZeRO                          the stages 0 and 1 reduce at the boundary, 2 and 3 in every backward. The stages 2 and 3 keep no `.grad`
                                  between backwards: clearing or clipping by hand is without effect.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import CLIP_NAMES, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.values import FALSE, NONE, TRUE, Instance, Items, Known, Opaque, Root, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary import torch_objects, torch_training
from accumlint.source.vocabulary.base import Attribute, Handler, as_actor, parameters_owner, raw_module, receiver_of
from accumlint.source.vocabulary.deepspeed_state import (
    KEY,
    STEPS,
    Engine,
    engine_behind,
    engine_of,
    is_engine_name,
    is_managed,
    learn,
    remember,
    stage_in,
    steps_in,
)
from accumlint.source.vocabulary.engines import division
from accumlint.trace import Actor, Evidence, Guard, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"deepspeed"})
SIGNS = frozenset({"deepspeed", "is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "micro_steps"})
TRACKED = frozenset({"initialize", "set_gradient_accumulation_boundary", "micro_steps"})
KINDS = {"save_checkpoint": {Kind.SAVE}}
GATED = "gated"
COUNTED = "counted"  # a micro-batch that never reaches the step is none of the window
HELD_BACK = "step-held-back"  # a fact: a boundary by hand at which the engine ignores the step
LOST = "window-not-kept"  # a fact: a window by hand of which the engine keeps the last micro-batch only
OVERWRITES = frozenset({1, 2})  # stages whose backward at a boundary replaces the averaged gradients
KEEPS_NO_GRADIENT = frozenset({2, 3})  # stages that partition gradients right after each backward
OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "OnebitAdam")
PARAMETERS = ("args", "model", "optimizer", "model_parameters", "training_data", "lr_scheduler")


def shown(index: Index) -> bool:
    """Whether some object is used as an engine is, where nothing else speaks of DeepSpeed: `model.backward(loss)` and `model.step()`."""
    return any(is_engine_name(index, name) for name in index.usage)


# Making.
def initialize(state: Machine, call: Call) -> Value | None:
    """`deepspeed.initialize(model=…, optimizer=…, config=…)`: engine, optimizer, loader, scheduler."""
    if not call.path.endswith("deepspeed.initialize"):
        return None
    given = {name: call.argument(at, name) for at, name in enumerate(PARAMETERS)}
    inner = state.force(given["model"] or NONE)
    raw = raw_module(inner) or inner
    base = as_actor(state, raw, Role.MODEL)
    name = base.name if base is not None else "model"
    uid = base.uid if base is not None else None
    made = Thing(Actor(state.uid(), name, Role.MODEL, Wrapper.ZERO, uid, True), inner=inner)
    optimizer = _optimizer(state, given["optimizer"], raw)
    config = call.keywords.get("config", call.keywords.get("config_params"))
    engine = Engine(optimizer.actor, Root((KEY, call.node.lineno), STEPS), steps_in(state, config), stage_in(state, config))
    engine.managed = is_managed(state, config)
    remember(state, made.actor, engine)
    state.recorder.fact("distributed", call.node)
    return Items([made, optimizer, _loader(given["training_data"]), _scheduler(state, given["lr_scheduler"])], "tuple")


def _optimizer(state: Machine, value: Value | None, model: Value) -> Thing:
    value = state.force(value) if value is not None else NONE
    if isinstance(value, Thing) and value.actor.role is Role.OPTIMIZER:
        return value
    if isinstance(value, (Opaque, Instance)) and not (isinstance(value, Opaque) and value.path):
        actor = as_actor(state, value, Role.OPTIMIZER)
        if actor is not None and actor.role is Role.OPTIMIZER:
            return Thing(actor, inner=value)
    return torch_objects.new_optimizer(state, "optimizer", model if isinstance(model, (Thing, Opaque, Instance)) else None)


def _loader(data: Value | None) -> Value:
    if data is None or (isinstance(data, Known) and data.value is None):
        return NONE
    made = Thing(make_actor(Role.LOADER, "loader"), inner=data)
    made.length = Root(("loader", KEY, made.actor.uid), "len(loader)", "length")
    return made


def _scheduler(state: Machine, value: Value | None) -> Value:
    value = state.force(value) if value is not None else NONE
    if isinstance(value, Known):
        return Thing(make_actor(Role.SCHEDULER, "lr_scheduler"))
    return value


def optimizer_class(state: Machine, call: Call) -> Value | None:
    return torch_objects.optimizer(state, call) if call.path.startswith("deepspeed") else None


# The backward.
def backward(state: Machine, call: Call) -> Value | None:
    """`engine.backward(loss)`: divides by K."""
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Opaque) and owner.forwards:
        return _backward_of_loss(state, call, owner)
    loss = state.force(call.args[0] if call.args else call.keywords.get("loss", NONE))
    spelled = terminal(call.node.func.value) if isinstance(call.node.func, ast.Attribute) else ""
    engine = engine_of(state, owner, spelled) if isinstance(loss, (Opaque, Items)) else None
    if engine is None:
        return None
    _note_division(engine, loss)
    k = engine.k(state)
    scales = state.truth(call.keywords.get("scale_wrt_gas", TRUE), flips=False)
    options = ("engine",) if k is None else ()
    factors = division(state, k, call.node, STEPS) if k is not None and scales else ()
    torch_training.emit_backward(state, call, loss, *options, factors=factors)
    _went_backward(state, engine)
    return loss


def _went_backward(state: Machine, engine: Engine) -> None:
    engine.since.add(state.recorder.current())
    engine.around = frozenset(guard.place for guard in state.recorder.guards)


def _backward_of_loss(state: Machine, call: Call, loss: Opaque) -> Value | None:
    """`loss.backward()` behind an engine: newer ones divide it as well, older ones miss it."""
    models = (actor_of(state.models.get(index)) for index in loss.forwards)
    found = next((one for one in (state.memory.get((KEY, actor.uid)) for actor in models if actor is not None) if one is not None), None)
    if found is None:
        return None
    _went_backward(state, found)
    return torch_training.emit_backward(state, call, loss, "engine")


def _note_division(engine: Engine, loss: Value) -> None:
    factors = loss.weight.of(Quantity.ACCUMULATION) if isinstance(loss, Opaque) and loss.weight is not None else ()
    by_hand = [factor for factor in factors if factor.power < 0 and not factor.implicit and factor.root]
    engine.divided = by_hand[0].root if len(by_hand) == 1 and _power(factors) == -1 else ""


def _power(factors: tuple[Factor, ...]) -> int:
    return sum(factor.power for factor in factors)


# The update.
def step(state: Machine, call: Call) -> Value | None:
    """`engine.step()`: counts the micro-batch; updates, clears and moves the schedule where the window ends."""
    owner = state.force(receiver_of(call) or NONE)
    engine = engine_of(state, owner)
    if engine is None:
        return None
    _take_counter(engine, owner)
    _weigh_evidence(state, engine)
    ends = engine.ends_window(state)
    if engine.holds_back(state) and engine.k(state) is not None and len(engine.since) > 1:
        _note_window(state, engine, HELD_BACK, call.node)
    if _forgets(state, engine):
        _note_window(state, engine, LOST, call.node)
    if ends:
        options = {"zeroes", COUNTED} | ({GATED} if engine.holds_back(state) else set())
        state.recorder.emit(Kind.STEP, call.node, targets=(engine.optimizer,), options=frozenset(options))
    engine.micro_steps += 1
    engine.since.clear()
    return NONE


def _forgets(state: Machine, engine: Engine) -> bool:
    """Whether a window made by hand loses all micro-batches but the last: to an engine of K = 1 each backward is a boundary."""
    k = engine.k(state)
    window = k is not None and k.value == 1 and len(engine.since) > 1
    return window and engine.stage in OVERWRITES and engine.managed and engine.boundary is None


def _take_counter(engine: Engine, owner: Value) -> None:
    """`engine.micro_steps = 0` begins a window anew."""
    if isinstance(owner, (Thing, Opaque)):
        value = owner.attributes.pop("micro_steps", None)
        if isinstance(value, Known) and type(value.value) is int:
            engine.micro_steps = value.value


def _weigh_evidence(state: Machine, engine: Engine) -> None:
    """A loss that is divided by K by hand, with the step called in every micro-batch: the engine's window is one of K, or nothing is."""
    alone = engine.divided and len(engine.since) == 1 and not _gates(state, engine) and engine.boundary is None
    engine.singles = engine.singles + 1 if alone else 0
    if engine.singles > 1 and engine.k(state) is None:
        learn(state, engine, engine.divided)


def _gates(state: Machine, engine: Engine) -> list[Guard]:
    """The tests against a number that hold here and did not stand around the backward."""
    return [guard for guard in state.recorder.guards if guard.cause == "gate" and guard.place not in engine.around]


def _note_window(state: Machine, engine: Engine, name: str, node: ast.AST) -> None:
    """A fact of the boundary that the code makes by hand, at its test."""
    gates = _gates(state, engine)
    known = state.recorder.facts.setdefault(name, [])
    found = Evidence(gates[-1].place, gates[-1].text) if gates else Evidence(state.recorder.place(node), state.recorder.text(node))
    if all(one.place != found.place for one in known):
        known.append(found)


def zero_grad(state: Machine, call: Call) -> Value | None:
    """`engine.zero_grad()`, and that of its optimizer: without effect where the gradients lie elsewhere."""
    owner = state.force(receiver_of(call) or NONE)
    engine = engine_of(state, owner)
    if engine is not None:
        if engine.stage not in KEEPS_NO_GRADIENT:
            state.recorder.emit(Kind.ZERO, call.node, targets=(engine.optimizer,), options=frozenset({"model"}))
        return NONE
    engine = engine_behind(state, actor_of(owner))
    if engine is not None:
        _learn_from_gate(state, engine)
        return NONE if engine.stage == 2 else None
    return None


def _learn_from_gate(state: Machine, engine: Engine) -> None:
    """Who clears under a test against K, beside a step in every micro-batch, counts on a window of K."""
    gates = _gates(state, engine)
    if engine.k(state) is None and gates and not engine.since:
        known = state.world.knowledge.proven.values()
        spelled = next((root.text for root in known if any(root.text in guard.text for guard in gates)), "")
        if spelled:
            learn(state, engine, spelled)


def clip(state: Machine, call: Call) -> Value | None:
    """`clip_grad_norm_(engine.parameters(), x)`: there is nothing to clip where the gradients lie elsewhere."""
    first = state.force(call.args[0]) if call.args else NONE
    engine = engine_of(state, parameters_owner(first) or NONE)
    if engine is None or engine.stage not in KEEPS_NO_GRADIENT:
        return None
    return state.opaque(("norm", call.node.lineno, state.steps), state.recorder.text(call.node))


def save_checkpoint(state: Machine, call: Call) -> Value | None:
    if engine_of(state, state.force(receiver_of(call) or NONE)) is None:
        return None
    state.recorder.emit(Kind.SAVE, call.node, options=frozenset({"optimizer"}))
    return NONE


# The window.
def is_boundary(state: Machine, call: Call) -> Value | None:
    """`engine.is_gradient_accumulation_boundary()`: whether the coming `step` updates."""
    owner = state.force(receiver_of(call) or NONE)
    engine = engine_of(state, owner)
    if engine is None:
        return None
    _take_counter(engine, owner)
    k = engine.k(state)
    if k is not None and engine.holds_back(state) and _steps_only_inside(state.index, call.node):
        state.recorder.fact(HELD_BACK, call.node)
    roots = k.roots if k is not None else frozenset()
    return Known(engine.ends_window(state), roots, None, roots)


def _steps_only_inside(index: Index, node: ast.Call) -> bool:
    """Whether the only `step` of the engine waits for this answer: then the counter, which `step` advances, never moves."""
    receiver = terminal(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    test = next((each for each in walk(index.tree) if isinstance(each, ast.If) and _in(node, each.test)), None)
    steps = [each for each in walk(index.tree) if isinstance(each, ast.Call) and _is_step(each, receiver)]
    plain = test is not None and (test.test is node)
    return plain and bool(steps) and test is not None and all(any(_in(each, part) for part in test.body) for each in steps)


def _is_step(call: ast.Call, receiver: str) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "step" and terminal(call.func.value) == receiver


def _in(node: ast.AST, outer: ast.AST) -> bool:
    return any(part is node for part in walk(outer))


def set_boundary(state: Machine, call: Call) -> Value | None:
    """`engine.set_gradient_accumulation_boundary(flag)`: the code counts, not the engine."""
    engine = engine_of(state, state.force(receiver_of(call) or NONE))
    if engine is None:
        return None
    engine.boundary = state.truth(call.argument(0, "is_boundary") or TRUE)
    return NONE


def accumulation_steps(state: Machine, call: Call) -> Value | None:
    """`engine.gradient_accumulation_steps()`: who asks for K counts on it."""
    engine = engine_of(state, state.force(receiver_of(call) or NONE))
    if engine is None:
        return None
    if engine.k(state) is None:
        learn(state, engine, state.recorder.text(call.node))
    return engine.k(state)


# Attributes.
def its_optimizer(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    if engine is None:
        return None
    return next((one for one in state.optimizers if one.actor.uid == engine.optimizer.uid), Thing(engine.optimizer))


def micro_steps(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    return Known(engine.micro_steps) if engine is not None else None


def overflowed(state: Machine, owner: Value) -> Value | None:
    """Whether a step was left out: the normal path is that it was not."""
    return FALSE if engine_behind(state, actor_of(owner)) is not None else None


FUNCTIONS: dict[str, Handler] = {
    **dict.fromkeys(CLIP_NAMES, clip),
    **dict.fromkeys(OPTIMIZERS, optimizer_class),
    "initialize": initialize,
}
METHODS: dict[str, Handler] = {
    "backward": backward,
    "step": step,
    "zero_grad": zero_grad,
    "save_checkpoint": save_checkpoint,
    "is_gradient_accumulation_boundary": is_boundary,
    "set_gradient_accumulation_boundary": set_boundary,
    "gradient_accumulation_steps": accumulation_steps,
}
ATTRIBUTES: dict[str, Attribute] = {"optimizer": its_optimizer, "micro_steps": micro_steps, "overflow": overflowed}
