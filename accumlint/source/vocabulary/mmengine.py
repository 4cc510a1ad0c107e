"""mmengine (0.1 to 0.11): optimizer wrappers that count, divide and gate, `train_step` overrides, and what a Runner calls around them.

`update_params` divides by `accumulative_counts`, goes backward, and steps and zeroes at every K-th call; `optim_context` switches the
synchronisation off around the forward only, which DDP reads there and FSDP does not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import (
    NONE,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Opaque,
    Thing,
    Value,
    actor_of,
    make_actor,
)
from accumlint.source.vocabulary.base import Entry, Handler, as_actor, receiver_of
from accumlint.source.vocabulary.engines import accumulation, literal_of
from accumlint.source.vocabulary.mmengine_runner import every, runner, train
from accumlint.source.vocabulary.mmengine_wrapper import SETTING, OptimWrapper, total_of
from accumlint.source.vocabulary.played import parameters_of, turn
from accumlint.source.vocabulary.torch_training import replace_loss
from accumlint.trace import Actor, Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"mmengine", "mmcv", "xtuner", "mmdet", "mmseg", "mmpretrain", "mmagic", "mmpose"})
SIGNS = frozenset({"OptimWrapper", "AmpOptimWrapper", "ApexOptimWrapper", "update_params"})
WRAPPERS = frozenset({"OptimWrapper", "AmpOptimWrapper", "ApexOptimWrapper"})
SCALING = frozenset({"AmpOptimWrapper", "ApexOptimWrapper"})
WRAPPER_NAME = re.compile(r"optim(izer)?_?wrapper", re.IGNORECASE)
FSDP_CLASS = re.compile(r"FullyShardedDataParallel|FSDP")
SIEVE = ((b".update_params(", b"optim_"), (b"accumulative_counts", b"Runner("))


def wrapper(state: Machine, call: Call) -> Value | None:
    """`OptimWrapper(optimizer, accumulative_counts=K)`."""
    inner = (
        state.force(call.argument(0, "optimizer") or NONE)
        if call.name == "OptimWrapper"
        else state.force(call.keywords.get("optimizer", NONE))
    )
    position = 1 if call.name == "OptimWrapper" else None
    given = call.argument(1, SETTING) if position else call.keywords.get(SETTING)
    k = accumulation(state, given, literal_of(call, SETTING, position), SETTING)
    return _made(state, as_actor(state, inner, Role.OPTIMIZER), k, call.name in SCALING, "clip_grad" in call.keywords)


def _made(state: Machine, optimizer: Actor | None, k: Known | None, scales: bool, clips: bool) -> Thing:
    made = Thing(make_actor(Role.ENGINE, "optim_wrapper"))
    scaler = Actor(state.uid(), "loss_scaler", Role.SCALER, known=True) if scales else None
    state.memory[("mmengine", made.actor.uid)] = OptimWrapper(optimizer or make_actor(Role.OPTIMIZER, "optim_wrapper"), k, scaler, clips)
    return made


def wrapper_of(state: Machine, value: Value | None) -> OptimWrapper | None:
    """The optimizer wrapper that a value is; one known by its name only has the K that the code around it speaks of."""
    value = state.force(value) if value is not None else NONE
    actor = actor_of(value)
    if actor is not None and ("mmengine", actor.uid) in state.memory:
        found: OptimWrapper = state.memory[("mmengine", actor.uid)]
        return found
    if not isinstance(value, Opaque) or not WRAPPER_NAME.search(value.text):
        return None
    value.actor = actor or make_actor(Role.ENGINE, value.text, known=False)
    made = OptimWrapper(make_actor(Role.OPTIMIZER, value.text, known=False), None, None, False)
    state.memory[("mmengine", value.actor.uid)] = made
    return made


def update_params(state: Machine, call: Call) -> Value | None:
    """`optim_wrapper.update_params(loss)`: divide, backward, and at the boundary step and zero."""
    own = wrapper_of(state, receiver_of(call))
    if own is None:
        return None
    loss = state.force(call.argument(0, "loss") or NONE)
    own.update(state, call, loss)
    return NONE


def backward(state: Machine, call: Call) -> Value | None:
    own = wrapper_of(state, receiver_of(call))
    if own is None:
        return None
    return own.backward(state, call, state.force(call.argument(0, "loss") or NONE))


def scale_loss(state: Machine, call: Call) -> Value | None:
    """`optim_wrapper.scale_loss(loss)`: the loss over K."""
    own = wrapper_of(state, receiver_of(call))
    loss = state.force(call.argument(0, "loss") or NONE)
    if own is None or not isinstance(loss, Opaque):
        return None
    made = replace_loss(state, loss, loss.scaler)
    made.weight = loss.weight.times(*own.division(state, call.node)) if loss.weight is not None else None
    return made


def step(state: Machine, call: Call) -> Value | None:
    own = wrapper_of(state, receiver_of(call))
    return own.step(state, call.node) if own is not None else None


def zero_grad(state: Machine, call: Call) -> Value | None:
    own = wrapper_of(state, receiver_of(call))
    return own.zero(state, call.node) if own is not None else None


def should_update(state: Machine, call: Call) -> Value | None:
    own = wrapper_of(state, receiver_of(call))
    return own.told(state, own.updates(state, own.count)) if own is not None else None


def should_sync(state: Machine, call: Call) -> Value | None:
    own = wrapper_of(state, receiver_of(call))
    return own.told(state, own.updates(state, own.count + 1)) if own is not None else None


def initialize(state: Machine, call: Call) -> Value | None:
    """`initialize_count_status(model, begun, total)`: the last window ends with the last of `total` micro-batches."""
    own = wrapper_of(state, receiver_of(call))
    if own is None:
        return None
    total = state.number(state.force(call.argument(2, "max_counts") or NONE))
    own.total = total.value if total is not None and isinstance(total.value, int) else None
    return NONE


def optim_context(state: Machine, call: Call) -> Value | None:
    """`with optim_wrapper.optim_context(model)`: no synchronisation off the boundary."""
    own = wrapper_of(state, receiver_of(call))
    if own is None:
        return None
    model = state.force(call.argument(0, "model") or NONE)
    _recognise_sharding(model)
    actor = actor_of(model)
    sharded = actor is not None and actor.wrapper.reads_flag_in_backward
    if sharded and own.k is None:
        own.assume_accumulation(state, call.node)
    wrapped = actor is not None and actor.wrapper is not Wrapper.NONE
    off = wrapped and not own.updates(state, own.count + 1)
    return Context("no_sync" if off else "other", (model,) if off else (), place=call.node)


def _recognise_sharding(model: Value) -> None:
    """A class of the source that derives from a sharding wrapper is one."""
    if not isinstance(model, Instance) or (model.actor is not None and model.actor.wrapper is not Wrapper.NONE):
        return
    bases = [terminal(base) for base in model.cls.node.bases]
    kind = Wrapper.FSDP1 if any(FSDP_CLASS.search(base) for base in bases) else Wrapper.NONE
    if kind is not Wrapper.NONE:
        model.actor = make_actor(Role.MODEL, "self", wrapper=kind)


def run_forward(state: Machine, call: Call) -> Value | None:
    """`self._run_forward(data, mode="loss")`: the model's own forward."""
    owner = state.force(receiver_of(call) or NONE)
    if not isinstance(owner, Instance) or owner.cls.find("_run_forward") is not None:
        return None
    as_actor(state, owner, Role.MODEL)
    return state.forward_of(call, owner)


def parse_losses(state: Machine, call: Call) -> Value | None:
    """`loss, log = self.parse_losses(losses)`: the sum of what is called a loss."""
    owner = state.force(receiver_of(call) or NONE)
    if (isinstance(owner, Instance) and owner.cls.find("parse_losses") is not None) or not call.args:
        return None
    return Items([total_of(state, state.force(call.args[0]), call.node), state.opaque(("log", call.node.lineno), "log_vars")], "tuple")


def entries(index: Index) -> Iterator[Entry]:
    """The `train_step` methods of models, which the Runner calls with its optimizer wrapper."""
    for cls in index.classes.values():
        for member in index.class_methods(cls):
            if member.name == "train_step" and _takes_wrapper(member) and Kind.BACKWARD in index.kinds(member):
                yield Entry(member, drive)


def _takes_wrapper(function: FunctionNode) -> bool:
    names = [argument.arg for argument in function.args.args]
    updates = any(isinstance(part, ast.Attribute) and part.attr in {"update_params", "optim_context"} for part in walk(function))
    return len(names) >= 3 and (WRAPPER_NAME.search(names[2]) is not None or updates)


def drive(state: Machine, function: Function) -> None:
    """Calls a `train_step` as the Runner does, with one optimizer wrapper over new data; no tail is judged."""
    node = function.node
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    names = parameters_of(function)
    own = state.opaque(("parameter", function.name, "optim_wrapper"), "optim_wrapper", name="optim_wrapper")
    for at in range(state.world.batches):
        with turn(state, OpenTurn(node.lineno, at, 0, endless=True, micro=True)):
            state.recorder.new_data()
            state.call_function(function, [state.datum(node, names[0]), own], {}, None)


KINDS = {
    "update_params": {Kind.BACKWARD, Kind.STEP, Kind.ZERO},
    "optim_context": {Kind.SYNC_OFF},
    "Runner": {Kind.BACKWARD, Kind.STEP, Kind.ZERO},
}
LOOPS = ("Runner",)
TRACKED = (*WRAPPERS, "OptimWrapperDict", "initialize_count_status", "scale_loss")
FUNCTIONS: dict[str, Handler] = {**dict.fromkeys(WRAPPERS, wrapper), "Runner": runner}
METHODS: dict[str, Handler] = {
    "update_params": update_params,
    "backward": backward,
    "scale_loss": scale_loss,
    "step": step,
    "zero_grad": zero_grad,
    "should_update": should_update,
    "should_sync": should_sync,
    "initialize_count_status": initialize,
    "optim_context": optim_context,
    "_run_forward": run_forward,
    "parse_losses": parse_losses,
    "train": train,
    "every_n_train_iters": every,
}
