"""Composer (0.13 to 0.33): its Trainer, which splits every batch into micro-batches, and the callbacks and algorithms around them.

`Trainer(device_train_microbatch_size=M)` zeroes, goes over the micro-batches of one batch and steps. It multiplies the loss of each by
its share of the batch: by samples, or from 0.24 on by tokens with `accumulate_train_batch_on_tokens`. Synchronisation is off for all but
the last, and the gradients are unscaled before `after_train_batch`. No window crosses a batch, so there is no tail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.record import OpenTurn
from accumlint.source.rehearsal.values import NONE, Function, Instance, Items, Known, Mapping, Root, Thing, Value, make_actor
from accumlint.source.vocabulary.base import Handler, as_actor, receiver_of, role_of
from accumlint.source.vocabulary.engines import ONE, accumulation, division, literal_of
from accumlint.source.vocabulary.played import turn
from accumlint.source.vocabulary.torch_training import emit_backward
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Factor, Quantity, Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"composer"})
SIZE = "device_train_microbatch_size"
NUMBER = "grad_accum"  # the number of micro-batches, which the first releases were given instead
BY_TOKENS = "accumulate_train_batch_on_tokens"
COUNTS_TOKENS = (0, 24)  # the release from which on the user has that choice
SIEVE = ((SIZE.encode(), b"composer"), (NUMBER.encode() + b"=", b"composer"))
KEY = "composer"
LIBRARY = "HuggingFaceModel"


@dataclass(eq=False)
class Trainer:
    """A Trainer, as far as its updates depend on it."""

    call: Call
    model: Value
    optimizers: list[Value]
    loader: Value
    k: Known
    by_tokens: bool | None  # None: it is not known
    others: list[Value]  # algorithms before callbacks, in the order in which they are called

    @property
    def targets(self) -> tuple[Actor, ...]:
        return tuple(actor for value in self.optimizers if (actor := getattr(value, "actor", None)) is not None)


def trainer(state: Machine, call: Call) -> Value | None:
    """`Trainer(model=…, optimizers=…, device_train_microbatch_size=…)`."""
    if call.path.partition(".")[0] not in PACKAGES or call.args[1:]:
        return None
    state.covered.add(id(call.node))
    given = call.keywords
    optimizers = _listed(state, given.get("optimizers"))
    for value in optimizers:
        if role_of(state, value) is not Role.OPTIMIZER:
            as_actor(state, value, Role.OPTIMIZER)
    tokens = state.force(given.get(BY_TOKENS, Known(False)))
    made = Thing(make_actor(Role.ENGINE, "trainer"))
    state.memory[(KEY, made.actor.uid)] = Trainer(
        call,
        state.force(call.argument(0, "model") or NONE),
        optimizers,
        state.force(given.get("train_dataloader", NONE)),
        _window(state, call),
        bool(tokens.value) if isinstance(tokens, Known) else None,
        _listed(state, given.get("algorithms")) + _listed(state, given.get("callbacks")),
    )
    return made


def _listed(state: Machine, value: Value | None) -> list[Value]:
    value = state.force(value) if value is not None else NONE
    if isinstance(value, Known):
        return []
    return [state.force(one) for one in value.items] if isinstance(value, Items) else [value]


def _window(state: Machine, call: Call) -> Known:
    """K: how many micro-batches a batch is split into."""
    if NUMBER in call.keywords:
        return accumulation(state, call.keywords[NUMBER], literal_of(call, NUMBER), NUMBER)
    size = state.force(call.keywords.get(SIZE, NONE))
    if (isinstance(size, Known) and size.value is None) or _is_whole(state, call):
        return ONE
    root = Root((KEY, SIZE), SIZE)
    state.world.knowledge.accumulations.setdefault(root.key, root)
    return Known(state.world.k, frozenset({root}), root)


def _is_whole(state: Machine, call: Call) -> bool:
    """Whether a micro-batch is as large as the batch of a loader: the same setting, or no smaller a number."""
    size = literal_of(call, SIZE)
    batches = [
        word.value
        for part in walk(state.index.tree)
        if isinstance(part, ast.Call)
        for word in part.keywords
        if word.arg == "batch_size" and part is not call.node
    ]
    if isinstance(size, ast.Constant) and isinstance(size.value, (int, float)):
        numbers = [one.value for one in batches if isinstance(one, ast.Constant) and isinstance(one.value, int)]
        return bool(numbers) and size.value >= max(numbers)
    return size is not None and any(ast.dump(one) == ast.dump(size) for one in batches)


def fit(state: Machine, call: Call) -> Value | None:
    """`trainer.fit()`."""
    owner = state.force(receiver_of(call) or NONE)
    known = state.memory.get((KEY, owner.actor.uid)) if isinstance(owner, Thing) else None
    if not isinstance(known, Trainer):
        return None
    state.covered.add(id(call.node))
    if known.k.value != 1:
        _Run(state, call, known).play()
    return NONE


class _Run:
    """Two batches of a Trainer's loop; what the Trainer does itself is placed where it is told to fit."""

    def __init__(self, state: Machine, call: Call, trainer: Trainer) -> None:
        self.state = state
        self.call = replace(call, args=[], keywords={})
        self.node = call.node
        self.trainer = trainer
        model = trainer.model
        actor = as_actor(state, model, Role.MODEL) if not isinstance(model, Known) else None
        self.model = model if actor is not None else Thing(make_actor(Role.MODEL, "model"))
        self.loss = model.cls.find("loss") if isinstance(model, Instance) else None
        self.told = state.opaque((KEY, "state", self.node.lineno), "state", name="state")
        self.told.attributes |= {"model": self.model, "optimizers": Items(list(trainer.optimizers)), "batch_size": NONE}
        self.applied = {id(one): _events_of(one) for one in trainer.others}

    def play(self) -> None:
        state, k = self.state, self._size()
        state.recorder.fact("engine-divides", self.node)
        plan = state.plan(self.trainer.loader, self.node)
        for at in range(2 * k):
            with turn(state, OpenTurn(self.node.lineno, at, 0, endless=True)):
                state.recorder.new_data()
                if at % k == 0:
                    self._fire("before_train_batch")
                    self._emit(Kind.ZERO)
                self._micro_batch(plan.item(at) if plan.data and at < plan.count else state.datum(self.node, "batch"))
                if at % k == k - 1:
                    self._fire("after_train_batch")
                    self._emit(Kind.STEP)
                    self._fire("batch_end")

    def _size(self) -> int:
        assert isinstance(self.trainer.k.value, int)
        return self.trainer.k.value

    def _emit(self, kind: Kind) -> None:
        for target in self.trainer.targets:
            self.state.recorder.emit(kind, self.node, targets=(target,), options=frozenset({"gated", "prepared"}))

    def _micro_batch(self, batch: Value) -> None:
        told = self.told.attributes
        told["batch"] = batch
        self._fire("before_forward")
        told["outputs"] = self.state.forward_of(replace(self.call, args=[batch]), self.model)
        for name in ("after_forward", "before_loss"):
            self._fire(name)
        told["loss"] = self._loss(told["outputs"], batch)
        for name in ("after_loss", "before_backward"):
            self._fire(name)
        emit_backward(self.state, self.call, _total(self.state, told["loss"], self.node), factors=self._shares(batch))
        self._fire("after_backward")

    def _loss(self, outputs: Value, batch: Value) -> Value:
        """What the model's `loss` gives; that of a model of the library is a mean that it forms itself."""
        state = self.state
        if isinstance(self.loss, Function):
            return state.force(state.call_function(bind(self.loss, self.model), [outputs, batch], {}, None))
        made = state.opaque((KEY, "loss", state.steps), "loss", outputs, reduced=True, attached=True)
        if isinstance(self.model, Thing) and self.model.actor.name == LIBRARY:
            place, text = state.recorder.place(self.node), state.recorder.text(self.node)
            made.weight = Weight((Factor(Quantity.UNITS, -1, None, text, place, implicit=True, root="model"),))
            state.recorder.emit(Kind.LOSS, self.node, weight=made.weight)
        return made

    def _shares(self, batch: Value) -> tuple[Factor, ...]:
        """What the Trainer multiplies a loss by: the micro-batch's share of the batch."""
        text = SIZE if self.trainer.by_tokens is False else BY_TOKENS
        if self.trainer.by_tokens is not False:
            return (Factor(Quantity.UNKNOWN, 1, None, text, implicit=True),)
        if isinstance(self.loss, Function) and self.state.allowed(KEY).may_be(*COUNTS_TOKENS):
            self.state.recorder.fact("may-count", self.node)
        own = [one for one in self.state.world.knowledge.accumulations.values() if one != self.trainer.k.root]
        k = replace(self.trainer.k, root=own[0]) if len(own) == 1 else self.trainer.k
        return division(self.state, k, self.node, text)

    def _fire(self, event: str) -> None:
        """Calls the algorithms and callbacks that wait for an event."""
        for one in self.trainer.others:
            if not isinstance(one, Instance):
                continue
            own = one.cls.find(event)
            if isinstance(own, Function):
                self.state.call_function(bind(own, one), [self.told, NONE], {}, None)
            elif event in self.applied[id(one)]:
                apply = one.cls.find("apply")
                if isinstance(apply, Function):
                    self.state.call_function(bind(apply, one), [Known(event), self.told, NONE], {}, None)


def _total(state: Machine, loss: Value, node: ast.AST) -> Value:
    """The loss that goes backward: the "total" of a dict, else the sum of what there is."""
    if isinstance(loss, Mapping):
        if "total" in loss.items:
            return state.force(loss.items["total"])
        loss = Items(list(loss.items.values()))
    if not isinstance(loss, Items):
        return loss
    terms = [state.force(one) for one in loss.items]
    return terms[0] if len(terms) == 1 else state.opaque((KEY, "total", state.steps), "loss", *terms, attached=True)


def _events_of(value: Value) -> frozenset[str]:
    """The events for which an algorithm is applied, where its `match` names them: `return event == Event.AFTER_BACKWARD`."""
    match = value.cls.find("match") if isinstance(value, Instance) else None
    if not isinstance(match, Function):
        return frozenset()
    returned = [part.value for part in walk(match.node) if isinstance(part, ast.Return)]
    test = returned[0] if len(returned) == 1 else None
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.In, ast.Is))):
        return frozenset()
    return frozenset(_named_events(test))


def _named_events(test: ast.Compare) -> Iterator[str]:
    for part in walk(test.comparators[0]):
        if isinstance(part, ast.Attribute) and terminal(part.value) == "Event":
            yield part.attr.lower()


def library_model(state: Machine, call: Call) -> Value | None:
    """`HuggingFaceModel(model, …)`: its loss is the one that the model forms."""
    return Thing(make_actor(Role.MODEL, LIBRARY)) if call.path.partition(".")[0] in PACKAGES else None


KINDS = {"fit": {Kind.BACKWARD, Kind.STEP, Kind.ZERO}}
LOOPS = ("fit",)
TRACKED = ("Trainer", LIBRARY)
FUNCTIONS: dict[str, Handler] = {"Trainer": trainer, LIBRARY: library_model}
METHODS: dict[str, Handler] = {"fit": fit}
