"""What is kept beside the training: checkpoints that training resumes from, and averages of the weights."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from accumlint.source.reading.books import METRIC_NAME, SAVE_NAME, averages_by_name, blends, may_average
from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.holding import held_by
from accumlint.source.rehearsal.unclear import is_accumulation, is_told
from accumlint.source.rehearsal.values import NONE, Function, Instance, Items, Mapping, Opaque, Thing, Value, make_actor
from accumlint.source.vocabulary.base import Handler, as_actor, parameters_owner, receiver_of, role_of
from accumlint.trace import Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

TOLD = "told-of-k"
OPTIMIZER_STATE = "optimizer-state"
MOVING = "moving"  # an average that one more update changes, unlike that of the ranks
WHOLE_STATE = frozenset({"save_state", "save_training_state"})  # of engines: the optimizer's state is among what they save
SAVER = re.compile(r"save|checkpoint|ckpt", re.IGNORECASE)
GETTERS = frozenset({"property", "cached_property"})  # they tell an average and move none
OF_METRICS = re.compile(r"(stats|metrics?|loss(es)?|(?<!para)meters?)$", re.IGNORECASE)
DEEPEST = 3


@cache
def _is_save_name(name: str) -> bool:
    return SAVE_NAME.search(name) is not None


def save(state: Machine, call: Call) -> Value | None:
    """`torch.save(…)` and whatever else saves, by its name."""
    if isinstance(call.function, Function) or not _is_save_name(call.name):
        return None
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Instance) and owner.cls.find(call.name) is not None:
        return None
    whole = call.name in WHOLE_STATE or (call.name == "save_checkpoint" and role_of(state, owner) is Role.MODEL)
    kept = whole or any(holds_optimizer(state, value) for value in call.values)
    state.recorder.emit(Kind.SAVE, state.saving or call.node, options=frozenset({OPTIMIZER_STATE}) if kept else frozenset())
    return NONE


def holds_optimizer(state: Machine, value: Value, depth: int = 0) -> bool:
    """Whether an optimizer, or its state, is in a value."""
    value = state.force(value)
    if depth > DEEPEST:
        return False
    if isinstance(value, Items):
        return any(holds_optimizer(state, item, depth + 1) for item in value.items)
    if isinstance(value, Mapping):
        return any(holds_optimizer(state, item, depth + 1) for item in list(value.items.values()))
    if isinstance(value, Opaque) and value.name == "state_dict":
        return role_of(state, value.owner) is Role.OPTIMIZER
    return role_of(state, value) is Role.OPTIMIZER


def state_of(state: Machine, call: Call) -> Value | None:
    """`optimizer.state_dict()`."""
    owner = receiver_of(call)
    if owner is None or role_of(state, owner) is not Role.OPTIMIZER:
        return None
    made = state.opaque(("state", state.key(owner)), state.recorder.text(call.node), name="state_dict")
    made.owner = owner
    return made


def average(state: Machine, call: Call) -> Value | None:
    """`ema.update(model)`, `averaged.update_parameters(model)`, `update_ema(ema_model, model)`."""
    known = isinstance(call.function, Function)
    if not (known or (may_average(call.name) and averages_by_name(call.name, _receiver_name(call)))) or any(
        map(_is_of_metrics, call.node.args)
    ):
        return None
    receiver = state.force(receiver_of(call) or NONE)
    if role_of(state, receiver) in {Role.OPTIMIZER, Role.SCALER, Role.SCHEDULER} or _counts_by_itself(state, receiver):
        return None
    if any(isinstance(value, Opaque) and (value.forwards or value.weight is not None) for value in map(state.force, call.values)):
        return None  # the average of a loss or of what a model gives
    _emit(state, call)
    return NONE


def _counts_by_itself(state: Machine, average: Value) -> bool:
    """Whether an average was told of K when it was made: `EMA(model, update_every=k)`."""
    if isinstance(average, Opaque):
        return is_told(state, average.key) or any(actor.role is Role.OPTIMIZER for actor in held_by(state, average))
    return isinstance(average, Thing) and (TOLD in average.actor.options or average.actor.uid in state.elsewhere.told)


def _is_of_metrics(given: ast.expr) -> bool:
    """`update_average(stats, {"loss": loss})` keeps an average of what is logged."""
    return isinstance(given, ast.Dict) or OF_METRICS.search(terminal(given)) is not None


def _receiver_name(call: Call) -> str:
    owner = call.node.func.value if isinstance(call.node.func, ast.Attribute) else None
    if isinstance(owner, ast.Call) and owner.args and "unwrap" in terminal(owner.func):
        owner = owner.args[0]  # `unwrap_model(ema).update()`
    return terminal(owner) if owner is not None else ""


def _emit(state: Machine, call: Call) -> None:
    state.recorder.emit(Kind.AVERAGE, call.node, options=frozenset({MOVING}))


def taken(state: Machine, call: Call) -> Value | None:
    """Functions of the source: one that averages is taken by its name, one that saves is followed and its call remembered."""
    function = call.function
    if not isinstance(function, Function) or state.index.kinds(function.node):
        return None
    if _averages(function, call):
        return average(state, call)
    if state.saving is not None or not SAVER.search(function.name) or not state.index.keeps_books(function.node):
        return None
    state.saving = call.node
    try:
        return state.call_function(function, call.args, call.keywords, call.node)
    finally:
        state.saving = None


def _averages(function: Function, call: Call) -> bool:
    """Whether a function of the source averages, by its name and that of its class or of the object."""
    owner = function.owner.node.name if function.owner is not None else ""
    receiver = _receiver_name(call)
    if METRIC_NAME.search(owner) or any(terminal(each) in GETTERS for each in getattr(function.node, "decorator_list", ())):
        return False
    return averages_by_name(function.name, receiver) or (averages_by_name(function.name, owner) and not METRIC_NAME.search(receiver))


def shrunk(state: Machine, call: Call) -> Value | None:
    """`p.mul_(decay)` of a parameter gives the parameter."""
    owner = state.force(receiver_of(call) or NONE)
    return owner if _module_of(state, owner) is not None else None


def blend(state: Machine, call: Call) -> Value | None:
    """A parameter is moved towards that of another module."""
    if not blends(call.node):
        return None
    own = _module_of(state, receiver_of(call))
    read = (state.frame.find(part.id) for arg in call.node.args for part in walk(arg) if isinstance(part, ast.Name))
    others = {_module_of(state, state.force(value)) for value in read if value is not None}
    if own is None or not others - {own, None}:
        return None
    _emit(state, call)
    return receiver_of(call)


def _module_of(state: Machine, value: Value | None) -> int | None:
    """The module that a parameter belongs to."""
    current = value
    while isinstance(current, Opaque) and current.owner is not None:
        owner = parameters_owner(current.owner)
        if owner is not None:
            actor = as_actor(state, state.force(owner), Role.MODEL)
            return None if actor is None else actor.uid
        current = current.owner
    return None


def make_average(state: Machine, call: Call) -> Value | None:
    """An object that keeps an average of the weights: neither the model that trains nor an optimizer."""
    made = make_actor(Role.OTHER, call.name)
    told = any(is_accumulation(state, value) or role_of(state, state.force(value)) is Role.OPTIMIZER for value in call.values)
    return Thing(replace(made, options=frozenset({TOLD})) if told else made)


FUNCTIONS: dict[str, Handler] = dict.fromkeys(
    ("AveragedModel", "EMAModel", "ExponentialMovingAverage", "ModelEma", "ModelEmaV2", "ModelEmaV3", "ModelEMA", "LitEma", "EMA"),
    make_average,
)
METHODS: dict[str, Handler] = {
    "state_dict": state_of,
    "mul_": shrunk,
    "add_": blend,
    "lerp_": blend,
    "copy_": blend,
}


def fallback(state: Machine, call: Call) -> Value | None:
    """Calls that are known by the form of their names."""
    return save(state, call) or average(state, call)
