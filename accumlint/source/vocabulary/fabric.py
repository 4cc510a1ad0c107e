"""Lightning Fabric (2.0 to 2.6), and the older LightningLite: the loop is the user's, Fabric wraps, scales and synchronises.

Its backward divides by nothing. `no_backward_sync` is the only switch of the synchronisation, and works as the strategy does: DDP
reads it in the forward, FSDP in the backward. Under half precision with a scaler the wrapped optimizer's step unscales, and so does
`clip_gradients`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.rehearsal.values import (
    NONE,
    Class,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Opaque,
    Partial,
    Thing,
    Value,
    actor_of,
)
from accumlint.source.vocabulary import distributed, torch_training
from accumlint.source.vocabulary.base import Attribute, Handler, as_actor, last_name, raw_module, receiver_of
from accumlint.source.vocabulary.engines import HALF, precision_scaler
from accumlint.trace import Actor, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
SIGNS = frozenset({"no_backward_sync"})
TRACKED = frozenset(
    {"Fabric", "MixedPrecision", "MixedPrecisionPlugin", "setup", "setup_module", "setup_optimizers", "setup_dataloaders", "launch"}
)
LAUNCHERS = frozenset({"launch"})

FABRIC_NAME = re.compile(r"(^|_)(fabric|lite)$", re.IGNORECASE)
FABRIC_USES = frozenset({"no_backward_sync", "setup_module", "setup_optimizers", "setup_dataloaders"})
LITE_BASES = re.compile(r"(^|\.)(LightningLite|Fabric)$")
STRATEGIES = (
    (re.compile(r"deepspeed", re.IGNORECASE), Wrapper.ZERO),
    (re.compile(r"model_?parallel", re.IGNORECASE), Wrapper.FSDP2),
    (re.compile(r"fsdp", re.IGNORECASE), Wrapper.FSDP1),
    (re.compile(r"ddp", re.IGNORECASE), Wrapper.DDP),
    (re.compile(r"^(dp|single.*|xla.*)$|DataParallel|SingleDevice|XLA"), Wrapper.NONE),
)


@dataclass(frozen=True)
class Setup:
    """How a Fabric sets things up: the wrapper of its models, whether the code fixes that, and the scaler of half precision."""

    wrapper: Wrapper = Wrapper.UNKNOWN
    optional: bool = True
    scaler: Actor | None = None


def make(state: Machine, call: Call) -> Value | None:
    """`Fabric(strategy=…, precision=…)`."""
    if call.path and not call.path.startswith(("lightning", "pytorch_lightning")):
        return None
    made = Thing(Actor(state.uid(), "fabric", Role.ENGINE, known=True))
    state.memory["fabric", made.actor.uid] = setup_of(state, call)
    return made


def setup_of(state: Machine, call: Call) -> Setup:
    """What the arguments of a constructor say."""
    strategy = call.argument(1, "strategy")
    wrapper = wrapper_of(state, strategy)
    devices = _number(state, call.argument(2, "devices"))
    if devices == 1 and _is_left_open(state, strategy) and _number(state, call.argument(3, "num_nodes") or Known(1)) == 1:
        wrapper = Wrapper.NONE  # one process
    fixed = devices is not None and devices > 1
    return Setup(wrapper, not (fixed and strategy is not None), _scaler_given(state, call))


def _number(state: Machine, value: Value | None) -> int | None:
    """The number that the code fixes."""
    found = state.force(value) if value is not None else NONE
    fixed = isinstance(found, Known) and type(found.value) is int and not found.roots
    return found.value if isinstance(found, Known) and fixed else None


def _is_left_open(state: Machine, strategy: Value | None) -> bool:
    """Whether the number of devices decides what is wrapped."""
    value = state.force(strategy) if strategy is not None else NONE
    return isinstance(value, Known) and value.value in {None, "auto"}


def _scaler_given(state: Machine, call: Call) -> Actor | None:
    return scaler_of(state, call.argument(4, "precision")) or scaler_among(state, call.argument(5, "plugins"))


def scaler_among(state: Machine, plugins: Value | None) -> Actor | None:
    """The scaler of a precision plugin that is given as an object."""
    value = state.force(plugins) if plugins is not None else NONE
    candidates = [state.force(item) for item in value.items] if isinstance(value, Items) else [value]
    known = (state.memory.get(("precision", one.actor.uid)) for one in candidates if isinstance(one, Thing))
    return next((one for one in known if isinstance(one, Actor)), None)


def precision_plugin(state: Machine, call: Call) -> Value | None:
    """`MixedPrecision("16-mixed", device)`: a precision that brings a scaler."""
    scaler = scaler_of(state, call.argument(0, "precision"))
    if scaler is None:
        return None
    made = Thing(Actor(state.uid(), call.name, Role.OTHER, known=True))
    state.memory["precision", made.actor.uid] = scaler
    return made


def wrapper_of(state: Machine, strategy: Value | None) -> Wrapper:
    """The wrapper that a strategy puts around a model; where none is chosen, several devices make it DDP."""
    value = state.force(strategy) if strategy is not None else NONE
    if isinstance(value, Known):
        if value.value in {None, "auto"}:
            return Wrapper.DDP
        text = str(value.value)
    elif isinstance(value, Opaque) and value.key[0] == "call":
        text = value.name or value.text
    else:
        return Wrapper.UNKNOWN
    return next((wrapper for pattern, wrapper in STRATEGIES if pattern.search(text)), Wrapper.UNKNOWN)


def scaler_of(state: Machine, precision: Value | None) -> Actor | None:
    """The scaler that 16-bit mixed precision brings along."""
    value = state.force(precision) if precision is not None else NONE
    return precision_scaler(state) if isinstance(value, Known) and value.value in HALF else None


def find(state: Machine, value: Value | None) -> Setup | None:
    """The setup of a Fabric; None for what is not one."""
    value = state.force(value) if value is not None else None
    if isinstance(value, Thing):
        known = state.memory.get(("fabric", value.actor.uid))
        return known if isinstance(known, Setup) else None
    if isinstance(value, Instance):
        return _of_instance(state, value)
    if isinstance(value, Opaque) and not value.forwards and not value.path:
        name = last_name(value)
        if FABRIC_NAME.search(name) or len(state.index.usage.get(name, set()) & FABRIC_USES) >= 1:
            return Setup()
    return None


def _of_instance(state: Machine, value: Instance) -> Setup | None:
    """An object of a class of the source that derives from LightningLite or Fabric."""
    if ("fabric", value.uid) not in state.memory and not _is_lite(value.cls):
        return None
    found = state.memory.setdefault(("fabric", value.uid), Setup())
    return found if isinstance(found, Setup) else None


def _is_lite(cls: Class) -> bool:
    return any(isinstance(base, Opaque) and LITE_BASES.search(base.path or base.text) for base in cls.ancestry())


def construct(state: Machine, cls: Class, call: Call) -> Value | None:
    if not _is_lite(cls):
        return None
    made = Instance(cls)
    state.memory["fabric", made.uid] = setup_of(state, call)
    return made


# What it sets up.
def setup(state: Machine, call: Call) -> Value | None:
    """`fabric.setup(model, *optimizers)`: the model's wrapper, and the optimizers as its own."""
    made = find(state, receiver_of(call))
    module = call.argument(0, "module", "model")
    if made is None or module is None:
        return None
    wrapped = wrapped_model(state, state.force(module), made, call)
    rest = _optimizers(state, call, 1)
    scheduler = call.keywords.get("scheduler")
    if scheduler is not None:
        rest.append(scheduler)
    return Items([wrapped, *rest], "tuple") if rest or call.spread else wrapped


def wrapped_model(state: Machine, module: Value, setup: Setup, call: Call) -> Value:
    raw = raw_module(module)
    base = as_actor(state, raw, Role.MODEL)
    if base is None or base.role is not Role.MODEL:
        return module
    wrapper = base.wrapper if base.wrapper is Wrapper.FSDP2 else setup.wrapper
    options = frozenset({"prepared", "optional" if setup.optional else "written"})
    actor = Actor(state.uid(), base.name, Role.MODEL, wrapper, base.uid, True, options)
    made = Thing(actor, inner=module, supposed=tuple(state.supposed))
    if isinstance(raw, (Thing, Instance)):
        raw.wrapped_by = made
    if wrapper in {Wrapper.DDP, Wrapper.ZERO, Wrapper.UNKNOWN}:
        state.wrappers[base.uid] = made
    if not setup.optional:
        state.recorder.fact("distributed", call.node)
    return made


def setup_optimizers(state: Machine, call: Call) -> Value | None:
    if find(state, receiver_of(call)) is None or not call.args:
        return None
    made = _optimizers(state, call, 0)
    return made[0] if len(made) == 1 and not call.spread else Items(made, "tuple")


def _optimizers(state: Machine, call: Call, first: int) -> list[Value]:
    return [_prepared(state, _an_optimizer(state, call, at)) for at in range(first, len(call.args))]


def _an_optimizer(state: Machine, call: Call, at: int) -> Value:
    """An argument that must be an optimizer, whatever the rehearsal has made of it."""
    value = state.force(call.args[at])
    if not (isinstance(value, Known) and value.value is None) or at >= len(call.node.args):
        return value
    return state.opaque(("optimizer", call.node.lineno, at), state.recorder.text(call.node.args[at]))


def _prepared(state: Machine, optimizer: Value) -> Value:
    """The same optimizer: the raw one and Fabric's step the same parameters."""
    actor = as_actor(state, optimizer, Role.OPTIMIZER)
    if actor is not None and actor.role is Role.OPTIMIZER and isinstance(optimizer, (Thing, Instance, Opaque)):
        optimizer.actor = replace(actor, options=actor.options | {"prepared"})
    return optimizer


def setup_dataloaders(state: Machine, call: Call) -> Value | None:
    if find(state, receiver_of(call)) is None or not call.args:
        return None
    return call.args[0] if len(call.args) == 1 and not call.spread else Items(list(call.args), "tuple")


# What it does in the loop.
def backward(state: Machine, call: Call) -> Value | None:
    """`fabric.backward(loss)`: scales for half precision, divides by nothing."""
    made = find(state, receiver_of(call))
    loss = call.argument(0, "tensor", "loss")
    if made is None or loss is None:
        return None
    return scaled_backward(state, call, state.force(loss), made.scaler)


def scaled_backward(state: Machine, call: Call, loss: Value, scaler: Actor | None) -> Value:
    if scaler is not None and isinstance(loss, Opaque):
        loss = torch_training.replace_loss(state, loss, scaler)
        loss.scaler = scaler
    return torch_training.emit_backward(state, call, loss)


def step(state: Machine, call: Call) -> Value | None:
    """`optimizer.step()` of an optimizer that was set up, under half precision: through the scaler, which it then updates."""
    owner = state.force(receiver_of(call) or NONE)
    actor = actor_of(owner)
    if actor is None or actor.role is not Role.OPTIMIZER or "prepared" not in actor.options:
        return None
    scaler = last_scaler(state, actor)
    if scaler is None:
        return None
    for value in call.values:
        if isinstance(state.force(value), (Function, Partial)):
            return None  # a closure does the backward: torch's word for it
    state.recorder.emit(Kind.STEP, call.node, targets=(actor,), scaler=scaler)
    state.recorder.emit(Kind.SCALER_UPDATE, call.node, scaler=scaler)
    return NONE


def last_scaler(state: Machine, optimizer: Actor) -> Actor | None:
    """The scaler that the last backward's loss went through."""
    for event in reversed(state.recorder.events):
        if event.kind is Kind.BACKWARD:
            return event.scaler
    return None


def clip(state: Machine, call: Call) -> Value | None:
    """`fabric.clip_gradients(model, optimizer, max_norm=…)`: unscales first, where there is a scaler."""
    made = find(state, receiver_of(call))
    if made is None:
        return None
    return clipped(state, call, state.force(call.argument(1, "optimizer") or NONE), made.scaler)


def clipped(state: Machine, call: Call, optimizer: Value, scaler: Actor | None) -> Value:
    actor = as_actor(state, optimizer, Role.OPTIMIZER)
    targets = (actor,) if actor is not None and actor.role is Role.OPTIMIZER else ()
    if scaler is not None:
        state.recorder.emit(Kind.UNSCALE, call.node, targets=targets, scaler=scaler, options=frozenset({"clip"}))
    state.recorder.emit(Kind.CLIP, call.node, targets=targets)
    made = state.opaque(("norm", call.node.lineno, state.steps), state.recorder.text(call.node), causes=frozenset({"loss"}))
    made.name = "norm"
    return made


def no_backward_sync(state: Machine, call: Call) -> Value | None:
    """`with fabric.no_backward_sync(model, enabled=flag)`."""
    module = call.argument(0, "module")
    if module is None or (isinstance(receiver_of(call), Instance) and find(state, receiver_of(call)) is None):
        return None
    enabled = call.argument(1, "enabled")
    if enabled is not None and not state.truth(enabled):
        return Context("null")
    owner = state.force(module)
    actor = as_actor(state, owner, Role.MODEL)
    if actor is not None and not actor.known and isinstance(owner, Opaque) and actor.wrapper is Wrapper.NONE:
        owner.actor = replace(actor, wrapper=Wrapper.UNKNOWN)
    return Context("no_sync", (owner,), place=call.node)


def launch(state: Machine, call: Call) -> Value | None:
    """`fabric.launch(main, …)` calls main with itself in front."""
    owner = receiver_of(call)
    if find(state, owner) is None or owner is None:
        return None
    function = state.force(call.args[0]) if call.args else NONE
    if not isinstance(function, (Function, Partial)):
        return NONE
    return state.call_value(function, [owner, *call.args[1:]], None, dict(call.keywords))


def all_reduce(state: Machine, call: Call) -> Value | None:
    """`fabric.all_reduce(x, reduce_op="mean")`: gives a new value that all ranks share; the mean unless told to sum."""
    if find(state, receiver_of(call)) is None or not call.args:
        return None
    operation = state.force(call.keywords.get("reduce_op", Known("mean")))
    value = distributed.all_reduce(state, call)
    mean = isinstance(operation, Known) and operation.value in {"mean", "avg"}
    if mean and isinstance(value, Opaque) and value.weight is not None and value.quantity is not None:
        value.weight = value.weight.times(Factor(Quantity.WORLD, -1, None, "the mean over ranks", state.recorder.place(call.node)))
    return value


def same_value(state: Machine, call: Call) -> Value | None:
    """`fabric.broadcast(x)`, `fabric.to_device(x)`: the value itself."""
    if find(state, receiver_of(call)) is None or not call.args:
        return None
    value = state.force(call.args[0])
    if call.name == "broadcast":
        distributed.broadcast(state, call)
    return value


def quiet(state: Machine, call: Call) -> Value | None:
    """Calls that only talk, save weights or set a hook off."""
    return NONE if find(state, receiver_of(call)) is not None else None


def context(state: Machine, call: Call) -> Value | None:
    return Context("other") if find(state, receiver_of(call)) is not None else None


def redirected(state: Machine, call: Call) -> Value | None:
    """`model.training_step(batch)` on a module that was set up: Fabric sends it through the wrapper's forward."""
    owner = state.force(receiver_of(call) or NONE)
    if not isinstance(owner, Thing) or "prepared" not in owner.actor.options or owner.actor.role is not Role.MODEL:
        return None
    made = state.forward_of(call, owner, call.name)
    if isinstance(made, Opaque) and made.weight is None and made.attached:
        text, place = state.recorder.text(call.node), state.recorder.place(call.node)
        made.weight = Weight((Factor(Quantity.UNITS, -1, None, text, place, implicit=True, root="model"),))
        made.reduced = True
    return made


def own_rank(state: Machine, owner: Value) -> Value | None:
    if find(state, owner) is None:
        return None
    return state.opaque(("call", "get_rank"), f"{last_name(owner) or 'fabric'}.global_rank", causes=frozenset({"rank"}), name="rank")


FUNCTIONS: dict[str, Handler] = {"Fabric": make, "MixedPrecision": precision_plugin, "MixedPrecisionPlugin": precision_plugin}
METHODS: dict[str, Handler] = {
    "setup": setup,
    "setup_module": setup,
    "setup_optimizers": setup_optimizers,
    "setup_dataloaders": setup_dataloaders,
    "backward": backward,
    "step": step,
    "clip_gradients": clip,
    "no_backward_sync": no_backward_sync,
    "launch": launch,
    "all_reduce": all_reduce,
    "broadcast": same_value,
    "to_device": same_value,
    "training_step": redirected,
    **dict.fromkeys(("print", "log", "log_dict", "save", "load", "load_raw", "barrier", "seed_everything", "call"), quiet),
    **dict.fromkeys(("init_module", "init_tensor", "sharded_model", "autocast", "rank_zero_first"), context),
}
ATTRIBUTES: dict[str, Attribute] = {"global_rank": own_rank, "local_rank": own_rank, "is_global_zero": own_rank}
