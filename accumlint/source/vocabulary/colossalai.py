"""ColossalAI: `booster.backward(loss, optimizer)` divides by nothing; the code owns the window.

`booster.no_sync(model, optimizer)` is that of the plugin's wrapper: torch's DDP reads the flag in the forward, LowLevelZero in the
backward; the others have none. `booster.execute_pipeline` runs a schedule of its own, which nobody looks into.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import NONE, Context, Instance, Items, Known, Opaque, Thing, Value, actor_of, make_actor
from accumlint.source.vocabulary import torch_training
from accumlint.source.vocabulary.base import Handler, as_actor, last_name, raw_module, receiver_of, role_of
from accumlint.trace import Actor, Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"colossalai"})
SIGNS = frozenset({"booster"})
TRACKED = frozenset({"Booster", "boost"})
KINDS = {"clip_grad_by_norm": {Kind.CLIP}, "clip_grad_by_value": {Kind.CLIP}}
KEY = "colossalai"
WRAPPERS = {
    "TorchDDPPlugin": Wrapper.DDP,
    "LowLevelZeroPlugin": Wrapper.ZERO,
    "GeminiPlugin": Wrapper.ZERO,
    "TorchFSDPPlugin": Wrapper.FSDP1,
}
PARTS = ("model", "optimizer", "criterion", "dataloader", "lr_scheduler")


def plugin(state: Machine, call: Call) -> Value | None:
    return Thing(make_actor(Role.OTHER, call.name))


def booster(state: Machine, call: Call) -> Value | None:
    """`Booster(plugin=…)`."""
    made = Thing(make_actor(Role.ENGINE, "booster"))
    given = call.argument(3, "plugin")
    chosen = actor_of(state.force(given)) if given is not None else None
    known = WRAPPERS.get(chosen.name, Wrapper.UNKNOWN) if chosen is not None else Wrapper.UNKNOWN
    state.memory[(KEY, made.actor.uid)] = known
    return made


def _wrapper_of(state: Machine, value: Value | None) -> Wrapper | None:
    """The wrapper that a booster makes; None for what is no booster."""
    actor = actor_of(value)
    if actor is not None and (KEY, actor.uid) in state.memory:
        found: Wrapper = state.memory[(KEY, actor.uid)]
        return found
    by_name = isinstance(value, Opaque) and not value.path and last_name(value).lower().endswith("booster")
    return Wrapper.UNKNOWN if by_name else None


def boost(state: Machine, call: Call) -> Value | None:
    """`model, optimizer, criterion, loader, scheduler = booster.boost(…)`: the model in the plugin's wrapper, the others the same."""
    kind = _wrapper_of(state, state.force(receiver_of(call) or NONE))
    if kind is None:
        return None
    parts = [state.force(call.argument(at, name) or NONE) for at, name in enumerate(PARTS)]
    parts[0] = _wrapped(state, parts[0], kind)
    state.recorder.fact("distributed", call.node)
    return Items(parts, "tuple")


def _wrapped(state: Machine, value: Value, kind: Wrapper) -> Value:
    raw = raw_module(value) or value
    base = as_actor(state, raw, Role.MODEL)
    if base is None:
        return value
    made = Thing(Actor(state.uid(), base.name, Role.MODEL, kind, base.uid, True, frozenset({"optional"})), inner=value)
    if kind is Wrapper.DDP and isinstance(raw, (Thing, Instance)):
        raw.wrapped_by = made
        state.wrappers[base.uid] = made
    return made


def backward(state: Machine, call: Call) -> Value | None:
    """`booster.backward(loss, optimizer)`."""
    if _wrapper_of(state, state.force(receiver_of(call) or NONE)) is None:
        return None
    loss = state.force(call.argument(0, "loss") or NONE)
    return torch_training.emit_backward(state, call, loss, "scale-loss")


def no_sync(state: Machine, call: Call) -> Value | None:
    """`with booster.no_sync(model, optimizer):`."""
    kind = _wrapper_of(state, state.force(receiver_of(call) or NONE))
    if kind is None:
        return None
    model = state.force(call.argument(0, "model") or NONE)
    actor = as_actor(state, model, Role.MODEL)
    if isinstance(model, Opaque) and actor is not None and actor.wrapper is Wrapper.NONE:
        model.actor = replace(actor, wrapper=kind)
    return Context("no_sync", (model,), place=call.node)


def unwrap(state: Machine, call: Call) -> Value | None:
    """`model.unwrap()`: the module behind the wrapper."""
    owner = state.force(receiver_of(call) or NONE)
    return raw_module(owner) if role_of(state, owner) is Role.MODEL and not call.args else None


def clip(state: Machine, call: Call) -> Value | None:
    """`optimizer.clip_grad_by_norm(x)`: remembers the limit and clips in `step`."""
    owner = state.force(receiver_of(call) or NONE)
    return NONE if role_of(state, owner) is Role.OPTIMIZER else None


def pipeline(state: Machine, call: Call) -> Value | None:
    """`booster.execute_pipeline(…)`: forwards and backwards of a schedule that is not followed."""
    if _wrapper_of(state, state.force(receiver_of(call) or NONE)) is None:
        return None
    state.engine(call)
    return state.opaque(("pipeline", call.node.lineno, state.steps), state.recorder.text(call.node))


def save(state: Machine, call: Call) -> Value | None:
    if _wrapper_of(state, state.force(receiver_of(call) or NONE)) is None:
        return None
    if call.name == "save_optimizer":
        state.recorder.emit(Kind.SAVE, call.node, options=frozenset({"optimizer"}))
    return Known(None)


FUNCTIONS: dict[str, Handler] = {
    "Booster": booster,
    **dict.fromkeys((*WRAPPERS, "HybridParallelPlugin", "MoeHybridParallelPlugin"), plugin),
}
METHODS: dict[str, Handler] = {
    "boost": boost,
    "backward": backward,
    "no_sync": no_sync,
    "unwrap": unwrap,
    "clip_grad_by_norm": clip,
    "clip_grad_by_value": clip,
    "execute_pipeline": pipeline,
    "save_optimizer": save,
    "save_model": save,
}
