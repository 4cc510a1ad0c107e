"""Lightning's Trainer (1.4 to 2.6): `training_step` is called for every batch, by a loop that lies in the framework.

With automatic optimisation the Trainer divides the loss by `accumulate_grad_batches`, goes backward, steps on every K-th batch and the
epoch's last, and clears: the module has nothing to add but its loss. With `automatic_optimization = False` it does none of that: the
module's `manual_backward` divides by nothing, its `clip_gradients` does not unscale, and `step` goes through the precision's scaler.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.entries import is_test, mentioned
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.state import Call
from accumlint.source.rehearsal.values import (
    FALSE,
    NONE,
    TRUE,
    Class,
    Context,
    Function,
    Instance,
    Known,
    Mapping,
    Opaque,
    Partial,
    Root,
    Value,
    actor_of,
    make_actor,
)
from accumlint.source.vocabulary import torch_training
from accumlint.source.vocabulary.base import Attribute, Entry, Handler, as_actor, last_name, receiver_of, role_of
from accumlint.source.vocabulary.engines import ONE, accumulation, division
from accumlint.source.vocabulary.fabric import clipped, scaled_backward
from accumlint.source.vocabulary.lightning_module import K_NAME, Module, argument_of, begin, current, trainers
from accumlint.source.vocabulary.played import entered, name_helper, parameters_of, turn
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Factor, Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

PACKAGES = frozenset({"lightning", "pytorch_lightning"})
SIGNS = frozenset({"manual_backward", "automatic_optimization"})
TRACKED = frozenset({"optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "toggle_model", "automatic_optimization"})
SIEVE = ((b"def training_step", K_NAME.encode()), (b"def training_step", b"LightningModule"))

STEP = "training_step"
OWN_LOOP = frozenset({"optimizer_step", "backward", "optimizer_zero_grad"})  # overrides of what the Trainer does by itself
EPOCHS = 2
LARGEST_LITERAL = 16  # a modulus in place that epochs are made long enough for
GATED = frozenset({"gated"})


# Which training steps are played, and how.
def entries(index: Index) -> Iterator[Entry]:
    """The training steps of the LightningModules of the source that there is something to say about."""
    for cls in index.classes.values():
        method = next((member for member in index.class_methods(cls) if member.name == STEP), None)
        if method is None or is_test(cls):
            continue
        if _is_manual(index, cls, method):
            if Kind.BACKWARD in index.kinds(method):
                yield Entry(method, drive_manual)
        elif _is_automatic(index, cls, method):
            if K_NAME in mentioned(index, method) or argument_of(index, K_NAME) is not None:
                yield Entry(method, drive_automatic)
            elif not trainers(index):
                yield Entry(method, drive_unseen)


def _is_manual(index: Index, cls: ast.ClassDef, method: FunctionNode) -> bool:
    names = mentioned(index, method)
    return "manual_backward" in names or ("optimizers" in names and _says_manual(cls))


def _says_manual(cls: ast.ClassDef) -> bool:
    """`self.automatic_optimization = False`, or the property."""
    for node in walk(cls):
        if isinstance(node, ast.Assign) and any(terminal(target) == "automatic_optimization" for target in node.targets):
            return True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == "automatic_optimization":
            return True
    return False


def _is_automatic(index: Index, cls: ast.ClassDef, method: FunctionNode) -> bool:
    """A LightningModule that leaves the loop to a Trainer."""
    own = {member.name for member in index.class_methods(cls) if not _delegates(member)}
    derives = any(terminal(base) == "LightningModule" for base in cls.bases)
    return derives and not (own & OWN_LOOP or _says_manual(cls) or "optimizer_idx" in _arguments(method))


def _delegates(method: FunctionNode) -> bool:
    """Whether an override leaves the matter to the framework's own method."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr == method.name
        and isinstance(part.value, ast.Call)
        and terminal(part.value.func) == "super"
        for part in walk(method)
    )


def _arguments(method: FunctionNode) -> set[str]:
    return {one.arg for one in (*method.args.args, *method.args.kwonlyargs)}


# The loop of manual optimisation.
def drive_manual(state: Machine, function: Function) -> None:
    """Plays epochs of a module that goes backward and steps by itself."""
    if not isinstance(function.bound, Instance):
        return
    module = begin(state, function.bound)
    module.batches = max(state.world.batches, 2 * _literal_modulus(state, function) + 1)
    node = function.node
    epochs = argument_of(state.index, "max_epochs")
    count = 1 if isinstance(epochs, ast.Constant) and epochs.value == 1 else EPOCHS
    _hook(state, module, "on_train_start")
    for epoch in range(count):
        module.epoch = epoch
        with turn(state, OpenTurn(_line_of(function), epoch, 0, epoch == count - 1)):
            _hook(state, module, "on_train_epoch_start")
            entry = entered(state, node.lineno)
            for at in range(module.batches):
                module.last = at == module.batches - 1
                with turn(state, OpenTurn(node.lineno, at, entry, module.last, micro=True)):
                    _micro_batch(state, module, function, at)
            _hook(state, module, "on_train_epoch_end")
            _hook(state, module, "training_epoch_end")
    _hook(state, module, "on_train_end")


def _line_of(function: Function) -> int:
    return function.owner.node.lineno if function.owner is not None else function.node.lineno


def _literal_modulus(state: Machine, function: Function) -> int:
    """The largest number in place that a test of the training step takes a remainder of."""
    found = (
        part.right.value
        for part in walk(function.node)
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) and isinstance(part.right, ast.Constant)
    )
    return max((value for value in found if isinstance(value, int) and value <= LARGEST_LITERAL), default=0)


def _micro_batch(state: Machine, module: Module, function: Function, at: int) -> Value:
    state.recorder.new_data()
    given = _step_arguments(state, function, at)
    _hook(state, module, "on_train_batch_start", *given[:2])
    result = state.call_function(function, given, {}, None)
    _hook(state, module, "on_train_batch_end", result, *given[:2])
    return result


def _step_arguments(state: Machine, function: Function, at: int) -> list[Value]:
    """The batch and its index; whatever else a training step takes has a default or is not known."""
    names = parameters_of(function)
    given: list[Value] = []
    if names:
        given.append(state.parameter(function, names[0]) if "iter" in names[0] else state.datum(function.node, names[0]))
    if (len(names) > 1 and names[1] not in function.defaults) or (len(names) > 1 and "id" in names[1]):
        given.append(Known(at))
    return given


def _hook(state: Machine, module: Module, name: str, *args: Value) -> None:
    """Calls a hook of the module that can bring about events."""
    method = module.instance.cls.find(name)
    if not isinstance(method, Function) or not state.index.kinds(method.node):
        return
    bound = bind(method, module.instance)
    state.call_function(bound, list(args[: len(parameters_of(bound))]), {}, None)


# The loop of automatic optimisation.
def drive_automatic(state: Machine, function: Function) -> None:
    """Plays two windows of the Trainer's own loop: what stands in the source is only the loss."""
    if not isinstance(function.bound, Instance):
        return
    module = begin(state, function.bound)
    if state.force(state.attribute(function.bound, "automatic_optimization", function.node)) is FALSE:
        return
    module.k = _k_of_trainer(state)
    if module.k.value == 1:
        return
    targets = module.known_optimizers or (make_actor(Role.OPTIMIZER, "the Trainer's optimizer", known=False),)
    entry = entered(state, function.node.lineno)
    for at in range(2 * module.k.value):
        with turn(state, OpenTurn(function.node.lineno, at, entry, endless=True, micro=True)):
            _automatic_step(state, module, function, at, targets)


def drive_unseen(state: Machine, function: Function) -> None:
    """The same of a module whose Trainer lies elsewhere: that it accumulates is only assumed."""
    state.recorder.fact("assumes-k", function.node)
    drive_automatic(state, function)


def _k_of_trainer(state: Machine) -> Known:
    given = argument_of(state.index, K_NAME)
    if given is None and len(trainers(state.index)) == 1:
        return ONE
    if given is None:
        root = Root(("lightning K",), f"trainer.{K_NAME}")
        state.world.knowledge.learn_accumulation(root)
        return Known(state.world.k, frozenset({root}), root)
    return accumulation(state, state.eval(given), given, K_NAME)


def _automatic_step(state: Machine, module: Module, function: Function, at: int, targets: tuple[Actor, ...]) -> None:
    k = module.k.value
    begun = len(state.recorder.events)
    loss = _loss_in(state, _micro_batch(state, module, function, at))
    name_helper(state, function.node, begun)
    node = _place(state, function)
    if loss is None:
        return
    if at % k == 0:
        state.recorder.emit(Kind.ZERO, node, targets=targets, options=GATED)
    call = Call(node, STEP, "", NONE, None, [loss], {})
    torch_training.emit_backward(state, call, loss, factors=_division(state, module, loss, node))
    if (at + 1) % k == 0:
        state.recorder.emit(Kind.STEP, node, targets=targets, options=GATED)


def _division(state: Machine, module: Module, loss: Opaque, node: ast.AST) -> tuple[Factor, ...]:
    """The Trainer's division by K, spelled as the module spells K where it divides as well."""
    made = division(state, module.k, node, K_NAME)
    own = [factor for factor in (loss.weight.of(Quantity.ACCUMULATION) if loss.weight is not None else ()) if factor.root]
    same = [factor for factor in own if _last(factor.root) == K_NAME or (made and _last(factor.root) == _last(made[0].root))]
    return tuple(replace(factor, root=same[0].root) for factor in made) if same else made


def _last(text: str) -> str:
    return text.rsplit(".", 1)[-1].strip("[]'\"")


def _loss_in(state: Machine, result: Value) -> Opaque | None:
    result = state.force(result)
    if isinstance(result, Mapping):
        result = state.force(result.items.get("loss", NONE))
    return result if isinstance(result, Opaque) and (result.forwards or result.weight is not None) else None


def _place(state: Machine, function: Function) -> ast.Call:
    """Where the Trainer's own events are told: at the call that starts it, else where the loss leaves the training step."""
    calls = state.index.once("lightning fit", state.index.tree, lambda tree: tuple(part for part in walk(tree) if _is_fit(part)))
    if len(calls) == 1 and isinstance(calls[0], ast.Call):
        return calls[0]
    return state.index.once("lightning loss", function.node, _call_at_return)


def _is_fit(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "fit"


def _call_at_return(node: ast.AST) -> ast.Call:
    returned = [part.value for part in walk(node) if isinstance(part, ast.Return) and part.value is not None]
    return ast.copy_location(ast.Call(ast.Name(STEP, ast.Load()), [], []), returned[-1] if returned else node)


# What a module calls.
def manual_backward(state: Machine, call: Call) -> Value | None:
    module = current(state)
    loss = call.argument(0, "loss")
    if module is None or loss is None or state.force(receiver_of(call) or NONE) is not module.instance:
        return None
    return scaled_backward(state, call, state.force(loss), module.scaler)


def optimizers(state: Machine, call: Call) -> Value | None:
    module = current(state)
    if module is None or state.force(receiver_of(call) or NONE) is not module.instance:
        return None
    return module.optimizers if call.name == "optimizers" else module.schedulers


def step(state: Machine, call: Call) -> Value | None:
    """`optimizer.step()`: unscales, calls `on_before_optimizer_step`, steps and updates the scaler."""
    module = current(state)
    owner = state.force(receiver_of(call) or NONE)
    if module is None or module.k.value != 1 or role_of(state, owner) is not Role.OPTIMIZER:
        return None
    hook = module.instance.cls.find("on_before_optimizer_step")
    before = isinstance(hook, Function) and bool(state.index.kinds(hook.node))
    if module.scaler is None and not before:
        return None
    actor = as_actor(state, owner, Role.OPTIMIZER)
    assert actor is not None
    for value in call.values:
        if isinstance(state.force(value), (Function, Partial)):
            state.call_value(value, [])
    if module.scaler is not None:
        state.recorder.emit(Kind.UNSCALE, call.node, targets=(actor,), scaler=module.scaler)
    _hook(state, module, "on_before_optimizer_step", owner)
    state.recorder.emit(Kind.STEP, call.node, targets=(actor,), scaler=module.scaler)
    if module.scaler is not None:
        state.recorder.emit(Kind.SCALER_UPDATE, call.node, scaler=module.scaler)
    return NONE


def clip_gradients(state: Machine, call: Call) -> Value | None:
    """`self.clip_gradients(optimizer, …)`: of the gradients as they are; nothing unscales them here."""
    module = current(state)
    if module is None or state.force(receiver_of(call) or NONE) is not module.instance:
        return None
    return clipped(state, call, state.force(call.argument(0, "optimizer") or NONE), None)


def toggle(state: Machine, call: Call) -> Value | None:
    """`self.toggle_optimizer(optimizer)`: the parameters of the others take no gradient until it is untoggled."""
    module = current(state)
    if module is None or not call.args:
        return None
    _freeze_others(state, module, actor_of(state.force(call.args[0])), call.name == "toggle_optimizer")
    return NONE


def _freeze_others(state: Machine, module: Module, chosen: Actor | None, frozen: bool) -> None:
    if chosen is None or chosen.base is None:
        return
    others = {one.base for one in module.known_optimizers if one.base is not None} - {chosen.base}
    (state.frozen.update if frozen else state.frozen.difference_update)(others)


def toggle_model(state: Machine, call: Call) -> Value | None:
    """`with optimizer.toggle_model(sync_grad=flag)`."""
    module = current(state)
    owner = actor_of(state.force(receiver_of(call) or NONE))
    if module is None:
        return None
    return Context(
        "other",
        entering=lambda machine, _: _freeze_others(machine, module, owner, True),
        leaving=lambda machine, _: _freeze_others(machine, module, owner, False),
    )


# What a module asks of itself and its trainer.
def _of_trainer(state: Machine, owner: Value) -> Module | None:
    module = current(state)
    if module is None or not (owner is module.instance or last_name(owner) in {"trainer", "_trainer"}):
        return None
    return module


def is_last_batch(state: Machine, owner: Value) -> Value | None:
    module = _of_trainer(state, owner)
    return None if module is None or not module.batches else TRUE if module.last else FALSE


def global_step(state: Machine, owner: Value) -> Value | None:
    """The updates so far."""
    if _of_trainer(state, owner) is None:
        return None
    return Known(sum(event.kind is Kind.STEP for event in state.recorder.events))


def current_epoch(state: Machine, owner: Value) -> Value | None:
    module = _of_trainer(state, owner)
    return None if module is None else Known(module.epoch)


def number_of_batches(state: Machine, owner: Value) -> Value | None:
    module = _of_trainer(state, owner)
    if module is None or not module.batches:
        return None
    root = Root(("lightning batches",), "trainer.num_training_batches", "length")
    return Known(module.batches, frozenset({root}), root)


def k_of_trainer(state: Machine, owner: Value) -> Value | None:
    """`self.trainer.accumulate_grad_batches`: 1 for a module that steps by itself, or the Trainer would refuse it."""
    module = _of_trainer(state, owner)
    return None if module is None else module.k


def construct(state: Machine, cls: Class, call: Call) -> Value | None:
    """A LightningModule is a module whatever its base class is called."""
    if not isinstance(cls.find(STEP), Function):
        return None
    made = Instance(cls)
    made.actor = make_actor(Role.MODEL, cls.node.name)
    return made


METHODS: dict[str, Handler] = {
    "manual_backward": manual_backward,
    "optimizers": optimizers,
    "lr_schedulers": optimizers,
    "step": step,
    "clip_gradients": clip_gradients,
    "toggle_optimizer": toggle,
    "untoggle_optimizer": toggle,
    "toggle_model": toggle_model,
}
ATTRIBUTES: dict[str, Attribute] = {
    "is_last_batch": is_last_batch,
    "global_step": global_step,
    "current_epoch": current_epoch,
    "num_training_batches": number_of_batches,
    K_NAME: k_of_trainer,
}
