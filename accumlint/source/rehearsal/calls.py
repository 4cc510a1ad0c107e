"""Calls: functions and classes of the source are followed, training objects are asked their vocabulary, the rest is named."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accumlint.source.reading.nodes import walk
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.access import bind
from accumlint.source.rehearsal.builtin import BUILTIN_CALLS, call_method_of_plain
from accumlint.source.rehearsal.entries import is_test
from accumlint.source.rehearsal.given import told_by_name
from accumlint.source.rehearsal.holding import how_said, keep, opens_quietly, parts_of, reached_through, within
from accumlint.source.rehearsal.packages import is_of_harmless_package
from accumlint.source.rehearsal.skips import hang
from accumlint.source.rehearsal.state import DEEPEST_CALL, Call, Frame, State
from accumlint.source.rehearsal.unclear import enters, may_switch, runs_decorated
from accumlint.source.rehearsal.values import (
    NONE,
    Builtin,
    Class,
    Context,
    Function,
    Instance,
    Items,
    Known,
    Mapping,
    Method,
    Opaque,
    Partial,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    key_of,
)
from accumlint.trace import Kind, Role

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.vocabulary.base import Vocabulary

SMALL_FUNCTION = 40  # statements: a function this small is followed even if no training word stands in it
SMALL_CONSTRUCTOR = 400  # statements: what a constructor sets is asked for later
MOST_RECURSION = 2
scales = found_in(
    re.compile(r"grad|scale|mul|div|norm|average|reduce|sync", re.IGNORECASE)
)  # of methods that an optimizer of its own kind may change the gradients by
is_harmless = found_in(
    re.compile(
        r"^_?((get|has|is|num|count|log|save)_|(unwrap|print|eval|valid|watch|summar|describe)|(log|save|copy|deepcopy)$)"
        r"|^(?!.*(back|step|updat|optim|scal|train_)).*loss(es)?$",
        re.IGNORECASE,
    )
)  # names of calls that train nothing

TARGET_NAME = re.compile(r"(^|_)(labels?|targets?)$")
CLIPS_AT = re.compile(r"(^|_)(max_)?(grad(ient)?_(norm|clip)|clip_?(grad|norm))", re.IGNORECASE)
TRAINED = re.compile(r"model|net|network|module")


class Calls(State):
    """Carries out calls."""

    __slots__ = ()

    vocabulary: Vocabulary
    memory: dict[Any, Any]

    @property
    def _machine(self) -> Machine:
        """The whole interpreter, of which this is a part: what vocabularies are written for."""
        return self  # type: ignore[return-value]

    def call(self, call: Call) -> Value:
        self.tick()
        function = call.function
        if isinstance(function, Opaque):  # the most frequent one
            known = self.vocabulary.call(self._machine, call)
            return known if known is not None else self.unknown_call(call)
        if isinstance(function, Method) and not isinstance(function.receiver, (Items, Mapping, Known)):
            known = self.vocabulary.call(self._machine, call)
            if known is not None:
                return known
        if isinstance(function, Function):
            if "decorator" in function.decorators and len(call.args) == 1 and isinstance(self.force(call.args[0]), Function):
                return self.force(call.args[0])  # `@wrapt.decorator`: gives what it is given, wrapped
            special = self.vocabulary.function(self._machine, call, function)
            return special if special is not None else self.call_function(function, call.args, call.keywords, call.node)
        if isinstance(function, Class):
            return self.instantiate(function, call)
        if isinstance(function, Builtin):
            return BUILTIN_CALLS[function.name](self, call) if function.name in BUILTIN_CALLS else self.unknown_call(call)
        if isinstance(function, Partial):
            merged = Call(
                call.node,
                call.name,
                call.path,
                function.function,
                None,
                [*function.arguments, *call.args],
                {**function.keywords, **call.keywords},
                call.spread,
            )
            if isinstance(function.function, Opaque):
                merged.path = function.function.path
                merged.name = function.function.name or call.name
            return self.call(merged)
        if isinstance(function, Method):
            return self._call_method(function, call)
        if isinstance(function, Instance):
            return self._call_instance(function, call)
        if isinstance(function, Thing):
            return self.forward_of(call, function) if function.actor.role is Role.MODEL else self.unknown_call(call)
        return self.unknown_call(call)

    def framework_attribute(self, owner: Value, name: str) -> Value | None:
        return self.vocabulary.attribute(self._machine, owner, name) if name in self.vocabulary.attributes else None

    def decorated(self, decorators: Sequence[ast.expr], function: Function) -> Value:
        made: Value = function
        for name, decorator in zip(reversed(function.decorators), reversed(decorators), strict=True):
            made = self.vocabulary.decorate(self._machine, name, decorator, function) or made
        return made

    def call_value(
        self, function: Value, args: list[Value], node: ast.Call | None = None, keywords: dict[str, Value] | None = None
    ) -> Value:
        """Calls a value from inside the interpreter."""
        function = self.force(function)
        made = node if node is not None else self.index.once("call", getattr(function, "node", self.index.tree), _call_of)
        receiver = function.receiver if isinstance(function, Method) else None
        name = function.name if isinstance(function, (Method, Function, Opaque, Builtin)) else ""
        path = function.path if isinstance(function, Opaque) else ""
        return self.call(Call(made, name, path, function, receiver, args, keywords or {}))

    def _call_method(self, method: Method, call: Call) -> Value:
        if isinstance(method.receiver, (Items, Mapping, Known)):
            known = call_method_of_plain(self, method, call)
            return known if known is not None else self.unknown_call(call)
        if isinstance(method.receiver, Context):
            return self._call_context_method(method.receiver, method.name, call)
        if isinstance(method.receiver, Stream) and method.name in {"__next__", "next"}:
            return self.next_of(method.receiver, call.node)
        if isinstance(method.receiver, Stream) and method.name == "__iter__":
            return method.receiver
        return self.unknown_call(call)

    def length_root(self, value: Value, text: str = "") -> Root:
        raise NotImplementedError

    def _call_context_method(self, context: Context, name: str, call: Call) -> Value:
        if name == "enter_context" and call.args:
            inner = self.force(call.args[0])
            enters(self, inner)
            if isinstance(inner, Context):
                context.entered.append(inner)
                self.enter(inner, call.node)
                return inner.value or NONE
        elif name == "__enter__":
            self.enter(context, call.node)
        elif name in {"__exit__", "close"}:
            self.leave(context, call.node)
        return NONE

    def _call_instance(self, instance: Instance, call: Call) -> Value:
        if instance.actor is not None and instance.actor.role is Role.MODEL:
            return self.forward_of(call, instance)
        method = instance.cls.find("__call__") or instance.cls.find("forward")
        if isinstance(method, Function):
            bound = bind(method, instance)
            return self.call(Call(call.node, method.name, "", bound, None, call.args, call.keywords, call.spread))
        known = self.vocabulary.at_first(self._machine, call)
        return known if known is not None else self.unknown_call(call)

    # Functions of the source.
    def call_function(self, function: Function, args: list[Value], keywords: dict[str, Value], node: ast.Call | None) -> Value:
        body = function.node
        if isinstance(body, ast.Lambda):
            return self._call_lambda(function, body, args, keywords)
        if not self._worth_following(function):
            return self._not_followed(function, args, keywords, node)
        frame = Frame(parent=function.closure, function=function, depth=self.frame.depth + 1)
        self._bind_arguments(frame, function, args, keywords, node)
        if self.index.is_generator(body):
            return self._generator(function, frame, body)
        if body.decorator_list:
            runs_decorated(self, body)
        bound = function.bound
        if node is not None and isinstance(bound, Instance) and bound.wrapped_by is not None and self.forward is None:
            self.model_calls.append(node)
            try:
                return self.run_frame(frame, body)
            finally:
                self.model_calls.pop()
        begun = len(self.recorder.events)
        within = node if self._is_helper(function, node) else None
        if within is not None:
            self.recorder.calls.append(within)
        try:
            result = self.run_frame(frame, body)
        finally:
            if within is not None:
                self.recorder.calls.pop()
        if (
            node is not None
            and hasattr(node, "lineno")
            and self.running
            and (_is_new_loss(result, frame) or any(event.kind is Kind.LOSS for event in self.recorder.events[begun:]))
        ):
            self.loss_calls[id(self.running[-1])] = node
        return result

    def _is_helper(self, function: Function, node: ast.Call | None) -> bool:
        """Whether a function is a helper of its caller, with its events: no method of the same object, no callback that is handed it."""
        own = self.frame.function.bound if self.frame.function is not None else None
        return node is not None and not (own is not None and (function.bound is own or any(_is_self(arg) for arg in node.args)))

    def run_frame(self, frame: Frame, body: ast.FunctionDef | ast.AsyncFunctionDef) -> Value:
        outer = self.frame
        self.frame = frame
        self.running.append(body)
        self.entered.add(id(body))
        quiet = self._is_no_grad(frame.function)
        self.no_grad += quiet
        try:
            signal = self.block(body.body)
        finally:
            self.no_grad -= quiet
            self.running.pop()
            self.frame = outer
        if signal is not None and signal.kind == "raise":
            if self.world.passes_raises and not self.index.kinds(body):
                return self._unknown(body)
            raise SourceRaised
        if frame.hanging and signal is not None and signal.value is not None:
            hang(self.force(signal.value), frame.hanging)
        return signal.value if signal is not None and signal.value is not None else NONE

    @staticmethod
    def _is_no_grad(function: Function | None) -> int:
        return int(function is not None and bool({"no_grad", "inference_mode"} & set(function.decorators)))

    def _call_lambda(self, function: Function, node: ast.Lambda, args: list[Value], keywords: dict[str, Value]) -> Value:
        if self.frame.depth > DEEPEST_CALL:
            return self.opaque(("deep", id(node)), "lambda")
        frame = Frame(parent=function.closure, function=function, depth=self.frame.depth + 1)
        self._bind_arguments(frame, function, args, keywords, None)
        outer = self.frame
        self.frame = frame
        try:
            return self.eval(node.body)
        finally:
            self.frame = outer

    def _worth_following(self, function: Function) -> bool:
        node = function.node
        if self.frame.depth >= DEEPEST_CALL or self.running.count(node) >= MOST_RECURSION:
            self.limits.append(f"{function.name}: recursion or call depth")
            return False
        return self.index.once("worth following", node, self._is_worth_following)

    def _is_worth_following(self, node: ast.AST) -> bool:
        if self.index.kinds(node):
            return not (is_test(node) and Kind.BACKWARD in self.index.kinds(node))
        if self.index.keeps_books(node):
            return True
        most = SMALL_CONSTRUCTOR if getattr(node, "name", "") == "__init__" else SMALL_FUNCTION
        return self.index.size(node) <= most or self.index.mentions_loss(node) or self.index.is_generator(node)

    def _not_followed(self, function: Function, args: list[Value], keywords: dict[str, Value], node: ast.Call | None) -> Value:
        made = self.opaque(("call", id(function.node), *self.key(*args)), f"{function.name}()", *args, *keywords.values())
        made.agreed = made.agreed or any(word in function.name for word in ("reduce", "gather", "broadcast"))
        if self.recorder.turns and node is not None and not made.forwards:
            made.born = made.born or self.take(node)
        return made

    def _bind_arguments(
        self, frame: Frame, function: Function, args: list[Value], keywords: dict[str, Value], node: ast.Call | None
    ) -> None:
        arguments = function.node.args
        names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
        given = ([function.bound] if function.bound is not None and names else []) + args
        offset = len(given) - len(args)
        for at, (name, value) in enumerate(zip(names, given, strict=False)):
            literal = node.args[at - offset] if node is not None and 0 <= at - offset < len(node.args) else None
            frame.names[name] = self._argument(name, literal, value)
        if arguments.vararg is not None:
            frame.names[arguments.vararg.arg] = Items(list(given[len(names) :]), "tuple")
        by_name = {keyword.arg: keyword.value for keyword in node.keywords} if node is not None else {}
        extra: dict[Any, Value] = {}
        allowed = set(names) | {argument.arg for argument in arguments.kwonlyargs}
        for name, value in keywords.items():
            if name in allowed:
                frame.names[name] = self._argument(name, by_name.get(name), value)
            else:
                extra[name] = self._argument(name, by_name.get(name), value)
        if arguments.kwarg is not None:
            frame.names[arguments.kwarg.arg] = Mapping(extra, ("kwargs", id(function.node)), arguments.kwarg.arg if not extra else "")
        for name in allowed:
            if name not in frame.names:
                default = function.defaults.get(name)
                if node is not None and TARGET_NAME.search(name) and _is_nothing(default):
                    default = self._spread_item(node, name) or default
                left_open = node is None and isinstance(default, Known) and default.value is None
                if default is None or (left_open and self.world.knowledge.is_accumulation_name(name)):
                    default = self.parameter(function, name)
                elif node is not None and isinstance(default, Known) and default.roots and name in told_by_name(self.index, function.name):
                    default = Known(default.value)  # whoever means another number says so, as other calls do
                frame.names[name] = default

    def _spread_item(self, node: ast.Call, name: str) -> Value | None:
        """A part of the batch that a call is given by its names: `model(**batch)` may well hold labels."""
        for keyword in node.keywords:
            if keyword.arg is None and isinstance(keyword.value, (ast.Name, ast.Attribute, ast.Subscript, ast.DictComp)):
                value = self.force(self.eval(keyword.value))
                copied = isinstance(value, Mapping) and bool(value.text) and any(key.__class__ is tuple for key in value.items)
                if copied or (isinstance(value, Opaque) and (value.born or "data" in value.causes) and not value.forwards):
                    return self.item(value, Known(name), node)
        return None

    def _argument(self, name: str, node: ast.AST | None, value: Value) -> Value:
        self.christen(name, value)
        return self.named_constant(name, node, value)

    def parameter(self, function: Function, name: str) -> Value:
        """A parameter that nobody gives: known by name and use only, or a model of the class that its annotation names."""
        given = self.memory.setdefault(("parameter", id(function.node)), {})  # whoever calls it again gives the same objects
        if name not in given:
            lineno = getattr(function.node, "lineno", 0)
            given[name] = self._annotated_model(function, name) or self.opaque(("parameter", function.name, lineno, name), name, name=name)
        known: Value = given[name]
        return known

    def _annotated_model(self, function: Function, name: str) -> Value | None:
        arguments = function.node.args
        given = next((one for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if one.arg == name), None)
        if given is None or not isinstance(given.annotation, ast.Name) or not isinstance(function.closure, Frame):
            return None
        cls = function.closure.find(given.annotation.id)
        if not isinstance(cls, Class) or not isinstance(cls.find("forward"), Function):
            return None
        made = self.begun(cls, _call_of(given))
        actor = actor_of(made)
        if not isinstance(made, Instance) or actor is None or actor.role is not Role.MODEL:
            return None
        made.actor = replace(actor, options=actor.options | {"given"})  # by a caller who may have wrapped it
        return made

    def _generator(self, function: Function, frame: Frame, body: ast.FunctionDef | ast.AsyncFunctionDef) -> Value:
        def run(receive: Callable[[Value], None]) -> None:
            fresh = Frame(dict(frame.names), frame.parent, function, frame.depth, yields=receive)
            self.run_frame(fresh, body)

        endless = self.index.once("endless", body, _never_ends)
        return Stream("generator", call=run, text=f"{function.name}()", endless=endless)

    # Classes of the source.
    def instantiate(self, cls: Class, call: Call) -> Value:
        known = self.vocabulary.construct(self._machine, cls, call)
        if isinstance(known, Thing):
            return known
        instance = known if isinstance(known, Instance) else Instance(cls)
        self._initialise(instance, call)
        return instance

    def begun(self, cls: Class, node: ast.Call, given: dict[str, Value] | None = None) -> Value:
        """An object of a class as far as its __init__ gets: with little given, that may raise where a run that trains does not."""
        call = Call(node, cls.node.name, "", cls, None, [], given or {})
        known = self.vocabulary.construct(self._machine, cls, call)
        if isinstance(known, Thing):
            return known
        instance = known if isinstance(known, Instance) else Instance(cls)
        with suppress(SourceRaised):
            self._initialise(instance, call)
        return instance

    def left_open(self, function: Value | None) -> dict[str, Value]:
        """What a run that is not seen may give to a function, such as an __init__, in place of None."""
        if not isinstance(function, Function):
            return {}
        empty = [name for name, value in function.defaults.items() if isinstance(value, Known) and value.value is None]
        return {name: self.parameter(function, name) for name in empty}

    def clipping_open(self, function: Value | None) -> dict[str, Value]:
        """The norms that nothing is clipped at unless they are given, `max_grad_norm=None`, and the model without which nothing trains."""
        return {name: value for name, value in self.left_open(function).items() if CLIPS_AT.search(name) or TRAINED.fullmatch(name)}

    def choices_open(self, function: Value | None) -> dict[str, Value]:
        """The same, and in place of the kinds and flags that a default chooses."""
        if not isinstance(function, Function):
            return {}
        chosen = [name for name, value in function.defaults.items() if isinstance(value, Known) and isinstance(value.value, (str, bool))]
        return self.left_open(function) | {name: self.parameter(function, name) for name in chosen}

    def _initialise(self, instance: Instance, call: Call) -> None:
        init = instance.cls.find("__init__")
        if isinstance(init, Function):
            self.call_function(bind(init, instance), call.args, call.keywords, call.node)
        else:
            self._fill_fields(instance.cls, instance, call)

    def _fill_fields(self, cls: Class, instance: Instance, call: Call) -> None:
        """A dataclass or a named tuple takes its fields as arguments."""
        fields = [node.target.id for node in cls.node.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
        for name, value in zip(fields, call.args, strict=False):
            instance.attributes[name] = self.named_constant(name, None, value)
        literals = {keyword.arg: keyword.value for keyword in call.node.keywords}
        for name, value in call.keywords.items():
            instance.attributes[name] = self.named_constant(name, literals.get(name), value)

    # Everything else.
    def unknown_call(self, call: Call) -> Value:
        """A call nobody can follow: its result is only named, and tracked objects that it received may have been used."""
        receiver = call.receiver
        values = call.values
        parts = values if receiver is None else [*values, receiver]
        key = ("call", key_of(call.function) if receiver is None else ("method", key_of(receiver), call.name), *map(key_of, values))
        made = self.opaque(key, self.recorder.text(call.node), *parts)
        made.name = call.name
        for part in parts:
            if part.__class__ is Opaque and part.attached:
                made.attached = True
                break
        tracked = tuple([actor for value in values for actor in within(self, value) if actor.role is not Role.LOADER])
        nested = tuple([actor for value in values for actor in parts_of(value)])
        holder = actor_of(receiver)
        if holder is not None and holder.role in {Role.OPTIMIZER, Role.SCALER} and scales(call.name):
            tracked += (holder,)
        given = tracked + nested
        if values and not isinstance(call.function, Builtin):
            keep(self, call, made)
        if self.forward is None and not isinstance(call.function, Builtin) and not (_is_harmless(call) or opens_quietly(self, call)):
            given += reached_through(self, call)
            if given:
                self.recorder.emit(Kind.OPAQUE, call.node, targets=given, options=how_said(self, call))
                may_switch(self, call, given)
        for value in values:
            if isinstance(value, (Function, Partial)) and self.index.kinds(_node_of(value)):
                self.limits.append(f"{self.recorder.text(call.node)}: calls back a function that trains")
                self.recorder.emit(Kind.OPAQUE, call.node, note="callback")
        return made


def _is_harmless(call: Call) -> bool:
    """Whether an unknown call leaves gradients as they are: by its name, or as a function of torch's own that works out of place."""
    if is_harmless(call.name) or is_of_harmless_package(call.path):
        return True
    return call.path.startswith("torch.") and call.path.count(".") == 1 and not call.name.endswith("_")


def _is_nothing(default: Value | None) -> bool:
    return default is None or (isinstance(default, Known) and default.value is None)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _call_of(node: ast.AST) -> ast.Call:
    """A call of something that the interpreter itself calls."""
    return ast.Call(ast.Name("call", ast.Load()), [], [], lineno=getattr(node, "lineno", 1), col_offset=0)


class SourceRaised(Exception):
    """The source raises on this path, in this world."""


def _never_ends(node: ast.AST) -> bool:
    """`while True:` without a break or return."""
    for part in walk(node):
        if isinstance(part, ast.While) and isinstance(part.test, ast.Constant) and part.test.value:
            return not any(isinstance(one, (ast.Break, ast.Return)) for one in walk(part))
    return False


def _node_of(value: Value) -> ast.AST:
    while isinstance(value, Partial):
        value = value.function
    return value.node if isinstance(value, Function) else ast.Pass()


def _is_new_loss(result: Value, frame: Frame) -> bool:
    """Whether a function gives a scalar with a graph that it was not given."""
    if not isinstance(result, Opaque) or not (result.weight and result.reduced and result.forwards):
        return False
    given = (frame.names.get(argument.arg) for argument in frame.function.node.args.args) if frame.function is not None else ()
    return all(not isinstance(value, Opaque) or value.key != result.key for value in given)
