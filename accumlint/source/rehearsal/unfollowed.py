"""Calls that nobody could follow: what their names and arguments say of what they give."""

from __future__ import annotations

import ast
import re

from accumlint.source.reading.facts import FunctionNode
from accumlint.source.rehearsal.access import moves
from accumlint.source.rehearsal.hints import agrees, fetches, gives_batches, gives_settings, is_verb, makes, speaks_of_loss
from accumlint.source.rehearsal.holding import is_harmless_context, may_be_named
from accumlint.source.rehearsal.state import Call, State
from accumlint.source.rehearsal.unclear import may_agree, may_answer_for_all, may_be_another, may_divide, moves_on
from accumlint.source.rehearsal.values import Builtin, Class, Function, Instance, Opaque, Thing, Value, actor_of, born_of, forwards_of
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Factor, Quantity, Weight

LOSSES = re.compile(r"losses(?![a-z])", re.IGNORECASE)  # several, or one a sample


class Unfollowed(State):
    """Colours the results of unfollowed calls."""

    __slots__ = ()

    def goes_forward(self, model: Value, actor: Actor, node: ast.AST, data: frozenset[int]) -> int:
        raise NotImplementedError

    def begun(self, cls: Class, node: ast.Call, given: dict[str, Value] | None = None) -> Value:
        raise NotImplementedError

    def call_function(self, function: Function, args: list[Value], keywords: dict[str, Value], node: ast.Call | None) -> Value:
        raise NotImplementedError

    def global_of(self, path: str, name: str) -> Value | None:
        raise NotImplementedError

    def goes_round(self, model: Value) -> bool:
        """Whether a call of this model goes round its wrapper."""
        raise NotImplementedError

    def is_model(self, value: Value | None) -> bool:
        """Whether a value is a model, by construction, by use or by name; asking makes it none."""
        raise NotImplementedError

    def as_model(self, value: Value | None) -> Actor | None:
        """The model that a value is, by construction, by use or by name."""
        raise NotImplementedError

    def holds_gradients(self, value: Value) -> bool:
        """Whether gradients are reached through a value: a model, an optimizer or parameters."""
        actor = actor_of(value)
        return self.is_model(value) or (actor is not None and actor.role in {Role.OPTIMIZER, Role.PARAMETERS})

    def _holds_model(self, value: Value | None) -> bool:
        """Whether a value is a model, an object of the source that holds one, or what was made of one."""
        value = self.force(value) if value is not None else None
        if isinstance(value, Instance) and value.actor is None:
            return any(self.is_model(one) for one in value.attributes.values() if isinstance(one, (Thing, Instance)))
        if isinstance(value, Opaque) and value.actor is None and not may_be_named(value):
            return value.key in self.elsewhere.lent
        return value is not None and (self.is_model(value) or (isinstance(value, Opaque) and value.key in self.elsewhere.lent))

    def _met(self, call: Call) -> Value | None:
        """What the method gives that the program was joined with, where one of its name is called on an object that nobody knows."""
        joined = self.program.joined if self.program is not None else None
        if joined is None or call.name != joined.method:
            return None
        receiver = self.force(call.receiver) if call.receiver is not None else None
        cls = self.global_of(joined.path, joined.name)
        if not isinstance(receiver, Opaque) or receiver.actor is not None or receiver.path or not isinstance(cls, Class):
            return None
        method = self.attribute(self.begun(cls, call.node), call.name, call.node)
        if not isinstance(method, Function) or not _takes(method.node, call.node):
            return None
        return self.call_function(method, call.args, call.keywords, call.node)

    def _is_own_part(self, call: Call) -> bool:
        """Whether a model's forward calls a part that its constructor made in a way that nobody followed: `self.head(x)`."""
        owner, function, actor = call.receiver, call.function, actor_of(call.receiver)
        if self.forward is None or self.no_grad or not isinstance(owner, Instance) or actor is None or actor.role is not Role.MODEL:
            return False
        if not isinstance(function, Opaque) or owner.attributes.get(call.name) is not function:
            return False
        unset = function.key[0] == "."  # as in a class of which only what forms the loss is followed
        return not unset or (owner.cls.find("__init__") is None and not is_verb(call.name) and "mask" not in call.name)

    def _colour(self, made: Opaque, call: Call) -> None:
        """What an unfollowed call may be: a loss, by its name; new data, when it was given none."""
        if agrees(call.name):
            made.agreed = True
        if self.forward is not None and self._is_own_part(call):
            made.forwards, made.attached = made.forwards | {self.forward}, True
        self._lend(made, call)
        moves_on(self, call)
        may_agree(self, call)
        may_divide(self, call)
        may_answer_for_all(self, call, made)
        may_be_another(self, call, made)
        if (
            not is_harmless_context(call.name)
            and not isinstance(call.function, Builtin)
            and (self._holds_model(call.receiver) or any(map(self._holds_model, call.values)))
        ):
            self.elsewhere.lent.add(made.key)
        if (gives_batches(call.name) and not made.forwards) or gives_settings(call.path):
            made.born, made.causes = frozenset(), made.causes - {"data"}  # what gives batches is no batch, nor are settings
            return
        if (
            made.born
            and not made.forwards
            and self.recorder.turns
            and (self._fetches(call) or any(isinstance(arg, ast.Name) and moves(self.force(self.eval(arg))) for arg in call.node.args))
            and any(moves(self.force(value)) for value in call.values)
        ):
            made.born = self.take(call.node, made.key)
        if made.forwards or made.attached or (speaks_of_loss(call.name) and self._is_of_model(call)):
            made.attached = self.no_grad == 0
            if speaks_of_loss(call.name) and not LOSSES.search(call.name) and made.weight is None and self.no_grad == 0:
                made.weight = Weight((self._implicit_mean(call.node),), known=False)
                made.reduced = True
                self.recorder.emit(Kind.LOSS, call.node, weight=made.weight)
            return
        if self.recorder.turns and not made.born and not made.causes and self.forward is None and self._fetches(call):
            made.born = self.take(call.node)
            made.causes |= {"data"}

    def _is_of_model(self, call: Call) -> bool:
        """Whether a method of a model is called."""
        return call.receiver is not None and self.is_model(self.force(call.receiver))

    def _fetches(self, call: Call) -> bool:
        """Whether an unfollowed call may give new data, by its name."""
        return fetches(call.name) and not makes(call.name)

    def _implicit_mean(self, node: ast.AST) -> Factor:
        return Factor(Quantity.UNITS, -1, None, self.recorder.text(node), self.recorder.place(node), implicit=True, root="function")

    def _lend(self, made: Opaque, call: Call) -> None:
        """`training_losses(model, batch)`: a function that forms a loss of data with one model goes forward through it."""
        if made.forwards or self.forward is not None or self.no_grad or not speaks_of_loss(call.name) or self._is_of_model(call):
            return
        values = [self.force(value) for value in call.values]
        models = [value for value in values if self.is_model(value)]
        data = frozenset().union(*map(born_of, values)) if values else frozenset()
        if len(models) != 1 or not data or any(map(forwards_of, values)):
            return
        actor = self.as_model(models[0])
        if actor is None or self.goes_round(models[0]):
            return  # what is done with a bare module, nobody has seen
        made.forwards, made.attached = frozenset({self.goes_forward(models[0], actor, call.node, data)}), True


def _takes(method: FunctionNode | ast.Lambda, call: ast.Call) -> bool:
    """Whether a method takes what a call gives, no less and no more."""
    arguments = method.args
    places = [one.arg for one in (*arguments.posonlyargs, *arguments.args)][1:]
    names = {*places, *(one.arg for one in arguments.kwonlyargs)}
    needed = {*places[: max(len(places) - len(arguments.defaults), 0)]}
    needed |= {one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None}
    given = {*places[: len(call.args)], *(word.arg for word in call.keywords if word.arg is not None)}
    spread = any(isinstance(arg, ast.Starred) for arg in call.args) or any(word.arg is None for word in call.keywords)
    if (len(call.args) > len(places) and arguments.vararg is None) or (given - names and arguments.kwarg is None):
        return False
    return spread or needed <= given
