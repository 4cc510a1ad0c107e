"""What calls that nobody could follow are given, at once or through an object that another such call made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accumlint.source.reading.nodes import every
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.packages import is_of_harmless_package
from accumlint.source.rehearsal.state import SAMPLES, Call, State
from accumlint.source.rehearsal.values import Builtin, Class, Instance, Items, Key, Mapping, Opaque, Stream, Thing, Value, actor_of
from accumlint.trace import Actor, Kind, Role

MOST_ENTRIES = 16  # of a dict that are looked into
DEEPEST = 6  # how far a value is followed back to what it was made of
HELD = frozenset({Role.MODEL, Role.OPTIMIZER, Role.SCALER, Role.PARAMETERS})
KNOWN_BASES = frozenset({"torch", "abc", "typing", "enum", "threading", "dataclasses", "collections"})
names_what_trains = found_in(re.compile(r"(^|_)(model|net|network|module|optim(izer)?|opt|scaler)s?$", re.IGNORECASE))
restores = found_in(re.compile(r"load|resum|restor|print|log|init|broadcast|check|assert|show|train$|fit$|run|register", re.IGNORECASE))
is_harmless_maker = found_in(
    re.compile(
        r"log|writ|metric|meter|eval|valid|monitor|track|watch|profil|timer|print|progress|callback|record|visual|plot|criterion|loss"
        r"|token|dataset|vocab|config|sampl|checkpoint|ckpt|saver|summar|stopp|embed|scheduler|sched$",
        re.IGNORECASE,
    )
)
is_harmless_context = found_in(
    re.compile(r"autocast|profil|timer|record|eval|grad|inference|summon|gather|trace|range|tqdm|offload", re.IGNORECASE)
)
is_only_asked = found_in(
    re.compile(
        r"^_?(is|has|get|num|count|state_dict|load_state_dict|parameters|named_\w+|train|eval|to|cuda|cpu|half|float|items|keys|values|add_argument)(_|$)"
        r"|loss|criterion|metric|forward|encode|decode|generate|predict|infer|embed|sample|tokenize|plot|test|ckpt|checkpoint|load|close|start",
        re.IGNORECASE,
    )
)


def may_be_named(value: Value) -> bool:
    """Whether what a function is given, or what an object has, goes by the name of what trains: not `args.model`, nor `model_type`."""
    if not isinstance(value, Opaque):
        return False
    of_self = isinstance(value.owner, Instance) and value.key[0] == "."
    return (of_self or value.key[0] == "parameter") and names_what_trains(value.name)


def within(state: State, value: Value, depth: int = 0) -> Iterator[Actor]:
    """The training objects in a value: itself, whose parameters it goes over, or what a list of them holds."""
    value = state.force(value)
    actor = actor_of(value) or state.actor_by_name(value)
    if actor is not None:
        yield actor
    elif isinstance(value, Stream) and value.kind == "parameters" and value.parts:
        owner = actor_of(state.force(value.parts[0]))
        if owner is not None:
            yield owner
    elif isinstance(value, (Items, Mapping)) and depth == 0:
        for item in _inside(value):
            yield from within(state, item, depth + 1)


def _inside(value: Items | Mapping) -> list[Value]:
    if isinstance(value, Mapping):
        return list(value.items.values())[:MOST_ENTRIES]
    return [] if value.data else value.items[:SAMPLES]


def keep(state: State, call: Call, made: Opaque) -> None:
    """Remembers what an object was given that an unknown call made; what of it trains may be seen later, as by `DDP(net)`."""
    if made.forwards or made.born or is_harmless_maker(call.name) or is_of_harmless_package(call.path) or call.path.startswith("torch."):
        return
    given = [value for value in map(state.force, call.values) if _may_train(value)]
    if given:
        state.elsewhere.held[made.key] = tuple(given)


def _may_train(value: Value) -> bool:
    if isinstance(value, Opaque):
        return not (value.born or value.forwards or value.causes or value.path)
    return (
        isinstance(value, (Thing, Instance))
        or (isinstance(value, Stream) and value.kind == "parameters")
        or isinstance(value, (Items, Mapping))
    )


def held_by(state: State, value: Value | None) -> tuple[Actor, ...]:
    """What a value holds that an unknown call made, or that came out of one: `reducer`, `reducer.group`, `windows(model)[0]`."""
    if not state.elsewhere.held or not isinstance(value, Opaque) or value.actor is not None:
        return ()
    given = _held(state, value.key)
    return tuple(actor for one in given for actor in (*within(state, one), *parts_of(one)) if actor.role in HELD)


def parts_of(value: Value) -> Iterator[Actor]:
    """The training objects that an object of the source holds."""
    if isinstance(value, Instance):
        yield from (actor for actor in map(actor_of, value.attributes.values()) if actor is not None)


def _held(state: State, key: Key, depth: int = 0) -> tuple[Value, ...]:
    found = state.elsewhere.held.get(key)
    if found is not None or depth > DEEPEST:
        return found or ()
    for part in key[1:]:
        if isinstance(part, tuple) and part and (inner := _held(state, part, depth + 1)):
            return inner
    return ()


def reached_through(state: State, call: Call) -> tuple[Actor, ...]:
    """What a call may act on that is given nothing itself: what its object was given, or what an object of unknown descent holds."""
    if is_only_asked(call.name) or isinstance(call.function, Builtin) or state.no_grad:
        return ()
    said = is_said(state, call)
    if not said and call.receiver is None:
        return ()  # what it gives is wanted, as of a model or a tokenizer
    receiver = state.force(call.receiver) if call.receiver is not None else state.force(call.function)
    if isinstance(receiver, Instance):
        inherited = said and isinstance(call.function, Opaque) and call.function.key[:3] == (".", ("object", receiver.uid), call.name)
        return tuple(of_unknown_descent(state, receiver)) if inherited else ()
    return held_by(state, receiver)


def of_unknown_descent(state: State, instance: Instance) -> Iterator[Actor]:
    """What the base classes that nobody sees can reach of an object."""
    if instance.actor is None and has_unknown_base(state, instance.cls):
        yield from (actor for actor in parts_of(instance) if actor.role in HELD)


def has_unknown_base(state: State, cls: Class, depth: int = 0) -> bool:
    """Whether a class derives from one that is not there and is none of torch's or of Python's own."""
    if depth > DEEPEST:
        return False
    for base in map(state.force, cls.bases):
        if isinstance(base, Class):
            if has_unknown_base(state, base, depth + 1):
                return True
        elif isinstance(base, Opaque) and base.path.partition(".")[0] not in KNOWN_BASES and base.text not in {"object", "Module"}:
            return True
    return False


def is_object(value: Value) -> bool:
    """Whether a value is none that a tensor's method would take: `callback.on_update(self)`."""
    return isinstance(value, Instance) and value.actor is None


def used(state: State, value: Value, node: ast.AST) -> None:
    """An object that holds a model, an optimizer or a scaler is entered, left or asked for its next item: it may act on them."""
    value = state.force(value)
    held = held_by(state, value)
    if held and state.forward is None and not is_harmless_context(value.name if isinstance(value, Opaque) else ""):
        state.recorder.emit(Kind.OPAQUE, node, targets=held)


def opens_quietly(state: State, call: Call) -> bool:
    """`with gathered_parameters(model.parameters()):`, `with profile(model):`."""
    return is_harmless_context(call.name) and id(call.node) in state.index.once("opened", state.index.tree, _opened)


def how_said(state: State, call: Call) -> frozenset[str]:
    """Whether a call may have set up what happens later: `patch(optimizer)`."""
    return frozenset({"said"}) if is_said(state, call) and not restores(call.name) else frozenset()


def is_said(state: State, call: Call) -> bool:
    """Whether a call is made for what it does, not for what it gives."""
    return id(call.node) in state.index.once("said", state.index.tree, _said)


def _said(tree: ast.AST) -> frozenset[int]:
    return frozenset(id(node.value) for node in every(tree, ast.Expr) if isinstance(node, ast.Expr)) | _opened(tree)


def _opened(tree: ast.AST) -> frozenset[int]:
    """What with statements enter."""
    return frozenset(id(item.context_expr) for node in every(tree, ast.With, ast.AsyncWith) for item in getattr(node, "items", ()))
