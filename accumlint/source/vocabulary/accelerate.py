"""Accelerate (0.20 to 1.15): `Accelerator`, what it prepares, and the window that `accumulate` counts.

`backward` divides by the engine's K, whether or not `accumulate` is entered. Each entry of `accumulate` advances one counter; every K-th,
and the last batch of a prepared loader, synchronises. Prepared optimizers and schedulers do nothing in between; raw ones, and the models'
own `zero_grad`, are not held back.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import (
    FALSE,
    NONE,
    Context,
    Instance,
    Items,
    Known,
    Mapping,
    Opaque,
    Stream,
    Thing,
    Value,
    actor_of,
    make_actor,
)
from accumlint.source.vocabulary import distributed, torch_training
from accumlint.source.vocabulary.accelerate_state import (
    Engine,
    ends_loader,
    engine_behind,
    engine_of,
    gradients,
    is_given_back,
    is_prepared,
    is_table,
    is_unfit,
    make,
    make_plugin,
    prepared_object,
    remember,
    takes_parts,
)
from accumlint.source.vocabulary.base import Attribute, Handler, as_actor, last_name, raw_module, receiver_of, role_of
from accumlint.source.vocabulary.engines import division
from accumlint.trace import Actor, Evidence, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"accelerate"})
SIGNS = frozenset({"Accelerator", "accelerator"})
TRACKED = frozenset({"Accelerator", "AttnProcsLayers", "GradientAccumulationPlugin"})
# A branch that prepares is gone down in one world and not in the other, like one that trains.
PREPARING = ("prepare", "prepare_model", "prepare_optimizer", "prepare_scheduler")
KINDS = {
    **{name: {Kind.OPAQUE} for name in PREPARING},
    "accumulate": {Kind.SYNC_OFF},
    "trigger_sync_in_backward": {Kind.SYNC_OFF},
    "save_state": {Kind.SAVE},
}
GATED = "gated"
PARTS = "window-within-batch"  # a fact: an entry for each part of a batch, though the loader's last batch ends windows
HELD_BACK = "step-held-back"  # a fact: a boundary by hand at which the engine ignores the step


# Making and preparing.
def accelerator(state: Machine, call: Call) -> Value | None:
    """`Accelerator(gradient_accumulation_steps=K, mixed_precision=…)`."""
    return make(state, call) if not call.path or "accelerate" in call.path else None


def plugin(state: Machine, call: Call) -> Value | None:
    return make_plugin(state, call)


def prepare(state: Machine, call: Call) -> Value | None:
    """`accelerator.prepare(model, optimizer, loader, scheduler)`: what takes part comes back in the engine's hands."""
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    if call.spread:
        return state.opaque(("prepared", call.node.lineno), state.recorder.text(call.node))
    made = [_prepared(state, engine, state.force(value)) for value in call.args]
    return made[0] if len(made) == 1 else Items(made, "tuple")


def _prepared(state: Machine, engine: Engine, value: Value) -> Value:
    role = None if is_table(state, value) else role_of(state, value)
    if isinstance(value, Instance) and value.cls.find("step") is not None:
        return value  # a helper around an optimizer: its methods are followed
    if role is Role.MODEL or _is_module(state, value, role):
        return _wrapped(state, engine, value)
    if role in {Role.OPTIMIZER, Role.SCHEDULER, Role.LOADER}:
        made = prepared_object(state, engine, value, role)
        if role is Role.OPTIMIZER and all(one.uid != made.actor.uid for one in engine.optimizers):
            engine.optimizers.append(made.actor)
            state.optimizers.append(made)
        return made
    return value


def _is_module(state: Machine, value: Value, role: Role | None) -> bool:
    if isinstance(value, Instance):
        return value.cls.find("forward") is not None
    used: set[str] = state.index.usage.get(last_name(value), set())
    if is_table(state, value):
        return False
    return role is None and isinstance(value, Opaque) and bool(used & {"parameters", "named_parameters"})


def _wrapped(state: Machine, engine: Engine, value: Value) -> Value:
    """A model in the wrapper that the launcher chooses."""
    actor = actor_of(value)
    if actor is not None and actor.uid in gradients(state).made:
        return value
    raw = raw_module(value)
    base = as_actor(state, raw, Role.MODEL)
    if base is None:
        return value
    options = frozenset({"prepared", "optional"})
    actor = Actor(state.uid(), base.name, Role.MODEL, engine.wrapper, base.uid, True, options)
    made = Thing(actor, inner=value, supposed=tuple(state.supposed))
    if isinstance(raw, (Thing, Instance)):
        raw.wrapped_by = made
    state.wrappers[base.uid] = made
    remember(engine, made.actor, base)
    return made


def unwrap(state: Machine, call: Call) -> Value | None:
    """`accelerator.unwrap_model(model)`: the module behind the wrapper."""
    if (receiver_of(call) is not None and engine_of(state, receiver_of(call)) is None) or not call.args:
        return None
    return raw_module(state.force(call.args[0]))


def layers(state: Machine, call: Call) -> Value | None:
    """diffusers: `AttnProcsLayers(unet.attn_processors)`: parameters of another model, in a module whose forward nobody calls."""
    given = state.force(call.args[0]) if call.args else NONE
    made = Thing(make_actor(Role.MODEL, call.name))
    if isinstance(given, Opaque) and given.owner is not None:
        whole = raw_module(state.force(given.owner))
        if whole is not None and as_actor(state, whole, Role.MODEL) is not None:
            state.adopt(whole, made)
    return made


# The window.
def accumulate(state: Machine, call: Call) -> Value | None:
    """`with accelerator.accumulate(model, …):`: each entry is one micro-batch."""
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    values = [state.force(value) for value in call.args]

    def begins(machine: Machine) -> bool:
        engine.shared.engine = engine
        _advance(machine, engine)
        if not engine.accumulates:
            return False
        engine.entered = True
        _announce(machine, engine, values, call.spread, call.node)
        if takes_parts(machine, engine, call.node):
            machine.recorder.fact(PARTS, call.node)
        return not engine.shared.sync and not engine.each_batch

    return _holding_back(call, values, begins)


def _holding_back(call: Call, values: list[Value], begins: Callable[[Machine], bool]) -> Context:
    """A context in which models do not synchronise, where `begins` says so and some of them can be held back."""
    inner = Context("no_sync", tuple(values))

    def entering(machine: Machine, node: ast.AST) -> None:
        if begins(machine) and _silences(values):
            machine.contexts.append(inner)

    def leaving(machine: Machine, node: ast.AST) -> None:
        if inner in machine.contexts:
            machine.contexts.remove(inner)

    return Context("other", place=call.node, entering=entering, leaving=leaving)


def _advance(state: Machine, engine: Engine) -> None:
    if engine.with_loader and ends_loader(state):
        engine.count, engine.shared.sync = 0, True
    else:
        engine.count += 1
        engine.shared.sync = engine.count % int(engine.k.value) == 0


def _silences(values: list[Value]) -> bool:
    return any(not is_unfit(value) for value in values)


def _announce(state: Machine, engine: Engine, values: list[Value], spread: bool, node: ast.AST) -> None:
    """An event for each model that the context is asked to hold back, or for the argument that is none."""
    node = state.managing[0] if state.managing else node
    options = {"context", "accumulate"}
    if engine.shared.sync or engine.each_batch:
        state.recorder.emit(Kind.SYNC_ON, node, options=frozenset(options))
        return
    announce_off(state, values, options, spread, node)


def announce_off(state: Machine, values: list[Value], options: set[str], spread: bool, node: ast.AST) -> None:
    if not values:
        state.recorder.emit(Kind.SYNC_OFF, node, options=frozenset(options))
    for value in values:
        if is_unfit(value) and not spread:
            state.recorder.emit(Kind.SYNC_OFF, node, options=frozenset(options | {"no-model", _form(value)}))
            continue
        if spread:
            options = options | {"spread"}
        actor = as_actor(state, value, Role.MODEL)
        if isinstance(value, Opaque) and actor is not None and actor.wrapper is Wrapper.NONE and not _is_raw(state, value, actor):
            actor = value.actor = replace(actor, wrapper=Wrapper.UNKNOWN, options=actor.options | {"prepared", "optional"})
        state.recorder.emit(Kind.SYNC_OFF, node, model=actor, options=frozenset(options))


def _is_raw(state: Machine, value: Opaque, actor: Actor) -> bool:
    return actor.uid in state.wrappers or not is_prepared(state, value)


def _form(value: Value) -> str:
    if isinstance(value, Items):
        return value.kind
    return {Mapping: "dict", Stream: "generator"}.get(type(value), "tensor")


def no_sync(state: Machine, call: Call) -> Value | None:
    """`with accelerator.no_sync(model):`: the wrapper's own no_sync, or nothing where the argument has none."""
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    values = [state.force(value) for value in (*call.args, *call.keywords.values())]

    def begins(machine: Machine) -> bool:
        announce_off(machine, values, {"context"}, call.spread, machine.managing[0] if machine.managing else call.node)
        return True

    return _holding_back(call, values, begins)


def trigger_sync(state: Machine, call: Call) -> Value | None:
    """`accelerator.trigger_sync_in_backward(model)` arms the reducer after the forward: which backward reduces is not followed."""
    if engine_of(state, receiver_of(call)) is None:
        return None
    state.engine(call)
    return Context("other")


# The backward and the update.
def backward(state: Machine, call: Call) -> Value | None:
    """`accelerator.backward(loss)`: divides by the engine's K, and scales under fp16."""
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    engine.shared.engine = engine
    loss = state.force(call.args[0] if call.args else call.keywords.get("loss", NONE))
    if engine.scaler is not None and isinstance(loss, Opaque):
        loss = torch_training.replace_loss(state, loss, engine.scaler)
    if not engine.is_followed:
        return torch_training.emit_backward(state, call, loss, "engine")
    options = () if engine.known else ("engine",)
    return torch_training.emit_backward(state, call, loss, *options, factors=division(state, engine.k, call.node, engine.text))


def step(state: Machine, call: Call) -> Value | None:
    """A prepared optimizer or scheduler does nothing inside the window."""
    owner = state.force(receiver_of(call) or NONE)
    role = role_of(state, owner)
    if role not in {Role.OPTIMIZER, Role.SCHEDULER} or _is_followed(owner):
        return None
    engine = engine_behind(state, owner)
    if engine is None or not is_prepared(state, owner) or (role is Role.SCHEDULER and not engine.steps_scheduler):
        return None
    if not engine.shared.sync:
        if role is Role.OPTIMIZER:
            _note_held_back(state)
        return NONE
    begun = len(state.recorder.events)
    made = torch_training.step(state, call)
    if role is Role.OPTIMIZER:
        _mark_steps(state, engine, owner, begun, call)
    return made


def _is_followed(owner: Value) -> bool:
    return isinstance(owner, Instance)


def _mark_steps(state: Machine, engine: Engine, owner: Value, begun: int, call: Call) -> None:
    """The step is the engine's: held back inside windows, and through the scaler under fp16."""
    events = state.recorder.events
    scaler = engine.scaler if is_given_back(state, owner) else None
    for at in range(begun, len(events)):
        if events[at].kind is Kind.STEP:
            options = events[at].options | ({GATED} if engine.entered else set())
            events[at] = replace(events[at], options=options, scaler=scaler)
    if scaler is not None or engine.may_scale is not None:
        state.recorder.emit(Kind.SCALER_UPDATE, call.node, scaler=scaler or engine.may_scale)


def _note_held_back(state: Machine) -> None:
    """A test against K says that the window ends here, and the engine says that it does not."""
    names = [name for root in state.world.knowledge.accumulations.values() for name in re.findall(r"\w+", root.text)[-1:]]
    for guard in state.recorder.guards:
        if (
            guard.cause == "gate"
            and "sync_gradients" not in guard.text
            and any(re.search(rf"%[\s\w.()\[\]'\"]*\b{name}\b", guard.text) for name in names)
        ):
            known = state.recorder.facts.setdefault(HELD_BACK, [])
            if all(one.place != guard.place for one in known):
                known.append(Evidence(guard.place, guard.text))


def zero_grad(state: Machine, call: Call) -> Value | None:
    """A prepared optimizer clears nothing inside the window."""
    owner = state.force(receiver_of(call) or NONE)
    if role_of(state, owner) is not Role.OPTIMIZER or _is_followed(owner):
        return None
    engine = engine_behind(state, owner)
    return NONE if engine is not None and not engine.shared.sync and is_prepared(state, owner) else None


def clip(state: Machine, call: Call) -> Value | None:
    """`accelerator.clip_grad_norm_(parameters, x)`: unscales every prepared optimizer, then clips."""
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    _unscale(state, engine, call)
    return torch_training.clip(state, call)


def unscale(state: Machine, call: Call) -> Value | None:
    engine = engine_of(state, receiver_of(call))
    if engine is None:
        return None
    _unscale(state, engine, call)
    return NONE


def _unscale(state: Machine, engine: Engine, call: Call) -> None:
    """Where fp16 is only a choice at launch, the calls off the boundary are told by their clip."""
    scaler = engine.scaler or (engine.may_scale if engine.shared.sync and not state.in_hook else None)
    given = actor_of(state.force(call.argument(0, "optimizer") or NONE)) if call.name == "unscale_gradients" else None
    targets = (given,) if given is not None else tuple(engine.optimizers)
    if scaler is not None and targets:
        state.recorder.emit(Kind.UNSCALE, call.node, scaler=scaler, targets=targets)


def save_state(state: Machine, call: Call) -> Value | None:
    """`accelerator.save_state(folder)`: models, optimizers, schedulers; not the gradients of a window."""
    if engine_of(state, receiver_of(call)) is None:
        return None
    state.recorder.emit(Kind.SAVE, call.node, options=frozenset({"optimizer-state"}))
    return NONE


# Over the ranks.
def gathered(state: Machine, call: Call) -> Value | None:
    """`accelerator.gather(x)`, `accelerator.reduce(x)`: the ranks agree on it; a count becomes one over all ranks."""
    if engine_of(state, receiver_of(call)) is None or not call.args:
        return None
    value = state.force(call.args[0])
    if not isinstance(value, Opaque):
        return value
    made = value.copied()
    made.agreed, made.forwards, made.attached = True, frozenset(), False
    if made.quantity in {Quantity.UNITS, Quantity.WINDOW_UNITS}:
        distributed.all_reduce(state, replace_arguments(call, made))
        how = call.argument(1, "reduction")
        if call.name == "reduce" and isinstance(how, Known) and how.value == "mean" and made.weight is not None:
            made.weight = made.weight.times(Factor(Quantity.WORLD, -1, None, "mean", state.recorder.place(call.node)))
    return made


def replace_arguments(call: Call, value: Value) -> Call:
    return replace(call, args=[value, *call.args[1:]])


def same_first(state: Machine, call: Call) -> Value | None:
    """`skip_first_batches(loader, n)`: a prepared loader stays one."""
    return state.force(call.args[0]) if call.args else None


def context(state: Machine, call: Call) -> Value | None:
    return Context("other") if engine_of(state, receiver_of(call)) is not None else None


def nothing(state: Machine, call: Call) -> Value | None:
    return NONE if engine_of(state, receiver_of(call)) is not None else None


# Attributes.
def sync_gradients(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    if engine is None:
        return None
    if not engine.known:
        return None
    return Known(engine.shared.sync, engine.k.roots, None, engine.k.roots)


def steps(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    return engine.k if engine is not None and engine.known else None


def processes(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    if engine is None:
        return None
    return state.opaque(("call", "world_size"), f"{engine.actor.name}.num_processes", quantity=Quantity.WORLD, name="num_processes")


def of_rank(state: Machine, owner: Value) -> Value | None:
    engine = engine_of(state, owner)
    return state.opaque(("call", "rank"), f"{engine.actor.name}.process_index", causes=frozenset({"rank"})) if engine is not None else None


def kind_of_world(state: Machine, owner: Value) -> Value | None:
    """Plain data parallelism: under others the engine is theirs."""
    return Known("MULTI_GPU") if engine_of(state, owner) is not None else None


def no_plugin(state: Machine, owner: Value) -> Value | None:
    """`accelerator.state.deepspeed_plugin`: none where the launcher's choice is plain data parallelism."""
    holder = owner.owner if isinstance(owner, Opaque) else None
    return NONE if holder is not None and engine_of(state, state.force(holder)) is not None else None


def world_named(name: str) -> Attribute:
    def handler(state: Machine, owner: Value) -> Value | None:
        return Known(name) if isinstance(owner, Opaque) and owner.path.endswith("DistributedType") else None

    return handler


def skipped(state: Machine, owner: Value) -> Value | None:
    """The scaler skipped a step: the normal path is that it did not."""
    return FALSE if engine_of(state, owner) is not None else None


FUNCTIONS: dict[str, Handler] = {
    "Accelerator": accelerator,
    "AttnProcsLayers": layers,
    "GradientAccumulationPlugin": plugin,
    "skip_first_batches": same_first,
    "extract_model_from_parallel": unwrap,
}
METHODS: dict[str, Handler] = {
    **dict.fromkeys((*PREPARING, "prepare_data_loader"), prepare),
    **dict.fromkeys(("autocast", "join_uneven_inputs", "profile", "main_process_first", "local_main_process_first"), context),
    **dict.fromkeys(("gather", "gather_for_metrics", "reduce", "pad_across_processes"), gathered),
    **dict.fromkeys(("wait_for_everyone", "print", "log", "end_training", "init_trackers", "free_memory", "clear"), nothing),
    **dict.fromkeys(("register_for_checkpointing", "register_save_state_pre_hook", "register_load_state_pre_hook", "load_state"), nothing),
    **dict.fromkeys(("clip_grad_norm_", "clip_grad_value_"), clip),
    "accumulate": accumulate,
    "backward": backward,
    "no_sync": no_sync,
    "save_state": save_state,
    "skip_first_batches": same_first,
    "step": step,
    "trigger_sync_in_backward": trigger_sync,
    "unscale_gradients": unscale,
    "unwrap_model": unwrap,
    "zero_grad": zero_grad,
}
ATTRIBUTES: dict[str, Attribute] = {
    **dict.fromkeys(("is_main_process", "is_local_main_process", "is_last_process", "process_index", "local_process_index"), of_rank),
    **{name: world_named(name) for name in ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "MULTI_CPU")},
    "deepspeed_plugin": no_plugin,
    "distributed_type": kind_of_world,
    "gradient_accumulation_steps": steps,
    "num_processes": processes,
    "optimizer_step_was_skipped": skipped,
    "sync_gradients": sync_gradients,
}
