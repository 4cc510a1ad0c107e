"""The whole interpreter: what the parts leave to it, above all the events of models, contexts and gradients."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from accumlint.source.reading.facts import names_class, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.program import Program
from accumlint.source.reading.relevance import Relevance
from accumlint.source.reading.versions import Allowed, allowed
from accumlint.source.rehearsal.access import bind, is_of_forward
from accumlint.source.rehearsal.arithmetic import OF_EACH, SELECTED, factors_of
from accumlint.source.rehearsal.calls import Calls
from accumlint.source.rehearsal.contexts import Contexts
from accumlint.source.rehearsal.counts import BY_INDEX, WHOLE
from accumlint.source.rehearsal.evaluate import Expressions
from accumlint.source.rehearsal.execute import Statements
from accumlint.source.rehearsal.hints import TOLD_THE_MASK, is_part, is_told_the_mask, is_verb, names_count, speaks_of_loss
from accumlint.source.rehearsal.holding import HELD, may_be_named
from accumlint.source.rehearsal.iterate import Iteration
from accumlint.source.rehearsal.loops import Loops
from accumlint.source.rehearsal.modules import Modules
from accumlint.source.rehearsal.record import Recorder
from accumlint.source.rehearsal.state import Call, choices
from accumlint.source.rehearsal.unclear import ask_for_sync, how_made, is_accumulation
from accumlint.source.rehearsal.unfollowed import Unfollowed
from accumlint.source.rehearsal.values import (
    TRUE,
    Function,
    Instance,
    Items,
    Known,
    Mapping,
    Method,
    Opaque,
    Phi,
    Thing,
    Value,
    actor_of,
    born_of,
    forwards_of,
    fresh_uid,
    restart_uids,
)
from accumlint.source.rehearsal.worlds import World
from accumlint.source.vocabulary import distributed
from accumlint.source.vocabulary.base import Vocabulary, as_actor, modules_of, parameters_owner, raw_module, role_of
from accumlint.trace import Actor, Event, Kind, Role, Wrapper
from accumlint.weight import Factor, Quantity, Weight

TAKEN = frozenset({ast.Name, ast.Attribute, ast.Subscript})  # what has a name already
ABOUT_MASKS = frozenset(
    {SELECTED, BY_INDEX, WHOLE, "compared", "filtered"}
)  # causes of what a mask is or leaves, which a model's output is not


class Machine(Contexts, Iteration, Expressions, Calls, Loops, Statements, Modules, Unfollowed):
    """Rehearses one module in one world."""

    __slots__ = tuple(
        """
        vocabulary memory frameworks optimizers models hooks in_hook saving in_closure engines backpropagated freed parents
        wrappers frozen versions
        """.split()
    )

    def __init__(
        self, index: Index, relevance: Relevance, recorder: Recorder, world: World, vocabulary: Vocabulary, program: Program | None = None
    ) -> None:
        restart_uids()
        super().__init__(index, relevance, recorder, world)
        self.program = program
        self.vocabulary = vocabulary
        self.memory: dict[Any, Any] = {}  # what the frameworks remember of this rehearsal, each under keys of its own
        self.frameworks: set[str] = set()  # the names of those that took part
        self.optimizers: list[Thing] = []
        self.models: dict[int, Value] = {}
        self.hooks: list[Value] = []
        self.in_hook = False
        self.saving: ast.Call | None = None  # the call of a function of the source that saves, while it runs
        self.in_closure = False  # `optimizer.step(closure)` runs its closure now
        self.engines: list[str] = []
        self.backpropagated: set[int] = set()
        self.freed: set[int] = set()  # forwards whose graph a backward has freed: what they gave enters later ones detached
        self.parents: dict[int, set[int]] = {}  # which modules a module is part of, by uid
        self.wrappers: dict[int, Thing] = {}  # the wrapper around a module, by the module's uid
        self.frozen: set[int] = set()  # modules whose parameters take no gradient now
        self.versions: dict[str, Allowed] = {}  # of the packages that were asked for

    @staticmethod
    def uid() -> int:
        return fresh_uid()

    def allowed(self, package: str) -> Allowed:
        """The versions of a framework that the project of the module allows; what was asked for is shown with the trace."""
        if package not in self.versions:
            self.versions[package] = allowed(self.recorder.program.path, package)
        return self.versions[package]

    def call(self, call: Call) -> Value:
        function = call.function
        if isinstance(function, Opaque) and function.actor is not None and function.actor.role is Role.MODEL and not function.path:
            return self.forward_of(call, function)
        return super().call(call)

    def unknown_call(self, call: Call) -> Value:
        function = call.function
        if (
            (
                isinstance(function, Opaque)
                and not function.path
                and (call.args or call.keywords or call.spread)
                and role_of(self, function) is Role.MODEL
            )
            and not is_verb(call.name)
            and not names_class(call.node.func)
            and not self.index.is_own_name(call.name)
        ):
            return self.forward_of(call, function)
        part = self._part_called(call)
        if part is not None:
            return self.forward_of(call, part)
        met = self._met(call)
        if met is not None:
            return met
        made = super().unknown_call(call)
        if isinstance(made, Opaque):
            self._colour(made, call)
        return made

    def _part_called(self, call: Call) -> Value | None:
        """`model.module.encoder(x)`, `unwrapped.model(ids)`: a part of a wrapped module that nobody followed."""
        part = call.function
        whole = part.receiver if isinstance(part, Method) else part.owner if isinstance(part, Opaque) else None
        if not isinstance(part, (Method, Opaque)) or not isinstance(whole, Thing) or not (call.args or call.keywords or call.spread):
            return None
        if whole.actor.role is not Role.MODEL or whole.wrapped_by is None or not is_part(part.name) or is_verb(part.name):
            return None
        return part if isinstance(part, Opaque) else self.attribute(whole, part.name, call.node)

    # Models.
    def goes_round(self, model: Value) -> bool:
        return self._wrapper_of(model)[1]

    def is_model(self, value: Value | None) -> bool:
        return role_of(self, value) is Role.MODEL

    def actor_by_name(self, value: Value) -> Actor | None:
        return as_actor(self, value, role) if may_be_named(value) and (role := role_of(self, value)) in HELD else None

    def as_model(self, value: Value | None) -> Actor | None:
        return as_actor(self, value, Role.MODEL) if self.is_model(value) else None

    def forward_of(self, call: Call, model: Value, method: str = "forward") -> Value:
        """A model's forward, or another method that its framework sends through the wrapper's forward."""
        actor = as_actor(self, model, Role.MODEL)
        holder = self.memory.get(("held", model.key)) if isinstance(model, Opaque) else None
        if holder is not None:
            self.adopt(holder, model)
        data = frozenset().union(*(born_of(self.force(value)) for value in call.values)) if call.values else frozenset()
        forwards = (
            frozenset().union(*(forwards_of(self.force(value)) for value in call.values)) - self.freed if call.values else frozenset()
        )
        made = self.opaque(
            ("forward", call.node.lineno, self.steps),
            self.recorder.text(call.node),
            *(value for value in call.values if isinstance(value, Opaque)),
        )
        made.causes = (made.causes - ABOUT_MASKS) | {"loss"} | ({"unclear-mean"} if self._may_count(call) else set())
        made.causes |= {TOLD_THE_MASK} if is_told_the_mask(call.node) else set()
        if self.no_grad:
            made.forwards, made.attached = frozenset(), False
            made.causes |= {self.recorder.cached_by(actor)} if actor is not None else set()
            return made
        if self.forward is not None or actor is None:
            made.forwards |= forwards | ({self.forward} if self.forward is not None else set())
            made.attached = True
            return made
        index = self.goes_forward(model, actor, call.node, data, how_made(self, call.values))
        result = self._follow_forward(model, call, index, method)
        if result is None or (isinstance(result, Items) and result.open and not result.items):  # a list filled in a loop not run in full
            made.forwards = forwards | {index}
            made.attached = True
            result = made
        else:
            self._attach(result, index)
        return result

    def goes_forward(self, model: Value, actor: Actor, node: ast.AST, data: frozenset[int], options: frozenset[str] = frozenset()) -> int:
        """Writes down a forward, through the wrapper or round it; its number."""
        wrapper, bypass = self._wrapper_of(model)
        self.recorder.uses(data)
        event = self.recorder.emit(
            Kind.FORWARD,
            self.model_calls[0] if bypass and self.model_calls else node,
            model=actor_of(wrapper) if wrapper is not None else actor,
            sync=None if bypass else self.synced(wrapper or model),
            bypass=bypass,
            reaches=self._trained(model, actor),
            data=tuple(sorted(data)),
            options=options,
        )
        if not bypass:
            self.models[event.index] = wrapper or model
        return event.index

    def _may_count(self, call: Call) -> bool:
        """Whether a loss need not be the mean over this batch: a criterion around the model, or one told a count."""
        if speaks_of_loss(call.name):
            return True
        values = [self.force(value) for value in call.values]
        counts = {Quantity.UNITS, Quantity.WINDOW_UNITS, Quantity.GLOBAL_UNITS}
        if any(is_accumulation(self, value) for value in values):
            return True  # it may divide by K itself
        return any(map(names_count, call.keywords)) or any(isinstance(value, Opaque) and value.quantity in counts for value in values)

    def _wrapper_of(self, model: Value) -> tuple[Value | None, bool]:
        """The wrapper through which a model is called, or that it goes round: one that there is in this world."""
        wrapper, bypass = self._any_wrapper_of(model)
        if bypass and isinstance(wrapper, Thing) and not all(self.truth(test, holds) is holds for test, holds in wrapper.supposed):
            return model, False
        return wrapper, bypass

    def _any_wrapper_of(self, model: Value) -> tuple[Value | None, bool]:
        if isinstance(model, Thing) and model.actor.wrapper is not Wrapper.NONE:
            return model, False
        raw = raw_module(model)
        if isinstance(raw, (Thing, Instance)) and raw.wrapped_by is not None:
            return raw.wrapped_by, True
        if isinstance(raw, Opaque) and raw.actor is not None and raw.actor.uid in self.wrappers:
            return self.wrappers[raw.actor.uid], True
        found = self._wrapped_part(model, raw)
        if found is not None:
            return found, True
        owner = model.owner if isinstance(model, Opaque) else None
        while isinstance(owner, (Opaque, Thing, Instance)):
            if isinstance(owner, Thing) and owner.actor.wrapper is not Wrapper.NONE:
                return owner, "prepared" not in owner.actor.options  # a wrapper chosen at launch: DDP would refuse, others pass it on
            if isinstance(owner, (Thing, Instance)) and owner.wrapped_by is not None:
                return owner.wrapped_by, True
            if isinstance(owner, Opaque) and owner.actor is not None and owner.actor.uid in self.wrappers:
                return self.wrappers[owner.actor.uid], True
            owner = owner.owner if isinstance(owner, Opaque) else None
        return model, False

    def _wrapped_part(self, model: Value, raw: Value | None) -> Thing | None:
        """The wrapper of a module that this one is part of, or has as a part: neither is called through it."""
        actor = actor_of(raw)
        if actor is None or self.forward is not None or not self.wrappers:
            return None
        for uid in self.ancestors(actor.uid):
            if uid in self.wrappers:
                return self.wrappers[uid]
        for part in modules_of(model) - {actor.uid}:
            for uid in {part} | self.ancestors(part):
                if uid in self.wrappers and uid != actor.uid and part not in self.frozen:
                    return self.wrappers[uid]
        return None

    def ancestors(self, uid: int) -> set[int]:
        """The modules that a module is part of, directly or not."""
        found: set[int] = set()
        pending = [uid]
        while pending:
            for parent in self.parents.get(pending.pop(), ()):
                if parent not in found:
                    found.add(parent)
                    pending.append(parent)
        return found

    def _trained(self, model: Value, actor: Actor) -> frozenset[int]:
        """The modules that a backward through this forward gives gradients."""
        raw = actor_of(raw_module(model)) or actor
        parts = {part for part, wholes in self.parents.items() if raw.uid in wholes}
        if isinstance(raw_module(model), Opaque) and len({one.actor.base for one in self.optimizers} & parts) > 1:
            return frozenset()  # which of the parts a forward goes through, nobody has seen
        if raw.uid in self.frozen:
            return frozenset(parts - self.frozen)
        return frozenset((modules_of(model) | parts | {actor.uid, raw.uid} | self.ancestors(raw.uid)) - self.frozen)

    def adopt(self, parent: Value, child: Value) -> None:
        """Remembers that one module is part of another."""
        one, other = actor_of(parent), actor_of(raw_module(child))
        if one is not None and other is not None and one.role is other.role is Role.MODEL and one.uid != other.uid:
            self.parents.setdefault(other.uid, set()).add(one.uid)

    def freeze(self, model: Value, frozen: bool) -> None:
        as_actor(self, raw_module(model), Role.MODEL)
        for uid in modules_of(model):
            (self.frozen.add if frozen else self.frozen.discard)(uid)

    def _follow_forward(self, model: Value, call: Call, index: int, method: str) -> Value | None:
        raw = raw_module(model)
        forward = raw.attributes.get(method) if isinstance(raw, (Thing, Opaque)) else None  # `module.forward = something_else`
        if isinstance(raw, Instance):
            forward = raw.cls.find(method)
            forward = bind(forward, raw) if isinstance(forward, Function) and self.index.mentions_loss(forward.node) else None
        if not isinstance(forward, Function):
            return None
        outer, self.forward = self.forward, index
        try:
            return self.call_function(forward, call.args, call.keywords, call.node)
        finally:
            self.forward = outer

    def _attach(self, value: Value, index: int, depth: int = 0) -> None:
        value = self.force(value)
        if isinstance(value, Opaque):
            value.forwards |= {index}
            value.attached = True
        elif depth < 3:
            if isinstance(value, Items):
                value.heads = True
            parts = value.items if isinstance(value, Items) else list(value.items.values()) if isinstance(value, Mapping) else ()
            for part in parts:
                self._attach(part, index, depth + 1)

    def synced(self, model: Value) -> bool:
        """Whether the sync flag of a wrapper is on now."""
        raw = raw_module(model)
        for context in self.contexts:
            if context.kind == "no_sync" and any(self.force(one) is model or raw_module(self.force(one)) is raw for one in context.models):
                return False
        flag = (
            model.sync
            if isinstance(model, Thing)
            else model.attributes.get("require_backward_grad_sync", TRUE)
            if isinstance(model, (Opaque, Instance))
            else TRUE
        )
        ask_for_sync(self, flag)
        return self.truth(flag)

    def optimizers_of(self, model: Value | None) -> tuple[Actor, ...]:
        """The optimizers known to hold this model's parameters; none when that is not known."""
        modules = modules_of(model)
        if any(one.actor.base is None for one in self.optimizers):
            return ()
        return tuple(one.actor for one in self.optimizers if one.actor.base in modules)

    def owners_of_gradient(self, gradient: Value) -> tuple[Actor, ...]:
        """The optimizers that a `p.grad` belongs to."""
        current: Value | None = gradient
        while isinstance(current, Opaque) and current.owner is not None:
            current = current.owner
            owner = parameters_owner(current)
            if owner is not None:
                return self.optimizers_of(self.force(owner))
            actor = actor_of(current)
            if actor is not None and actor.role is Role.OPTIMIZER:
                return (actor,)
        return ()

    def engine(self, call: Call) -> None:
        """A framework's engine did the backward: what it divides and gates is not followed yet."""
        self.engines.append(self.recorder.text(call.node))

    def after_backward(self, event: Event, call: Call) -> None:
        self.backpropagated.update(event.forwards)
        if not event.retains_graph:
            self.freed.update(event.forwards)
        for hook in self.hooks:
            if isinstance(hook, Function):
                outer, self.in_hook = self.in_hook, True
                try:
                    self.call_value(hook, [self.opaque(("hook", call.node.lineno), "p")])
                finally:
                    self.in_hook = outer

    # Gradients and flags.
    def set_training_attribute(self, owner: Value, target: ast.Attribute, value: Value) -> bool:
        if target.attr == "require_backward_grad_sync":
            distributed.set_sync(self, owner, value, target, "flag")
            return True
        if target.attr == "requires_grad" and isinstance(owner, Opaque):
            flag = self.force(value)
            module = parameters_owner(owner.owner)
            if isinstance(flag, Known) and module is not None:
                self.freeze(self.force(module), not flag.value)
            return True
        if isinstance(owner, Instance):
            self.adopt(owner, self.force(value) if isinstance(value, (Thing, Instance)) else value)
            if isinstance(value, Opaque) and value.actor is None:
                self.memory["held", value.key] = owner  # it may turn out to be a model
        if target.attr == "grad" or (target.attr == "data" and isinstance(owner, Opaque) and owner.name == "grad"):
            value = self.force(value)
            gradient = owner if target.attr == "data" else self.attribute(owner, "grad", target)
            targets = self.owners_of_gradient(gradient)
            if isinstance(value, Known) and value.value is None:
                self.recorder.emit(Kind.ZERO, target, targets=targets)
            elif isinstance(gradient, Opaque) and isinstance(gradient.owner, Opaque) and gradient.owner.name in {"weight", "bias"}:
                pass  # one parameter's own gradient, such as rows of an embedding that are masked: no normalisation
            elif isinstance(value, Opaque) and value.weight is not None and value.weight.factors:
                self.recorder.emit(Kind.NORMALIZE, target, targets=targets, weight=Weight(value.weight.factors))
            return True
        return False

    def opaque_attribute(self, value: Opaque, name: str) -> Value:
        made = value.attributes.get(name)
        if made is None:
            made = super().opaque_attribute(value, name)
        if isinstance(made, Opaque) and made.weight is None:
            if made.name == "grad":
                made.weight = Weight()
            elif value.forwards and value.key[0] == "forward" and speaks_of_loss(name):
                made.weight = Weight(
                    (Factor(Quantity.UNITS, -1, None, made.text, None, implicit=True, root="model"),),
                    known="unclear-mean" not in value.causes and is_of_forward(value),
                )
                made.reduced = True
        return made

    def scale_gradient(self, target: ast.expr, op: type[ast.operator], value: Value, node: ast.AST) -> bool:
        if op not in {ast.Mult, ast.Div} or not isinstance(target, ast.Attribute):
            return False
        read = self.index.once("loaded", target, lambda _: ast.copy_location(ast.Attribute(target.value, target.attr, ast.Load()), target))
        gradient = self.force(self.eval(read))
        if not isinstance(gradient, Opaque) or gradient.name != "grad":
            return False
        assert isinstance(node, ast.AugAssign)
        weight = Weight(factors_of(self, value, 1 if op is ast.Mult else -1, node.value))
        self.recorder.emit(Kind.NORMALIZE, node, targets=self.owners_of_gradient(gradient), weight=weight)
        return True

    def retained_sum(self, node: ast.AST, current: Value, value: Value, result: Value) -> None:
        value, current = self.force(value), self.force(current)
        if not (
            isinstance(current, Opaque) and any(self.recorder.is_of_earlier_turn(self.recorder.events[one]) for one in current.forwards)
        ):
            return  # a sum of this turn alone, so far
        if (
            isinstance(value, Opaque)
            and value.attached
            and value.forwards
            and value.weight is not None
            and not value.forwards <= self.backpropagated
        ):
            self.recorder.emit(Kind.RETAIN, node, forwards=tuple(sorted(value.forwards)))

    def _named(self, target: ast.expr, node: ast.expr, value: Value) -> Value:
        if not isinstance(value, Opaque):
            if isinstance(value, Phi) and isinstance(target, (ast.Name, ast.Attribute)):
                self._name_sides(value, self.recorder.text(target), node)
            value = super()._named(target, node, value)
            if isinstance(value, (Thing, Instance)):
                self._name_actor(target, node, value)
            return value
        if not isinstance(target, (ast.Name, ast.Attribute)):
            return value
        name = target.id if isinstance(target, ast.Name) else target.attr
        if value.actor is None and node.__class__ not in TAKEN:
            value.text = self.recorder.text(target)
        if self.world.knowledge.is_accumulation_name(name):
            self.christen(name, value)
        if not value.text:
            value.text = name
        if value.weight is None and (value.forwards or value.attached):
            self._name_loss(value, self.recorder.text(target), node)
        return value

    def _name_sides(self, value: Phi, name: str, node: ast.AST) -> None:
        """`outputs["loss"] if isinstance(outputs, dict) else outputs[0]`."""
        for one in choices(value):
            if isinstance(one, Opaque):
                self._name_loss(one, name, node)

    def _name_actor(self, target: ast.expr, node: ast.expr, value: Thing | Instance) -> None:
        """An object that goes by the name of its class, or a wrapper by that of what it holds, takes that of the variable."""
        made = terminal(node.func) if isinstance(node, ast.Call) else None
        if isinstance(value, Instance):
            made = value.cls.node.name
        wraps = isinstance(node, ast.Call) and value.actor is not None and value.actor.wrapper is not Wrapper.NONE
        if value.actor is not None and (wraps or value.actor.name == made):
            value.actor = replace(value.actor, name=self.recorder.text(target))

    def _name_loss(self, value: Opaque, name: str, node: ast.AST) -> None:
        """`_, loss = model(x, y)`: what a model returns under this name is its mean loss."""
        if value.weight is not None or not (value.forwards or value.attached) or not speaks_of_loss(name.rsplit(".", 1)[-1]):
            return
        if OF_EACH in value.causes:
            value.weight = Weight()
            return
        direct = value.key[0] in {"part", "[]", "forward"} or (value.key[0] == "." and speaks_of_loss(str(value.key[-1])))
        if direct and isinstance(value.owner, Opaque) and value.owner.weight is not None and value.owner.reduced:
            value.weight, value.reduced = value.owner.weight, True  # part of what a loss function gives
        elif direct:
            uneven = TOLD_THE_MASK in value.causes
            mean = Factor(Quantity.UNITS, -1, None, name, self.recorder.place(node), implicit=True, root="model", uneven=uneven)
            value.weight = Weight((mean,), known="unclear-mean" not in value.causes)
            value.reduced = True

    def _part(self, value: Value, at: int, target: ast.expr) -> Value:
        made = super()._part(value, at, target)
        if isinstance(made, Opaque) and isinstance(target, (ast.Name, ast.Attribute)):
            self._name_loss(made, self.recorder.text(target), target)
        return made
