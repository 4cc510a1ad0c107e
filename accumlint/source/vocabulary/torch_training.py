"""torch: the update. Backward, step, zero, clip, gradient scaling, schedulers."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import CLIP_NAMES, CLIPPER_NAME, OPTIMIZER_NAME, terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.arithmetic import factors_of, is_tensor
from accumlint.source.rehearsal.skips import HANGS
from accumlint.source.rehearsal.values import (
    NONE,
    Function,
    Instance,
    Items,
    Known,
    Opaque,
    Partial,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.source.vocabulary.base import Handler, as_actor, last_name, modules_of, parameters_owner, receiver_of, role_of
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

ENGINE_NAME = re.compile(
    r"accelerat|fabric|engine|booster|deepspeed|(^|\.)self$|optim|trainer|strategy|plugin|precision|runner", re.IGNORECASE
)

tells_of_accumulation = found_in(re.compile(r"accum|(^|[^a-z])every", re.IGNORECASE))


def backward(state: Machine, call: Call) -> Value | None:
    """`loss.backward()`, or an engine's `backward(loss)`."""
    owner = state.force(receiver_of(call) or NONE)
    first = state.force(call.args[0]) if call.args else state.force(call.keywords.get("loss", NONE))
    if call.path.endswith("autograd.backward"):
        return emit_backward(state, call, first, *(("replay",) if len(call.args) > 1 else ()))
    given = isinstance(first, Opaque) and (is_tensor(first) or "loss" in first.text)
    named = terminal(call.node.func.value) if isinstance(call.node.func, ast.Attribute) else ""
    # Of apex and fairseq: a plain backward of the scaled loss.
    if role_of(state, owner) is Role.OPTIMIZER or (given and OPTIMIZER_NAME.search(named)):
        return emit_backward(state, call, first, "scale-loss")
    if isinstance(owner, Thing) or (given and not (isinstance(owner, Opaque) and is_tensor(owner))):
        state.engine(call)
        return emit_backward(state, call, first, "engine")
    scaled = state.force(call.keywords.get("gradient", first))  # `loss.backward(torch.tensor(1 / k))`: by how much is not followed
    return emit_backward(state, call, owner, factors=() if scaled is NONE else (Factor(Quantity.UNKNOWN, -1, None),))


def emit_backward(state: Machine, call: Call, loss: Value, *options: str, factors: tuple[Factor, ...] = (), note: str = "") -> Value:
    """The backward of a loss (or of several), as an event of the call; `factors` are what the framework scales the loss by.

    Options: "replay" (of cached features), "scale-loss" (the context or the optimizer unscales by itself), "engine" (of an engine
    that nobody knows: the weight is not known), and any that a framework's own rules ask for.
    """
    state.covered.add(id(call.node))
    if state.no_grad:
        return NONE
    losses = [state.force(item) for item in loss.items] if isinstance(loss, Items) else [loss]
    tensors = [one for one in losses if isinstance(one, Opaque)]
    forwards = tuple(sorted(frozenset().union(*(one.forwards for one in tensors)))) if tensors else ()
    forwards = _with_graphs(state, forwards) or _of_only_model(state, tensors)
    models = [state.models[index] for index in forwards if index in state.models]
    kinds = set(options)
    known = [actor for actor in map(actor_of, models) if actor is not None]
    if state.recorder.replays(frozenset().union(*(one.causes for one in tensors)) if tensors else frozenset(), known):
        kinds.add("replay")
    if "replay" in kinds:
        state.recorder.fact("replays-features", call.node)
    if state.within_context("scaled"):
        kinds.add("scale-loss")
    weight = tensors[0].weight if tensors and "replay" not in kinds else None
    if weight is None or "engine" in kinds:
        weight = replace(weight or Weight(), known=False)
    weight = weight.times(*factors)
    scaler = next((one.scaler for one in tensors if one.scaler is not None), None)
    retains = call.keywords.get("retain_graph")
    syncs = [state.synced(model) for model in models if model is not None]
    event = state.recorder.emit(
        Kind.BACKWARD,
        call.node,
        model=next((actor_of(model) for model in models if model is not None), None),
        scaler=scaler,
        sync=all(syncs) if syncs else None,
        weight=weight,
        forwards=forwards,
        reaches=_reaches(state, call, forwards),
        scaled=scaler is not None,
        retains_graph=isinstance(retains, Known) and bool(retains.value),
        options=frozenset(kinds),
        note=note,
    )
    for cause in frozenset().union(*(one.causes for one in tensors)):
        if cause.startswith(HANGS):
            state.recorder.ends[int(cause.removeprefix(HANGS))] = event.index + 1
    state.after_backward(event, call)
    return NONE


def _with_graphs(state: Machine, forwards: tuple[int, ...]) -> tuple[int, ...]:
    """The forwards whose graphs a backward goes through: a state carried over from a micro-batch that went backward was detached."""
    events = state.recorder.events
    fresh = {events[index].micro_batch for index in forwards if index not in state.freed}
    return tuple(index for index in forwards if index not in state.freed or events[index].micro_batch in fresh) if fresh else forwards


def _of_only_model(state: Machine, tensors: list[Opaque]) -> tuple[int, ...]:
    """The forwards of this micro-batch, where they are of one model: those behind a loss with a graph whose making was lost on the way."""
    if not any(one.attached for one in tensors):
        return ()
    current = state.recorder.current()
    found = [event for event in state.recorder.events if event.kind is Kind.FORWARD and event.micro_batch == current]
    alone = len({actor.uid for event in found for actor in (event.model,) if actor is not None}) == 1
    return tuple(event.index for event in found) if alone and not state.freed & {event.index for event in found} else ()


def _reaches(state: Machine, call: Call, forwards: tuple[int, ...]) -> frozenset[int]:
    """The modules that receive gradients: those of the forwards, or only those named by `inputs=`."""
    named = state.force(call.keywords["inputs"]) if "inputs" in call.keywords else None
    if named is not None:
        values = named.items if isinstance(named, Items) else [named]
        owners = [
            owner
            for value in values
            for owner in (parameters_owner(state.force(value)), _owner_of_parameter(state.force(value)))
            if owner is not None
        ]
        return frozenset().union(*(modules_of(state.force(owner)) for owner in owners)) if owners else frozenset()
    reached = (state.recorder.events[index].reaches for index in forwards)
    return frozenset().union(*reached) if forwards else frozenset()


def _owner_of_parameter(value: Value) -> Value | None:
    return parameters_owner(value.owner) if isinstance(value, Opaque) else None


def step(state: Machine, call: Call) -> Value | None:
    """`optimizer.step()`, `scheduler.step()`, `scaler.step(optimizer)`."""
    owner = state.force(receiver_of(call) or NONE)
    if CLIPPER_NAME.search(last_name(owner)) and call.args:
        return clip(state, call)
    role = _stepping_role(state, owner, call)
    if role is Role.SCALER:
        scaler = as_actor(state, owner, Role.SCALER)
        state.recorder.emit(Kind.STEP, call.node, targets=_given_optimizers(state, call), scaler=scaler)
        return NONE
    if role is Role.OPTIMIZER:
        for value in call.values:
            _closure(state, value)
        optimizer = as_actor(state, owner, Role.OPTIMIZER)
        assert optimizer is not None
        options = frozenset({"hook"}) if state.in_hook else frozenset()
        options |= {"gated"} if _may_gate(owner) or _is_told_later(state, owner) or optimizer.uid in state.elsewhere.told else set()
        state.recorder.emit(Kind.STEP, call.node, targets=(optimizer,), options=options)
        return NONE
    if role is Role.SCHEDULER:
        scheduler = as_actor(state, owner, Role.SCHEDULER)
        options = (frozenset({"absolute"}) if call.values else frozenset()) | (scheduler.options if scheduler is not None else frozenset())
        options |= {"gated"} if _may_gate(owner) else set()
        if scheduler is not None and state.memory.get(("horizon", scheduler.uid), frozenset()) & state.batch_counts:
            options |= {"horizon-in-micro-batches"}
        state.recorder.emit(
            Kind.SCHEDULE,
            call.node,
            options=options,
            targets=(scheduler,) if scheduler is not None else (),
            note=" ".join(str(key_of(value)) for value in call.values)[:80],
        )
        return NONE
    return None


def _may_gate(optimizer: Value) -> bool:
    """Whether an optimizer of a make that nobody knows was told of accumulation, so that it may count by itself: `Accumulating(sgd, k)`."""
    return isinstance(optimizer, Opaque) and optimizer.key[0] in {"call", "part"} and tells_of_accumulation(str(optimizer.key))


def _is_told_later(state: Machine, optimizer: Value) -> bool:
    """`optimizer.set_accumulation(k)`, `optimizer.backward(loss)`: one that nobody saw being made may count its backwards."""
    if not isinstance(optimizer, Opaque) or optimizer.key[0] not in {"call", "part"}:
        return False
    used = state.index.usage.get(last_name(optimizer), set())
    return "backward" in used or any(map(tells_of_accumulation, used))


def _closure(state: Machine, value: Value) -> None:
    """`optimizer.step(closure)` runs the closure."""
    value = state.force(value)
    if isinstance(value, (Function, Partial)):
        outer, state.in_closure = state.in_closure, True
        try:
            state.call_value(value, [])
        finally:
            state.in_closure = outer


def _stepping_role(state: Machine, owner: Value, call: Call) -> Role | None:
    role = role_of(state, owner)
    if role in {Role.OPTIMIZER, Role.SCALER, Role.SCHEDULER}:
        first = state.force(call.args[0]) if call.args else None
        if role is Role.OPTIMIZER and first is not None and role_of(state, first) is Role.OPTIMIZER:
            return Role.SCALER
        return role
    first = state.force(call.args[0]) if call.args else None
    if role is None and first is not None and role_of(state, first) is Role.OPTIMIZER and actor_of(first) is not None:
        return Role.SCALER
    return None


def zero_grad(state: Machine, call: Call) -> Value | None:
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Instance) and owner.cls.find("zero_grad") is not None:
        return None
    role = role_of(state, owner)
    if isinstance(owner, Opaque) and owner.forwards and owner.actor is None:  # no tensor has the method: what gave it was no forward
        owner = owner.copied()
        owner.forwards = frozenset()
        role = role_of(state, owner)
    if role is Role.MODEL:
        state.recorder.emit(Kind.ZERO, call.node, targets=state.optimizers_of(owner), options=frozenset({"model"}))
        return NONE
    actor = as_actor(state, owner, Role.OPTIMIZER) if role is Role.OPTIMIZER or not isinstance(owner, (Items, Known)) else None
    options = frozenset({"closure"}) if state.in_closure else frozenset()
    state.recorder.emit(
        Kind.ZERO, call.node, targets=(actor,) if actor is not None and actor.role is Role.OPTIMIZER else (), options=options
    )
    return NONE


CLIPS_COPIES = frozenset({"clip_master_grads", "clip_main_grads"})  # in full precision, made anew from the gradients before each step


def clip(state: Machine, call: Call) -> Value | None:
    """`clip_grad_norm_(model.parameters(), x)` and the like."""
    owner = state.force(receiver_of(call) or NONE)
    candidates = [state.force(value) for value in call.values]
    if isinstance(owner, (Thing, Instance)) or (isinstance(owner, Opaque) and not owner.path):
        candidates.append(owner)
    options = {"scale-loss"} if state.within_context("scaled") else set()
    if terminal(call.node) in CLIPS_COPIES:
        options.add("copies")
    if (
        owner is not None
        and isinstance(owner, Opaque)
        and not owner.path
        and ENGINE_NAME.search(owner.text)
        and role_of(state, owner) is None
    ):
        options.add("engine")
    limit = state.force(call.argument(1, "max_norm", "clip_value") or NONE)
    if (isinstance(limit, Known) and limit.value == float("inf")) or (
        isinstance(limit, Opaque) and limit.path in {"math.inf", "torch.inf", "numpy.inf"}
    ):
        options.add("norm-only")
    state.recorder.emit(Kind.CLIP, call.node, targets=_concerned(state, candidates), options=frozenset(options))
    made = state.opaque(("norm", call.node.lineno, state.steps), state.recorder.text(call.node), causes=frozenset({"loss"}))
    made.agreed = not state.index.is_distributed
    made.name = "norm"
    return made


def taken(state: Machine, call: Call) -> Value | None:
    """A clipper of the source that does its work by hand, seen by its name and by the gradients that it reads."""
    function = call.function
    if not isinstance(function, Function) or not call.args:
        return None
    owner = function.owner.node.name if function.owner is not None else ""
    if function.name not in CLIP_NAMES and not (CLIPPER_NAME.search(owner) and function.name in {"step", "__call__", "clip"}):
        return None
    by_hand = state.index.kinds(function.node) <= {Kind.NORMALIZE} and state.index.once("reads gradients", function.node, _reads_gradients)
    return clip(state, call) if by_hand else None


def _reads_gradients(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "grad" for part in walk(node))


def _concerned(state: Machine, values: list[Value]) -> tuple[Actor, ...]:
    """The optimizers whose gradients these arguments name; none means that nobody knows."""
    found: list[Actor] = []
    for value in values:
        if isinstance(value, Items):
            found.extend(_concerned(state, [state.force(item) for item in value.items]))
            continue
        actor = actor_of(value)
        if actor is not None and actor.role is Role.OPTIMIZER:
            found.append(actor)
            continue
        owner = parameters_owner(value)
        if owner is None and actor is not None and actor.role is Role.MODEL:
            owner = value
        if owner is not None:
            inner = state.force(owner)
            direct = actor_of(inner)
            found.extend((direct,) if direct is not None and direct.role is Role.OPTIMIZER else state.optimizers_of(inner))
    return tuple(dict.fromkeys(found))


def unscale(state: Machine, call: Call) -> Value | None:
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Instance) and owner.cls.find(call.name) is not None:
        return None
    scaler = as_actor(state, owner, Role.SCALER)
    state.recorder.emit(Kind.UNSCALE, call.node, targets=_given_optimizers(state, call), scaler=scaler)
    return NONE


def _given_optimizers(state: Machine, call: Call) -> tuple[Actor, ...]:
    """The optimizer that a scaler is given; of a helper of the source around some, those."""
    target = state.force(call.args[0]) if call.args else NONE
    if isinstance(target, Instance):
        parts = (actor_of(value) for value in target.attributes.values() if isinstance(value, Thing))
        held = tuple(actor for actor in parts if actor is not None and actor.role is Role.OPTIMIZER)
        if held:
            return held
    actor = as_actor(state, target, Role.OPTIMIZER)
    return (actor,) if actor is not None else ()


def scale_loss(state: Machine, call: Call) -> Value | None:
    """`scaler.scale(loss)`."""
    owner = state.force(receiver_of(call) or NONE)
    if not call.args:
        return None
    if role_of(state, owner) is not Role.SCALER:
        value = state.force(call.args[0])
        unknown = isinstance(owner, Opaque) and not is_tensor(owner) and role_of(state, owner) is None
        if not (unknown and isinstance(value, Opaque) and value.weight is not None and value.forwards):
            return None
    scaler = as_actor(state, owner, Role.SCALER)
    value = state.force(call.args[0])
    if isinstance(value, Opaque):
        made = state.opaque(("scale", value.key), state.recorder.text(call.node), value, reduced=value.reduced, attached=value.attached)
        made.weight, made.scaler = value.weight, scaler
        if _may_gate(owner) and made.weight is not None:
            made.weight = replace(made.weight, known=False)
        return made
    return state.opaque(("scale", key_of(value)), state.recorder.text(call.node), scaler=scaler)


def update_scaler(state: Machine, call: Call) -> Value | None:
    owner = state.force(receiver_of(call) or NONE)
    if role_of(state, owner) is not Role.SCALER:
        return None
    options = frozenset({"new-scale"}) if call.values else frozenset()
    state.recorder.emit(Kind.SCALER_UPDATE, call.node, scaler=as_actor(state, owner, Role.SCALER), options=options)
    return NONE


def make_scaler(state: Machine, call: Call) -> Value | None:
    enabled = call.keywords.get("enabled")
    actor = Actor(state.uid(), "scaler", Role.SCALER, known=True)
    if enabled is not None and not state.truth(enabled):
        actor = replace(actor, options=frozenset({"disabled"}))
    return Thing(actor)


def helper_scaler(state: Machine, call: Call) -> Value | None:
    """`loss_scaler(loss, optimizer, clip_grad=…, parameters=…, update_grad=…)`: the whole update in one call."""
    if not isinstance(call.function, Opaque) or len(call.args) < 2:
        return None
    loss, target = state.force(call.args[0]), state.force(call.args[1])
    optimizer = as_actor(state, target, Role.OPTIMIZER)
    scaler = as_actor(state, call.function, Role.SCALER)
    if not isinstance(loss, Opaque) or optimizer is None:
        return None
    scaled = replace_loss(state, loss, scaler)
    emit_backward(state, call, scaled)
    wanted = next((call.keywords[name] for name in ("update_grad", "need_update") if name in call.keywords), Known(True))
    if state.truth(state.force(wanted)):
        state.recorder.emit(Kind.UNSCALE, call.node, targets=(optimizer,), scaler=scaler)
        if "clip_grad" in call.keywords:
            state.recorder.emit(Kind.CLIP, call.node, targets=(optimizer,))
        state.recorder.emit(Kind.STEP, call.node, targets=(optimizer,), scaler=scaler)
        state.recorder.emit(Kind.SCALER_UPDATE, call.node, scaler=scaler)
    return state.opaque(("norm", call.node.lineno, state.steps), "norm", causes=frozenset({"loss"}), name="norm")


def replace_loss(state: Machine, loss: Opaque, scaler: Actor | None) -> Opaque:
    made = state.opaque(("scale", loss.key), loss.text, loss, reduced=loss.reduced, attached=loss.attached)
    made.weight, made.scaler = loss.weight, scaler
    return made


def amp_initialize(state: Machine, call: Call) -> Value | None:
    """apex: `model, optimizer = amp.initialize(model, optimizer)`: the same objects."""
    if not call.path.endswith("amp.initialize") or not call.args:
        return None
    optimizers = call.argument(1, "optimizers")
    return call.args[0] if optimizers is None else Items([call.args[0], optimizers], "tuple")


def clear_gradient(state: Machine, call: Call) -> Value | None:
    """`p.grad.zero_()` and `p.grad.detach_()`."""
    owner = state.force(receiver_of(call) or NONE)
    if not _is_gradient(owner):
        return None
    if call.name == "zero_":
        state.recorder.emit(Kind.ZERO, call.node, targets=state.owners_of_gradient(owner))
    return NONE


def scale_gradient(state: Machine, call: Call) -> Value | None:
    """`p.grad.div_(n)`, `p.grad.mul_(x)`."""
    owner = state.force(receiver_of(call) or NONE)
    if not _is_gradient(owner) or not call.args:
        return None
    power = 1 if call.name.startswith("mul") else -1
    weight = Weight(factors_of(state, call.args[0], power, call.node.args[0]))
    state.recorder.emit(Kind.NORMALIZE, call.node, targets=state.owners_of_gradient(owner), weight=weight)
    return NONE


def scale_all(state: Machine, call: Call) -> Value | None:
    """`scale_grads(model, x)`, `torch._foreach_mul_(grads, x)`."""
    if len(call.args) < 2:
        return None
    power = -1 if "div" in call.name else 1
    weight = Weight(factors_of(state, call.args[1], power, call.node.args[-1]))
    state.recorder.emit(Kind.NORMALIZE, call.node, targets=_concerned(state, [state.force(call.args[0])]), weight=weight)
    return NONE


def _is_gradient(value: Value | None) -> bool:
    return isinstance(value, Opaque) and value.name == "grad"


def register_hook(state: Machine, call: Call) -> Value | None:
    """A hook that runs when a parameter's gradient is ready: it may step."""
    if call.args:
        state.hooks.append(state.force(call.args[0]))
    return NONE


FUNCTIONS: dict[str, Handler] = {
    **dict.fromkeys(CLIP_NAMES, clip),
    "backward": backward,
    "GradScaler": make_scaler,
    "loss_scaler": helper_scaler,
    "initialize": amp_initialize,
    "scale_grads": scale_all,
    "_foreach_mul_": scale_all,
    "_foreach_div_": scale_all,
    "zero_grad": zero_grad,
}
METHODS: dict[str, Handler] = {
    **dict.fromkeys(CLIP_NAMES, clip),
    "backward": backward,
    "manual_backward": backward,
    "step": step,
    "zero_grad": zero_grad,
    "unscale_": unscale,
    "scale": scale_loss,
    "update": update_scaler,
    "loss_scaler": helper_scaler,
    "zero_": clear_gradient,
    "mul_": scale_gradient,
    "div_": scale_gradient,
    "register_post_accumulate_grad_hook": register_hook,
}
