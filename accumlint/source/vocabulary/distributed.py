"""torch.distributed: wrappers, the sync flag and its contexts, collectives, ranks."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.counts import is_stale, root_of
from accumlint.source.rehearsal.unclear import ask_for_sync
from accumlint.source.rehearsal.values import (
    FALSE,
    NONE,
    TRUE,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Opaque,
    Phi,
    Stream,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.source.rehearsal.worlds import is_together
from accumlint.source.vocabulary.base import Handler, as_actor, last_name, raw_module, receiver_of, role_of
from accumlint.trace import Actor, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

EVERYONE = "all ranks"
DIFFERENTIABLE = "distributed.nn."  # `torch.distributed.nn.all_gather` and its like
OF_DDP = frozenset({"torch", "apex", "nn", ""})
SPEAKS_OF_DDP = re.compile(r"ddp|distribut|parallel|replicat", re.IGNORECASE)
GROUP_NAME = re.compile(r"(^|[._])(dp|data_parallel|replica|shard|tp|pp)\w*group|group_(dp|tp)$", re.IGNORECASE)
ON_DEVICE = re.compile(r"\.device [!=]= |\.is_cuda$")
PROGRESS_NAME = re.compile(r"tqdm|progress|bar$|track|prefetch", re.IGNORECASE)


def ddp(state: Machine, call: Call) -> Value | None:
    """`DistributedDataParallel(model)`."""
    kind = Wrapper.APEX_DDP if call.path.startswith("apex") or "delay_allreduce" in call.keywords else Wrapper.DDP
    if call.path.partition(".")[0] not in OF_DDP:
        kind = Wrapper.UNKNOWN  # one of the name from elsewhere
    return wrap(state, call, kind)


def fsdp(state: Machine, call: Call) -> Value | None:
    return wrap(state, call, Wrapper.FSDP1)


def fully_shard(state: Machine, call: Call) -> Value | None:
    """FSDP2 changes the module in place."""
    return _in_place(state, call, Wrapper.FSDP2)


def replicate(state: Machine, call: Call) -> Value | None:
    """Composable `replicate(model)`: DDP without a module of its own; the newer one is FSDP2 on one dimension."""
    if "_composable" not in call.path:
        return None
    return _in_place(state, call, Wrapper.FSDP2 if "with_fsdp" in call.path else Wrapper.DDP)


def _in_place(state: Machine, call: Call, kind: Wrapper) -> Value:
    inner = state.force(call.args[0] if call.args else call.keywords.get("module", NONE))
    actor = as_actor(state, inner, Role.MODEL)
    if actor is not None and isinstance(inner, (Thing, Instance, Opaque)):
        optional = state.journal is not None or _is_chosen(state)
        options = actor.options | ({"optional"} if optional else set())
        inner.actor = replace(actor, wrapper=kind, options=options)
        state.recorder.fact("distributed", call.node)
    return inner


def _is_chosen(state: Machine) -> bool:
    """Whether a setting decides that there is a wrapper; that there are several ranks does not, nor where the model is by now."""
    asked = [guard.text for guard in state.recorder.guards if guard.cause in {"setting", "unknown"}]
    asked += [value.text for value, _ in state.supposed if not is_together(value.text)]
    tests = _tests_of_property(state)
    return any(not ON_DEVICE.search(text) and (tests is None or any(text in test for test in tests)) for text in asked)


def _tests_of_property(state: Machine) -> set[str] | None:
    """The tests of the property that is being asked for: who is the first to ask decides nothing. None where no property is."""
    function = state.frame.function
    if function is None or not {"property", "cached_property"} & set(function.decorators):
        return None
    return {state.recorder.text(part.test) for part in walk(function.node) if isinstance(part, (ast.If, ast.IfExp))}


def set_static_graph(state: Machine, call: Call) -> Value | None:
    """`ddp._set_static_graph()`, which older scripts call for `static_graph=True`."""
    owner = state.force(receiver_of(call) or NONE)
    if not isinstance(owner, Thing) or owner.actor.wrapper is not Wrapper.DDP:
        return None
    owner.actor = replace(owner.actor, options=owner.actor.options | {"static_graph"})
    return NONE


def wrap(state: Machine, call: Call, kind: Wrapper) -> Value | None:
    inner = state.force(call.args[0] if call.args else call.keywords.get("module", NONE))
    raw = raw_module(inner)
    as_actor(state, raw, Role.MODEL)
    base = actor_of(raw)
    options: set[str] = set()
    static = state.force(call.keywords["static_graph"]) if "static_graph" in call.keywords else None
    if isinstance(static, Known) and static.value:
        options.add("static_graph")
    if group_of(state, call.keywords.get("process_group")) == "own":
        options.add("process_group")
    if _is_chosen(state):
        options.add("optional")
    name = base.name if base is not None else "model"
    actor = Actor(state.uid(), name, Role.MODEL, kind, base.uid if base is not None else None, True, frozenset(options))
    made = Thing(actor, inner=inner, supposed=tuple(state.supposed))
    if isinstance(raw, (Thing, Instance)):
        raw.wrapped_by = made
    if base is not None and kind is not Wrapper.FSDP1:
        state.wrappers[base.uid] = made
    state.recorder.fact("distributed", call.node)
    return made


def group_of(state: Machine, value: Value | None) -> str:
    """Whether a process group is that of all ranks or one of its own; "" where nobody knows."""
    group = state.force(value) if value is not None else NONE
    if isinstance(group, Known):
        return "all" if group.value is None else ""
    if not isinstance(group, Opaque):
        return ""
    if group.path.endswith("group.WORLD") or group.name in {"WORLD", "_get_default_group", EVERYONE}:
        return "all"
    return "own" if group.name in {"new_group", "new_subgroups", "get_group"} or GROUP_NAME.search(group.text) else ""


def new_group(state: Machine, call: Call) -> Value | None:
    """`new_group()` without ranks, or with all of them, is everyone."""
    ranks = call.argument(0, "ranks")
    text = state.recorder.text(call.node)
    everyone = ranks is None or (isinstance(ranks, Known) and ranks.value is None) or ("range" in text and "world" in text.lower())
    return state.opaque(("group", call.node.lineno, call.node.col_offset), text, name=EVERYONE if everyone else "new_group")


def no_sync(state: Machine, call: Call) -> Value | None:
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Instance) and owner.cls.find("no_sync") is not None:
        return None
    if isinstance(owner, Opaque) and (actor_of(owner) is None or not actor_of(owner).known):  # type: ignore[union-attr]
        actor = as_actor(state, owner, Role.MODEL)
        if actor is not None and actor.wrapper is Wrapper.NONE:
            made_elsewhere = owner.key in state.elsewhere.held and not SPEAKS_OF_DDP.search(str(owner.key[1]))
            kind = Wrapper.DDP if state.index.uses_ddp and not state.index.uses_fsdp and not made_elsewhere else Wrapper.UNKNOWN
            owner.actor = replace(actor, wrapper=kind)
    return Context("no_sync", (owner,), place=call.node)


def null_context(state: Machine, call: Call) -> Value | None:
    return Context("null")


def no_grad(state: Machine, call: Call) -> Value | None:
    if call.name == "set_grad_enabled" and call.args:
        enabled = state.force(call.args[0])
        return Context("other" if not isinstance(enabled, Known) or enabled.value else "no_grad")
    return Context("no_grad")


def exit_stack(state: Machine, call: Call) -> Value | None:
    return Context("stack")


def scale_loss(state: Machine, call: Call) -> Value | None:
    """apex: `with amp.scale_loss(loss, optimizer) as scaled`: unscales by itself at the end of the block."""
    value = state.force(call.args[0]) if call.args else NONE
    return Context("scaled", value=value, place=call.node)


def scale_loss_of(state: Machine, call: Call) -> Value | None:
    """The same of an `amp` that was imported where nobody sees it, in another function of the class."""
    return scale_loss(state, call) if last_name(receiver_of(call)) == "amp" else None


def sync_flag(state: Machine, call: Call) -> Value | None:
    """FSDP2: `model.set_requires_gradient_sync(flag)`."""
    owner = state.force(receiver_of(call) or NONE)
    flag = state.force(call.args[0]) if call.args else TRUE
    actor = as_actor(state, owner, Role.MODEL)
    if isinstance(owner, (Thing, Instance, Opaque)) and actor is not None:
        if actor.wrapper is Wrapper.NONE:
            owner.actor = replace(actor, wrapper=Wrapper.FSDP2)
        set_sync(state, owner, flag, call.node, "flag")
    return NONE


def set_sync(state: Machine, owner: Value, flag: Value, node: ast.AST, option: str) -> None:
    ask_for_sync(state, flag)
    on = state.truth(flag)
    if isinstance(owner, Thing):
        owner.sync = TRUE if on else FALSE
    elif isinstance(owner, (Opaque, Instance)):
        owner.attributes["require_backward_grad_sync"] = TRUE if on else FALSE
    state.recorder.emit(Kind.SYNC_ON if on else Kind.SYNC_OFF, node, model=actor_of(owner), options=frozenset({option}))


def all_reduce(state: Machine, call: Call) -> Value | None:
    """Of a gradient: a reduction by hand. Of anything else: the value agrees between ranks afterwards."""
    value = state.force(call.args[0]) if call.args else NONE
    if isinstance(value, Opaque) and value.name == "grad":
        state.recorder.fact("manual-reduce", call.node)
        state.recorder.emit(Kind.REDUCE, call.node, options=frozenset({"manual"}))
        return NONE
    state.recorder.fact("distributed", call.node)
    group = group_of(state, call.argument(2, "group"))
    if isinstance(value, Opaque):
        for one in (value, *value.attributes.values(), *_behind(state, call.node)):
            if isinstance(one, Opaque):
                one.agreed = True  # and so do its elements: `counts[2]`
        if value.quantity is Quantity.WINDOW_UNITS or (value.quantity is Quantity.UNITS and not state.recorder.turns):
            value.quantity = Quantity.GLOBAL_UNITS
            root = root_of(value)
            value.weight = Weight(
                (
                    Factor(
                        Quantity.GLOBAL_UNITS,
                        1,
                        None,
                        value.text,
                        state.recorder.place(call.node),
                        guarded=value.guarded,
                        root=root,
                        stale=is_stale(value),
                        group=group,
                    ),
                )
            )
            if "AVG" in ast.dump(call.node):
                value.weight = value.weight.times(Factor(Quantity.WORLD, -1, None, "ReduceOp.AVG", state.recorder.place(call.node)))
    return value if isinstance(value, Opaque) else NONE


def _behind(state: Machine, node: ast.Call) -> list[Value]:
    """The tensor whose storage is handed over: `total.data`."""
    given = node.args[0] if node.args else None
    return [state.force(state.eval(given.value))] if isinstance(given, ast.Attribute) and given.attr == "data" else []


def gathered(state: Machine, call: Call) -> Value | None:
    """What all ranks have: in a list that is handed over, or, with a graph behind it, as the value of the call."""
    if DIFFERENTIABLE in call.path:
        return state.opaque(("gathered", *map(key_of, call.args)), state.recorder.text(call.node), *call.args)
    for value in call.args:
        value = state.force(value)
        if isinstance(value, Items):
            made = state.opaque(("gathered", id(value)), "gathered", *call.args, agreed=True)
            value.items[:] = [made]
            value.open = True
    return NONE


def broadcast(state: Machine, call: Call) -> Value | None:
    for value in call.args:
        value = state.force(value)
        if isinstance(value, Opaque):
            value.agreed = True
        if isinstance(value, Items):
            for item in value.items:
                if isinstance(item, Opaque):
                    item.agreed = True
    return NONE


def rank(state: Machine, call: Call) -> Value | None:
    return state.opaque(("call", call.name), state.recorder.text(call.node), causes=frozenset({"rank"}), name="rank")


def world_size(state: Machine, call: Call) -> Value | None:
    state.recorder.fact("distributed", call.node)
    text = state.recorder.text(call.node)
    group = group_of(state, call.argument(0, "group"))
    weight = Weight((Factor(Quantity.WORLD, 1, None, text, state.recorder.place(call.node), group=group),))
    key = ("call", "world_size") if group == "all" else ("call", "world_size", *state.key(*call.values))
    return state.opaque(key, text, quantity=Quantity.WORLD, weight=weight, name="world_size")


def clock(state: Machine, call: Call) -> Value | None:
    return state.opaque(("call", call.name, state.steps), call.name, causes=frozenset({"clock"})) if call.path.startswith("time.") else None


def memory(state: Machine, call: Call) -> Value | None:
    return state.opaque(("call", call.name, state.steps), call.name, causes=frozenset({"memory"}))


def comm_hook(state: Machine, call: Call) -> Value | None:
    """`model.register_comm_hook(state, hook)`: only torch's own hooks surely average."""
    owner = state.force(receiver_of(call) or NONE)
    hook = state.force(call.argument(1, "hook") or NONE)
    own = isinstance(hook, Opaque) and hook.path.startswith("torch.")
    if isinstance(owner, Thing) and not own:
        owner.actor = replace(owner.actor, options=owner.actor.options | {"comm-hook"})
    return NONE


def divide_factor(state: Machine, call: Call) -> Value | None:
    owner = state.force(receiver_of(call) or NONE)
    actor = as_actor(state, owner, Role.MODEL)
    if actor is not None and isinstance(owner, (Thing, Instance, Opaque)):
        owner.actor = replace(actor, options=actor.options | {"no-averaging"})
    return NONE


def manual_reduction(state: Machine, call: Call) -> Value | None:
    """`all_reduce_gradients(model)`, `average_gradients(model)`: a helper nobody can see into."""
    state.recorder.fact("manual-reduce", call.node)
    state.recorder.emit(Kind.REDUCE, call.node, options=frozenset({"manual"}))
    return NONE


def taken(state: Machine, call: Call) -> Value | None:
    """A reduction by hand in the source is followed; where its buffers hide the gradients, it is believed by its name."""
    if FUNCTIONS.get(call.name) is not manual_reduction or not isinstance(call.function, Function):
        return None
    before = len(state.recorder.events)
    made = state.call_function(call.function, call.args, call.keywords, call.node)
    seen = any(event.kind is Kind.REDUCE for event in state.recorder.events[before:])
    if not seen and any(isinstance(part, ast.Call) and "reduce" in terminal(part.func) for part in walk(call.function.node)):
        manual_reduction(state, call)
    return made


def same_iterable(state: Machine, call: Call) -> Value | None:
    """Unknown wrappers of a loader are loaders: `tqdm(loader)`, `logger.log_every(loader, n)`."""
    if role_of(state, receiver_of(call)) is not None:
        return None
    first = state.force(call.args[0]) if call.args else None
    return first if first is not None and not isinstance(first, Known) else None


def fallback(state: Machine, call: Call) -> Value | None:
    """What an unknown function makes of `enumerate(loader)` is the same to go over: a progress bar by another name."""
    first = call.args[0] if call.args else None
    if first.__class__ is Phi:
        first = state.force(first)
    if not isinstance(first, Stream):
        return None
    return first if first.kind == "enumerate" or (first.kind in {"zip", "iterator"} and PROGRESS_NAME.search(call.name)) else None


FUNCTIONS: dict[str, Handler] = {
    "DistributedDataParallel": ddp,
    "DDP": ddp,
    "DistributedDataParallelCPU": ddp,
    "FullyShardedDataParallel": fsdp,
    "FSDP": fsdp,
    "fully_shard": fully_shard,
    "replicate": replicate,
    "new_group": new_group,
    "nullcontext": null_context,
    "suppress": null_context,
    "no_grad": no_grad,
    "inference_mode": no_grad,
    "set_grad_enabled": no_grad,
    "ExitStack": exit_stack,
    "scale_loss": scale_loss,
    "all_reduce": all_reduce,
    "all_gather": gathered,
    "all_gather_object": gathered,
    "broadcast": broadcast,
    "broadcast_object_list": broadcast,
    "get_rank": rank,
    "get_world_size": world_size,
    "time": clock,
    "perf_counter": clock,
    "monotonic": clock,
    "memory_allocated": memory,
    "memory_reserved": memory,
    "max_memory_allocated": memory,
    "all_reduce_gradients": manual_reduction,
    "average_gradients": manual_reduction,
    "reduce_gradients": manual_reduction,
    "all_reduce_and_rescale_tensors": manual_reduction,
    "tqdm": same_iterable,
    "TQDM": same_iterable,
    "trange": same_iterable,
    "no_sync": no_sync,
    "synchronize_gradients": manual_reduction,
}
BY_HAND = frozenset(name for name, handler in FUNCTIONS.items() if handler is manual_reduction)
METHODS: dict[str, Handler] = {
    "scale_loss": scale_loss_of,
    "register_comm_hook": comm_hook,
    "set_gradient_divide_factor": divide_factor,
    "set_reduce_scatter_divide_factor": divide_factor,
    "no_sync": no_sync,
    "set_requires_gradient_sync": sync_flag,
    "_set_static_graph": set_static_graph,
    "all_reduce": all_reduce,
    "log_every": same_iterable,
    "tqdm": same_iterable,
}
