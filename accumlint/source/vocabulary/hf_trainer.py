"""Transformers: overrides of its Trainer and of those that derive from it, as in TRL, and losses that are given to one.

The Trainer owns the loop: it collects K batches, counts their labels, and calls `training_step` for each. What it does with the
loss depends on the release and on the model:

    below 4.46   its Accelerator divides every loss by K; nobody counts
    from 4.46    the count goes to `compute_loss`; a model whose forward takes keywords gets it and divides the sum by it
    from 4.49    a loss is divided by K where the model takes no keywords and no `compute_loss_func` is given
    from 4.57    also where the batches have no labels; the divisor is the window's real size, the count is that of all ranks, and
                 `Trainer.compute_loss` multiplies by their number
    from 5       `loss_is_scaled_for_ga` says so by hand

A Trainer without overrides does all of this right and is never looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.arithmetic import TOLD_THE_COUNT
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
    Items,
    Known,
    Mapping,
    Opaque,
    Root,
    Thing,
    Value,
    make_actor,
)
from accumlint.source.vocabulary import hf_trainer_facts as facts
from accumlint.source.vocabulary.base import Entry, Handler, receiver_of
from accumlint.source.vocabulary.engines import division
from accumlint.source.vocabulary.hf_trainer_models import own_means
from accumlint.source.vocabulary.hf_trainer_window import (
    KEY,
    Training,
    by_count,
    collect,
    counts_nothing,
    gathered,
    own_batches,
    own_count,
    training_of,
)
from accumlint.source.vocabulary.played import name_helper
from accumlint.source.vocabulary.torch_training import emit_backward
from accumlint.trace import Actor, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

PACKAGES = facts.OWNERS
SIGNS = frozenset({facts.COUNT, "compute_loss"})
SIEVE = (
    (b"def compute_loss", b"Trainer"),
    (b"def training_step", b"num_items_in_batch"),
    (b"compute_loss_func", b"Trainer"),
    (b"gradient_accumulation_steps=", b"def forward("),
    (b"def get_batch_samples", b"num_batches"),
)

K_TEXT = "gradient_accumulation_steps"
TRUSTED = "trusted"  # the framework takes the loss as normalised over the window, and divides it by nothing
INSIDE = "inside"  # an event of the Trainer's own loop, which is placed at the override that it calls
COUNTS = (Quantity.GLOBAL_UNITS, Quantity.WINDOW_UNITS)


def entries(index: Index) -> Iterator[Entry]:
    """The overrides of Trainers, and the losses that are given to one."""
    if not facts.accumulates(index):
        return
    for cls in facts.trainer_classes(index):
        yield Entry(cls.first, partial(_drive_class, cls=cls))
    for function in facts.loss_functions(index):
        yield Entry(function, partial(_drive_loss, node=function))
    for function, loss in own_means(index):
        yield Entry(function, partial(_drive_model, node=function, loss=loss))


def _drive_class(machine: Machine, function: Function, *, cls: facts.TrainerClass) -> None:
    newest = machine.allowed(KEY).newest
    counted = newest >= (4, 46)
    if counted and not all(facts.takes_count(each) for each in cls.overrides.values()):
        return  # written for older releases: newer ones raise
    own = machine.globals.find(cls.node.name)
    trainer = function.bound
    if isinstance(own, Class) and not (isinstance(trainer, Instance) and trainer.cls is own):
        trainer = machine.begun(
            own,
            ast.copy_location(ast.Call(ast.Name(cls.node.name, ast.Load()), [], []), cls.node),
            machine.choices_open(own.find("__init__")),
        )
    if not isinstance(trainer, Instance):
        return
    machine.world.settle()
    training = _begin(machine, cls.first, _takes_as_normalised(machine, cls))
    if cls.collects is not None and training.normalised and (uncounted := counts_nothing(cls.collects)) is not None:
        training.function = uncounted
        if newest >= (4, 57) and not facts.is_given_a_loss(cls):
            training.normalised = False
            machine.recorder.fact("may-count", uncounted)
    _equip(machine, trainer, training, cls)

    def step(batch: Value) -> None:
        given = [training.model, batch] + ([training.count] if counted else [])
        override = trainer.cls.find("training_step")
        if isinstance(override, Function):
            machine.call_function(bind(override, trainer), given, {}, None)
        else:
            _training_step(machine, training, trainer, batch)

    _windows(machine, training, step, trainer, counted=counted)


def _drive_loss(machine: Machine, function: Function, *, node: FunctionNode) -> None:
    """`compute_loss_func`: called with what the model returned, the labels and the count; nothing divides afterwards."""
    if not machine.allowed(KEY).newest >= (4, 46):
        return
    training = _begin(machine, node, True)
    keyword = {facts.COUNT: training.count}

    def step(batch: Value) -> None:
        call = Call(_node(machine, node, "model(**inputs)"), "model", "", training.model, None, [batch], {})
        outputs = machine.forward_of(call, training.model)
        labels = machine.item(batch, Known("labels"), node)
        keyword[facts.COUNT] = training.count
        begun = len(machine.recorder.events)
        loss = machine.force(machine.call_function(function, [outputs, labels], keyword, None))
        _name_return(machine, node, begun, loss)
        _go_backward(machine, training, _times_ranks(machine, training, loss))

    _windows(machine, training, step, counted=True)


def _drive_model(machine: Machine, function: Function, *, node: FunctionNode, loss: ast.Call) -> None:
    """A model that forms a mean though it is handed the count: the Trainer takes that as normalised."""
    if not machine.allowed(KEY).newest >= (4, 46):
        return
    training = _begin(machine, node, True)

    def step(batch: Value) -> None:
        outputs = machine.forward_of(
            Call(_node(machine, node, "model(**inputs)"), "model", "", training.model, None, [batch], {}), training.model
        )
        text, place = machine.recorder.text(loss), machine.recorder.place(loss)
        made = machine.opaque((KEY, "own", machine.steps), text, outputs, reduced=True, attached=True)
        made.weight = Weight((Factor(Quantity.UNITS, -1, None, text, place, implicit=True, root=terminal(loss.func)),))
        machine.recorder.emit(Kind.LOSS, loss, weight=made.weight)
        _go_backward(machine, training, made)

    _windows(machine, training, step, counted=True)


def _takes_as_normalised(machine: Machine, cls: facts.TrainerClass) -> bool | None:
    index, newest = machine.index, machine.allowed(KEY).newest
    if newest < (4, 46):
        return False
    if newest >= (5,) and (scaled := facts.flag(index, cls, "loss_is_scaled_for_ga")) is not None:
        return scaled
    if facts.is_given_a_loss(cls):
        return True
    accepts = facts.flag(index, cls, "model_accepts_loss_kwargs")
    if accepts is None and any(facts.is_flagged(index, cls, name) for name in facts.FLAGS):
        return None
    if accepts is False:
        return False if newest >= (4, 49) else None
    if accepts is None:
        accepts = facts.accepts_count(index, cls, newest)
    if accepts is False:
        return False if newest >= (4, 49) else None
    return True if accepts and facts.is_counted(index, cls) else None


def _begin(machine: Machine, function: FunctionNode, normalised: bool | None) -> Training:
    allowed = machine.allowed(KEY)
    raw = Thing(make_actor(Role.MODEL, "model"))
    options = frozenset({"prepared", "optional"})
    model = Thing(Actor(machine.uid(), "model", Role.MODEL, Wrapper.DDP, raw.actor.uid, True, options), inner=raw)
    raw.wrapped_by = model
    machine.wrappers[raw.actor.uid] = model
    for each in (raw, model):
        each.attributes["training"] = TRUE
    root = Root((KEY, "k"), f"self.args.{K_TEXT}")
    knowledge = machine.world.knowledge
    knowledge.accumulations[root.key] = knowledge.proven[root.key] = root
    said = facts.averages_tokens(machine.index.tree)
    return Training(
        function,
        model,
        Thing(make_actor(Role.ENGINE, "accelerator")),
        Known(machine.world.k, frozenset({root}), root),
        normalised,
        allowed.newest < (4, 46),
        said if said is not None else allowed.newest >= (4, 57),
        "transformers >= 4.46",
        Thing(Actor(machine.uid(), "optimizer", Role.OPTIMIZER, base=raw.actor.uid, known=True)),
    )


def _equip(machine: Machine, trainer: Instance, training: Training, cls: facts.TrainerClass) -> None:
    """Gives a trainer what Trainer.__init__ would."""
    machine.memory[KEY] = training
    for name in facts.filled_later(cls):
        value = trainer.attributes.get(name)
        if isinstance(value, Known) and value.value is None:
            trainer.attributes[name] = machine.opaque((KEY, "kept", name), f"self.{name}", born=frozenset({0}), causes=frozenset({"data"}))
    trainer.attributes["model"] = training.model.inner or training.model
    trainer.attributes["model_wrapped"] = training.model
    trainer.attributes["optimizer"] = training.optimizer
    trainer.attributes["accelerator"] = training.engine
    trainer.attributes["current_gradient_accumulation_steps"] = training.k
    for name in facts.FLAGS:
        trainer.attributes.pop(name, None)
    trainer.attributes["model_accepts_loss_kwargs"] = TRUE if _divides_by_count(machine, cls) else FALSE
    trainer.attributes.setdefault("compute_loss_func", NONE)
    arguments = machine.force(machine.attribute(trainer, "args", training.function))
    if isinstance(arguments, Opaque):
        arguments.attributes[K_TEXT] = training.k
        arguments.attributes["average_tokens_across_devices"] = TRUE if training.averages_tokens else FALSE
    elif isinstance(arguments, Mapping):
        arguments.items[K_TEXT] = training.k


def _divides_by_count(machine: Machine, cls: facts.TrainerClass) -> bool:
    """Whether the loss is taken over the count; where the model is not seen, whether what computes the loss makes use of it."""
    accepts = facts.flag(machine.index, cls, "model_accepts_loss_kwargs")
    if accepts is None:
        accepts = facts.accepts_count(machine.index, cls, machine.allowed(KEY).newest)
    if accepts is not None:
        return accepts
    own = cls.overrides.get("compute_loss")
    return own is None or facts.uses_count(own)


def _windows(machine: Machine, training: Training, step: object, trainer: Instance | None = None, *, counted: bool) -> None:
    """Two whole windows of the Trainer's loop."""
    assert callable(step)
    machine.optimizers.append(training.optimizer)
    size = machine.world.k
    for at in range(2 * size):
        if at % size == 0 and counted:
            collect(machine, training, trainer)
        machine.recorder.turns.append(OpenTurn(training.function.lineno, at, 0, endless=True, micro=True))
        last = at % size == size - 1
        training.model.sync = TRUE if last else FALSE
        try:
            step(training.batches[at % size] if training.batches[at % size :] else machine.datum(training.function, "inputs"))
            if last:
                _update(machine, training, training.optimizer.actor)
        finally:
            machine.recorder.turns.pop()


def _update(machine: Machine, training: Training, optimizer: Actor) -> None:
    for kind, text in (
        (Kind.CLIP, "clip_grad_norm_()"),
        (Kind.STEP, "optimizer.step()"),
        (Kind.SCHEDULE, "lr_scheduler.step()"),
        (Kind.ZERO, "model.zero_grad()"),
    ):
        targets = () if kind is Kind.SCHEDULE else (optimizer,)
        machine.recorder.emit(
            kind, _node(machine, training.function, text), targets=targets, options=frozenset({"gated", "prepared", INSIDE})
        )


def _node(machine: Machine, function: FunctionNode | ast.Return, text: str) -> ast.Call:
    """A call that stands in the Trainer, placed at the override that it runs."""

    def make(node: ast.AST) -> ast.Call:
        made = ast.parse(text, mode="eval").body
        for part in ast.walk(made):
            if isinstance(part, ast.expr):
                part.lineno, part.col_offset, part.end_lineno, part.end_col_offset = function.lineno, function.col_offset, None, None
        assert isinstance(made, ast.Call)
        return made

    return machine.index.once(f"{KEY} {text}", function, make)


# What the Trainer's own methods do.
def _training_step(machine: Machine, training: Training, trainer: Instance, batch: Value) -> None:
    override = trainer.cls.find("compute_loss")
    if isinstance(override, Function):
        named = {} if isinstance(training.count, Known) else {facts.COUNT: training.count}
        begun = len(machine.recorder.events)
        loss = machine.force(machine.call_function(bind(override, trainer), [training.model, batch], named, None))
        name_helper(machine, override.node, begun)
        _name_return(machine, override.node, begun, loss)
    else:
        loss = _own_loss(machine, training, _node(machine, training.function, "self.compute_loss(model, inputs)"), [batch], training.count)
    _go_backward(machine, training, loss)


def _name_return(machine: Machine, function: ast.AST, begun: int, loss: Value) -> None:
    """Where no loss function was called, the loss is formed in a helper, or in what the function returns."""
    if isinstance(loss, Items) and loss.items:
        loss = machine.force(loss.items[0])
    if not isinstance(loss, Opaque) or any(event.kind is Kind.LOSS for event in machine.recorder.events[begun:]):
        return
    returned = machine.loss_calls.get(id(function)) or machine.index.once("returned", function, _last_returned)
    if returned is not None:
        machine.recorder.emit(Kind.LOSS, returned, weight=loss.weight)


def _last_returned(function: ast.AST) -> ast.expr | None:
    given = [part for part in walk(function) if isinstance(part, ast.Return) and part.value is not None]
    return max(given, key=lambda part: part.lineno).value if given else None


def _go_backward(machine: Machine, training: Training, loss: Value) -> None:
    """The end of Trainer.training_step: the division, if any, and the backward."""
    if isinstance(loss, Items) and loss.items:
        loss = machine.force(loss.items[0])
    node = _node(machine, training.function, "self.accelerator.backward(loss)")
    call = Call(node, "backward", "", NONE, None, [loss], {})
    weight = loss.weight if isinstance(loss, Opaque) else None
    normalised = training.normalised
    options = {INSIDE, TRUSTED} if normalised else {INSIDE}
    if normalised is None:
        normalised = weight is not None and (bool(weight.of(*COUNTS)) or weight.power(Quantity.ACCUMULATION) < 0)
    factors = () if normalised else division(machine, training.k, node, K_TEXT)
    emit_backward(machine, call, loss, *options, factors=factors, note=training.since if normalised else "")


def _own_loss(machine: Machine, training: Training, node: ast.Call, given: list[Value], count: Value | None) -> Opaque:
    """Trainer.compute_loss: the model's own loss, over the count where the model is given one, times the ranks."""
    outputs = machine.forward_of(Call(node, "model", "", training.model, None, given, {}), training.model)
    place, text = machine.recorder.place(node), machine.recorder.text(node)
    made = machine.opaque((KEY, "loss", node.lineno, machine.steps), text, outputs, reduced=True, attached=machine.no_grad == 0)
    handed = count is not None and not isinstance(count, Known) and training.normalised is not False
    if handed and isinstance(count, Opaque) and TOLD_THE_COUNT not in count.causes:
        made.weight = by_count(machine, training, count, node)
        made = _times_ranks(machine, training, made)
    elif handed:
        quantity = Quantity.GLOBAL_UNITS if training.averages_tokens else Quantity.WINDOW_UNITS
        made.weight = Weight((Factor(quantity, -1, None, facts.COUNT, place, implicit=True, root=facts.COUNT),))
        made = _times_ranks(machine, training, made)
    else:
        made.weight = Weight((Factor(Quantity.UNITS, -1, None, text, place, implicit=True, root="model"),))
    machine.recorder.emit(Kind.LOSS, node, weight=made.weight)
    return made


def _times_ranks(machine: Machine, training: Training, loss: Value) -> Opaque:
    """Trainer.compute_loss multiplies by the number of ranks where it counts over all of them."""
    if not isinstance(loss, Opaque):
        return machine.opaque((KEY, "loss", machine.steps), "loss")
    if training.averages_tokens and loss.weight is not None:
        loss.weight = loss.weight.times(Factor(Quantity.WORLD, 1, None, "num_processes", None, implicit=True))
    return loss


def compute_loss(state: Machine, call: Call) -> Value | None:
    """`super().compute_loss(…)`, and `self.compute_loss(…)` of a trainer that does not override it."""
    training = training_of(state, call)
    if training is None:
        return None
    given = [
        state.force(value) for value in (*call.args[:2], *(call.keywords[name] for name in ("model", "inputs") if name in call.keywords))
    ]
    count = call.argument(3, facts.COUNT)
    if count is None and isinstance(given[-1] if given else None, Opaque):
        held = given[-1]
        assert isinstance(held, Opaque)
        count = held.attributes.get(f"[{facts.COUNT!r}]")
    loss = _own_loss(state, training, call.node, given[1:], state.force(count) if count is not None else None)
    if (count is None and call.spread) or _computes_it_otherwise(state):
        assert loss.weight is not None
        loss.weight = Weight(loss.weight.factors, known=False)
    outputs = call.argument(2, "return_outputs")
    if outputs is not None and state.truth(outputs):
        return Items([loss, state.opaque((KEY, "outputs", state.steps), "outputs", loss)], "tuple")
    return loss


def _trainer(state: Machine) -> Instance | None:
    """The trainer whose method is running."""
    bound = state.frame.function.bound if state.frame.function is not None else None
    return bound if isinstance(bound, Instance) else None


def _computes_it_otherwise(state: Machine) -> bool:
    """Whether the trainer has been given a `compute_loss_func`, which then makes the loss."""
    trainer = _trainer(state)
    given = trainer.attributes.get("compute_loss_func", NONE) if trainer is not None else NONE
    return not (isinstance(given, Known) and given.value is None)


def training_step(state: Machine, call: Call) -> Value | None:
    """`super().training_step(model, inputs, num_items_in_batch)`."""
    training, trainer = training_of(state, call), _trainer(state)
    if training is None or trainer is None or len(call.args) < 2:
        return None
    kept = training.count
    given = call.argument(2, facts.COUNT)
    training.count = state.force(given) if given is not None else NONE
    try:
        _training_step(state, training, trainer, state.force(call.args[1]))
    finally:
        training.count = kept
    return state.opaque((KEY, "logged", state.steps), "loss")


def backward(state: Machine, call: Call) -> Value | None:
    """`self.accelerator.backward(loss)` of an override of training_step: an Accelerator whose K is 1 from 4.46 on."""
    training = state.memory.get(KEY)
    if not isinstance(training, Training) or state.force(receiver_of(call) or NONE) is not training.engine or not call.args:
        return None
    factors = division(state, training.k, call.node, K_TEXT) if training.divides_in_backward else ()
    return emit_backward(state, call, state.force(call.args[0]), factors=factors)


def label_smoother(state: Machine, call: Call) -> Value | None:
    """`self.label_smoother(outputs, labels)`: a mean, or a sum over the count that it is given."""
    training = training_of(state, call)
    if training is None or not call.args:
        return None
    count = call.argument(3, facts.COUNT)
    outputs = state.force(call.args[0])
    text, place = state.recorder.text(call.node), state.recorder.place(call.node)
    made = state.opaque((KEY, "smoothed", call.node.lineno, state.steps), text, outputs, reduced=True, attached=state.no_grad == 0)
    quantity = Quantity.UNITS if count is None else Quantity.GLOBAL_UNITS if training.averages_tokens else Quantity.WINDOW_UNITS
    made.weight = Weight((Factor(quantity, -1, None, text, place, implicit=count is None, root="model"),))
    state.recorder.emit(Kind.LOSS, call.node, weight=made.weight)
    return made


def unwrap(state: Machine, call: Call) -> Value | None:
    """`accelerator.unwrap_model(model)`."""
    if KEY not in state.memory or not call.args:
        return None
    model = state.force(call.args[0])
    return model.inner if isinstance(model, Thing) and model.inner is not None and model.actor.role is Role.MODEL else model


def same_inputs(state: Machine, call: Call) -> Value | None:
    return state.force(call.args[0]) if call.args and training_of(state, call) is not None else None


def plain_context(state: Machine, call: Call) -> Value | None:
    return Context("other") if training_of(state, call) is not None else None


METHODS: dict[str, Handler] = {
    "compute_loss": compute_loss,
    "training_step": training_step,
    "backward": backward,
    "label_smoother": label_smoother,
    "unwrap_model": unwrap,
    "_prepare_inputs": same_inputs,
    "compute_loss_context_manager": plain_context,
    "get_batch_samples": own_batches,
    "_get_num_items_in_batch": own_count,
    "gather": gathered,
}
