"""What a project's own wrapper does, by the words of the configuration: `["backward", "unscale", "clip", "step", "update"]`.

The objects concerned are found among what the wrapper is given, what it belongs to, and what else is at hand: a word
about an optimizer means the one that is passed, else the one that the wrapper was made with, else the only one there is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import LOSS_WORDS, names_k
from accumlint.source.rehearsal.state import Call
from accumlint.source.rehearsal.values import NONE, Context, Instance, Items, Known, Mapping, Opaque, Thing, Value, make_actor
from accumlint.source.vocabulary.base import as_actor, role_of
from accumlint.source.vocabulary.engines import accumulation, division, literal_of
from accumlint.source.vocabulary.torch_training import emit_backward, replace_loss
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Weight

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine

KINDS = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "divide": Kind.NORMALIZE,
    "unscale": Kind.UNSCALE,
    "normalize": Kind.NORMALIZE,
    "clip": Kind.CLIP,
    "step": Kind.STEP,
    "update": Kind.SCALER_UPDATE,
    "zero": Kind.ZERO,
    "schedule": Kind.SCHEDULE,
    "save": Kind.SAVE,
    "average": Kind.AVERAGE,
    "no_sync": Kind.SYNC_OFF,
    "accumulate": Kind.SYNC_OFF,
}
CONTEXTS = ("no_sync", "accumulate")
WHETHER = re.compile(r"^(needs?|do|should|will|is|at)?_?(update|step|boundary|sync|last)(_?(grads?|gradients?|now|step|micro_?batch))?$")


def carry_out(state: Machine, call: Call, actions: tuple[str, ...], owner: Value | None, *, scales: bool) -> Value:
    """The events of the call of a wrapper, in the order of its words, and what it returns."""
    doing = _Doing(state, call, owner, scales=scales)
    for word in CONTEXTS:
        if word in actions:
            return doing.context(word)
    for action in doing.wanted(actions):
        doing.words[action]()
    return doing.result(actions)


class _Doing:
    """One call of a wrapper: the loss as it stands, and the objects at hand."""

    def __init__(self, state: Machine, call: Call, owner: Value | None, *, scales: bool) -> None:
        self.state = state
        self.call = call
        self.owner = state.force(owner) if owner is not None else None
        self.scales = scales
        self.loss = self._given_loss()
        self.went_backward = False
        self.words: dict[str, Callable[[], None]] = {
            "forward": self.forward,
            "divide": self.divide,
            "backward": self.backward,
            "unscale": lambda: self.emit(Kind.UNSCALE, scaler=self.scaler(), targets=self.optimizers()),
            "normalize": lambda: self.emit(Kind.NORMALIZE, weight=Weight(known=False), targets=self.optimizers()),
            "clip": lambda: self.emit(Kind.CLIP, targets=self.optimizers()),
            "step": lambda: self.emit(Kind.STEP, scaler=self.scaler() if self.scales else None, targets=self.stepped()),
            "update": lambda: self.emit(Kind.SCALER_UPDATE, scaler=self.scaler()),
            "zero": lambda: self.emit(Kind.ZERO, targets=self.optimizers()),
            "schedule": lambda: self.emit(Kind.SCHEDULE, targets=self.actors(Role.SCHEDULER)),
            "save": lambda: self.emit(Kind.SAVE, options=frozenset({"optimizer-state"} if self.given(Role.OPTIMIZER) else ())),
            "average": lambda: self.emit(Kind.AVERAGE, options=frozenset({"moving"})),
        }

    def emit(self, kind: Kind, **fields: object) -> None:
        self.state.recorder.emit(kind, self.call.node, **fields)

    def wanted(self, actions: tuple[str, ...]) -> tuple[str, ...]:
        """The words that hold for this call: `need_update=False` leaves out what comes after the backward."""
        if "backward" not in actions:
            return actions
        for name, value in self.call.keywords.items():
            if WHETHER.match(name) and not self.state.truth(value):
                return actions[: len(actions) - actions[::-1].index("backward")]
        return actions

    # The words.
    def forward(self) -> None:
        model = self.object(Role.MODEL)
        if model is None:
            return
        others = [value for value in self.call.args if self.state.force(value) is not model]
        keywords = {name: value for name, value in self.call.keywords.items() if self.state.force(value) is not model}
        made = self.state.forward_of(Call(self.call.node, self.call.name, "", model, None, others, keywords), model)
        if isinstance(made, Opaque):
            made.weight, made.reduced = made.weight or Weight(known=False), True
            self.loss = made

    def divide(self) -> None:
        factors = division(self.state, self.k(), self.call.node, "K")
        if self.went_backward or self.loss is None:
            self.emit(Kind.NORMALIZE, weight=Weight(factors), targets=self.optimizers())
            return
        made = replace_loss(self.state, self.loss, self.loss.scaler)
        made.weight = (made.weight or Weight(known=False)).times(*factors)
        self.loss = made

    def backward(self) -> None:
        loss = self.loss
        if loss is not None and self.scales:
            loss = replace_loss(self.state, loss, self.scaler())
        emit_backward(self.state, self.call, loss if loss is not None else NONE)
        self.went_backward = True

    def context(self, word: str) -> Context:
        """`with helper.no_sync(model):`, and `accumulate`, which leaves it out every K entries."""
        model = self.object(Role.MODEL)
        quiet = Context("other") if model is None else Context("no_sync", (model,), place=self.call.node)
        if word == "no_sync":
            return quiet
        entries = ("wrapper entries", self.call.node.lineno)
        self.state.memory[entries] = self.state.memory.get(entries, 0) + 1
        if self.state.memory[entries] % self.k().value == 0:
            return Context("other")
        quiet.entering = lambda state, node: _hold(state, 1)
        quiet.leaving = lambda state, node: _hold(state, -1)
        return quiet

    def result(self, actions: tuple[str, ...]) -> Value:
        if self.loss is not None and ("forward" in actions or ("divide" in actions and "backward" not in actions)):
            return self.loss
        state = self.state
        key = ("wrapper", self.call.node.lineno, state.steps)
        return state.opaque(key, state.recorder.text(self.call.node), causes=frozenset({"loss"}), name="norm")

    # The objects.
    def k(self) -> Known:
        """K as the call, or the making of the wrapper, names it; else the number of this world."""
        for call in self._calls():
            name = next((each for each in call.keywords if names_k(each)), "")
            if name:
                return accumulation(self.state, call.keywords[name], literal_of(call, name), name)
        if isinstance(self.owner, Instance):
            for name, value in self.owner.attributes.items():
                if names_k(name):
                    return accumulation(self.state, value, None, name)
        roots = list(self.state.world.knowledge.accumulations.values())
        return Known(self.state.world.k, frozenset(roots), roots[0] if len(roots) == 1 else None)

    def _calls(self) -> Iterator[Call]:
        """The call, and the one that made the object that is called."""
        yield self.call
        made = self.state.memory.get(self.owner.key) if isinstance(self.owner, Opaque) else None
        if isinstance(made, Call):
            yield made

    def scaler(self) -> Actor | None:
        given = self.given(Role.SCALER)
        value = given[0] if given else self.owner
        return as_actor(self.state, value if value is not None else self.call.function, Role.SCALER)

    def optimizers(self) -> tuple[Actor, ...]:
        return self.actors(Role.OPTIMIZER)

    def stepped(self) -> tuple[Actor, ...]:
        """The optimizers that step; where none is in sight, one that only the wrapper knows."""
        found = self.optimizers()
        if found:
            return found
        if "zero_grad" in self.state.index.identifiers:  # of an optimizer that may be this one
            self.state.engine(self.call)
        return (self.state.memory.setdefault(("wrapper optimizer",), make_actor(Role.OPTIMIZER, "optimizer", known=False)),)

    def actors(self, role: Role) -> tuple[Actor, ...]:
        found = self.given(role)
        if not found:
            one = self.object(role)
            found = [one] if one is not None else []
        return tuple(dict.fromkeys(actor for actor in (as_actor(self.state, value, role) for value in found) if actor is not None))

    def given(self, role: Role) -> list[Value]:
        """The objects of a role that the call is given."""
        return [value for value in _flat(self.state, self.call.values) if role_of(self.state, value) is role]

    def object(self, role: Role) -> Value | None:
        """The object of a role that the wrapper works on; None where several could be meant, or none is at hand."""
        for values in self._at_hand():
            found = [value for value in values if role_of(self.state, value) is role and value is not self.owner]
            if found:
                return found[0] if len({id(value) for value in found}) == 1 else None
        return None

    def _at_hand(self) -> Iterator[list[Value]]:
        for call in self._calls():
            yield list(_flat(self.state, call.values))
        yield _parts(self.state, self.owner)
        yield [self.owner] if isinstance(self.owner, (Thing, Instance)) else []
        names = self.state.frame.names
        yield [self.state.force(value) for value in names.values()]
        yield _parts(self.state, names.get("self"))
        yield [self.state.force(value) for value in self.state.globals.names.values()]
        yield list(self.state.optimizers)

    def _given_loss(self) -> Opaque | None:
        values = [*_flat(self.state, self.call.values), *([self.owner] if self.owner is not None else [])]
        opaque = [value for value in values if isinstance(value, Opaque)]
        losses = [value for value in opaque if value.forwards or value.weight is not None]
        named = [value for value in opaque if LOSS_WORDS.search(value.text) and role_of(self.state, value) is None]
        return next(iter([*losses, *named]), None)


def _flat(state: Machine, values: list[Value]) -> Iterator[Value]:
    for value in values:
        value = state.force(value)
        if isinstance(value, Items):
            yield from (state.force(item) for item in value.items)
        elif isinstance(value, Mapping):
            yield from (state.force(item) for item in value.items.values())
        else:
            yield value


def _parts(state: Machine, value: Value | None) -> list[Value]:
    value = state.force(value) if value is not None else None
    return [state.force(part) for part in value.attributes.values()] if isinstance(value, (Instance, Opaque)) else []


HELD = ("wrapper holds",)
GATED = frozenset({"step", "zero_grad", "unscale_", "update"})


def _hold(state: Machine, change: int) -> None:
    state.memory[HELD] = state.memory.get(HELD, 0) + change


def is_held(state: Machine, call: Call) -> bool:
    """Whether a call is without effect, inside an `accumulate` that is not at its boundary."""
    return bool(state.memory.get(HELD)) and isinstance(call.node, ast.Call) and (call.name in GATED or "clip" in call.name)
