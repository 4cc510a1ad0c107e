"""PyTorch-Ignite (0.4.5 to 0.6): engines that call an update function for every batch, event handlers, supervised trainers, `idist`.

`engine.state.iteration` counts from 1 over all epochs, so windows cross from one epoch into the next, and what is left at the end of the
run is never applied. `create_supervised_trainer(…, gradient_accumulation_steps=K)` divides by K itself, also the last remainder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.values import NONE, Context, Function, Items, Mapping, Thing, Value, make_actor
from accumlint.source.vocabulary import distributed, torch_objects
from accumlint.source.vocabulary.base import Entry, Handler, receiver_of
from accumlint.source.vocabulary.ignite_engine import EVENTS, Engine, Registration, adds, filtered, play
from accumlint.source.vocabulary.ignite_handlers import attached, average, checkpoint
from accumlint.source.vocabulary.ignite_supervised import Supervised
from accumlint.source.vocabulary.played import kinds_of, parameters_of
from accumlint.trace import Kind, Role, Wrapper

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

PACKAGES = frozenset({"ignite"})
ENGINES = frozenset({"Engine", "DeterministicEngine"})
TRAINERS = frozenset({"create_supervised_trainer"})
UPDATES = frozenset(
    {"supervised_training_step", "supervised_training_step_amp", "supervised_training_step_apex", "supervised_training_step_tpu"}
)
ENGINE_PARAMETERS = frozenset({"engine", "trainer", "_engine", "_", "_trainer", "engine_", "eng"})
SIEVE = ((b"create_supervised_trainer", b"ignite"), (b"supervised_training_step", b"ignite"))


def engine(state: Machine, call: Call) -> Value | None:
    """`Engine(update)`."""
    if not call.path.startswith("ignite.") and "." in call.path:
        return None
    update = call.argument(0, "process_function")
    return _new(state, state.force(update) if update is not None else NONE)


def _new(state: Machine, update: Value) -> Thing:
    made = Thing(make_actor(Role.ENGINE, "engine"))
    made.attributes["state"] = state.opaque(("ignite", made.actor.uid), "engine.state", name="state")
    known = Engine(made, update)
    state.memory[("ignite", made.actor.uid)] = known
    state.memory.setdefault("ignite", []).append(known)
    return made


def supervised_trainer(state: Machine, call: Call) -> Value | None:
    """`create_supervised_trainer(model, optimizer, loss_fn, gradient_accumulation_steps=K)`."""
    return _new(state, supervised_step(state, call) or NONE)


def supervised_step(state: Machine, call: Call) -> Value | None:
    """`supervised_training_step(model, optimizer, loss_fn, …)`: the update function that Ignite makes."""
    made = Thing(make_actor(Role.OTHER, call.name))
    state.memory[("ignite update", made.actor.uid)] = Supervised.of(state, call)
    return made


def known_engine(state: Machine, value: Value | None) -> Engine | None:
    """The engine that a value is."""
    value = state.force(value) if value is not None else None
    return state.memory.get(("ignite", value.actor.uid)) if isinstance(value, Thing) else None


def run(state: Machine, call: Call) -> Value | None:
    """`engine.run(loader, max_epochs=…)`; `parallel.run(function, …)` of `ignite.distributed`."""
    owner = state.force(receiver_of(call) or NONE)
    if isinstance(owner, Thing) and owner.actor.name == "parallel" and call.args:
        return _launched(state, call, call.args[0], call.args[1:], call.keywords)
    known = known_engine(state, owner)
    if known is None:
        return None
    state.covered.add(id(call.node))
    if known.running or not _trains(state, known):
        return NONE
    data = call.argument(0, "data")
    play(state, known, call.node, data if data is not None else NONE, call.argument(1, "max_epochs"))
    return known.thing.attributes["state"]


def _trains(state: Machine, known: Engine) -> bool:
    """Whether an engine's update, or a handler of it, goes backward."""
    if known.supervised(state) is not None:
        return True
    functions = [known.update, *(one.function for one in known.registrations)]
    return any(Kind.BACKWARD in kinds_of(state, function) for function in functions)


def _launched(state: Machine, call: Call, function: Value, args: list[Value], keywords: dict[str, Value]) -> Value:
    state.covered.add(id(call.node))
    rank = state.opaque(("call", "get_rank"), "local_rank", causes=frozenset({"rank"}), name="rank")
    return state.call_value(function, [rank, *args], call.node, keywords)


def spawn(state: Machine, call: Call) -> Value | None:
    """`idist.spawn(backend, function, args, …)`."""
    if not call.path.startswith("ignite") or len(call.args) < 2:
        return None
    given = state.force(call.argument(2, "args") or NONE)
    keywords = state.force(call.keywords.get("kwargs_dict", NONE))
    named = {str(name): value for name, value in keywords.items.items()} if isinstance(keywords, Mapping) else {}
    return _launched(state, call, call.args[1], list(given.items) if isinstance(given, Items) else [], named)


def parallel(state: Machine, call: Call) -> Value | None:
    """`with idist.Parallel(backend) as parallel`."""
    return Context("other", value=Thing(make_actor(Role.OTHER, "parallel"))) if call.path.startswith("ignite") else None


def auto_model(state: Machine, call: Call) -> Value | None:
    """`idist.auto_model(model)` wraps where several processes were launched."""
    if not call.path.startswith("ignite") or not (call.args or "model" in call.keywords):
        return None
    call = replace(call, args=call.args or [call.keywords["model"]])
    made = distributed.wrap(state, call, Wrapper.DDP)
    if isinstance(made, Thing):
        made.actor = replace(made.actor, options=made.actor.options | {"optional"})
    return made


def auto_optim(state: Machine, call: Call) -> Value | None:
    """`idist.auto_optim(optimizer)`: the same optimizer."""
    return state.force(call.args[0]) if call.args and call.path.startswith("ignite") else None


def auto_loader(state: Machine, call: Call) -> Value | None:
    """`idist.auto_dataloader(dataset, …)`."""
    return torch_objects.data_loader(state, call)


def schedule_wrapper(state: Machine, call: Call) -> Value | None:
    """`LRScheduler(scheduler)` is a handler that advances a scheduler of torch."""
    if not call.path.startswith("ignite") or not call.args:
        return None
    return Thing(make_actor(Role.OTHER, "LRScheduler"), inner=state.force(call.args[0]))


def add_handler(state: Machine, call: Call) -> Value | None:
    """`engine.add_event_handler(event, handler, …)`."""
    known = known_engine(state, receiver_of(call))
    if known is None or len(call.args) < 2:
        return None
    adds(state, known, Registration(call.node.args[0], call.args[1], call.args[2:], call.keywords, call.node))
    return NONE


def attach(state: Machine, call: Call) -> Value | None:
    """`EMAHandler(model).attach(engine, event=…)`."""
    found = attached(state, call)
    known = known_engine(state, found[0]) if found is not None else None
    if found is None or known is None:
        return None
    adds(state, known, Registration(found[1], found[2], [], {}, call.node))
    return NONE


def on(state: Machine, decorator: ast.expr, function: Function) -> Value | None:
    """`@engine.on(event)` above a function."""
    if not (isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.args):
        return None
    known = known_engine(state, state.eval(decorator.func.value))
    if known is None:
        return None
    extra = [state.eval(argument) for argument in decorator.args[1:]]
    adds(state, known, Registration(decorator.args[0], function, extra, {}, decorator))
    return function


def entries(index: Index) -> Iterator[Entry]:
    """The functions that make a training engine or an update function that no code here runs, callers before those they call."""
    called = {
        id(callee) for functions in index.functions.values() for one in functions for callee in index.calls_of(one) if callee is not one
    }
    nested = set(_nested(index.tree))
    every = (one for functions in (*index.functions.values(), *index.methods.values()) for one in functions if id(one) not in nested)
    wanted = {id(one): one for one in every if _makes_engine(one) or any(_is_update(index, part) for part in _functions(one))}
    for function in sorted(wanted.values(), key=lambda one: (id(one) in called, one.lineno)):
        yield Entry(function, drive)


def _functions(function: FunctionNode) -> Iterator[FunctionNode]:
    yield from (part for part in walk(function) if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _nested(tree: ast.Module) -> Iterator[int]:
    for node in walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (id(part) for part in _functions(node) if part is not node)


def _makes_engine(function: FunctionNode) -> bool:
    return any(isinstance(part, ast.Call) and terminal(part.func) in ENGINES | TRAINERS for part in walk(function))


def _is_update(index: Index, function: FunctionNode) -> bool:
    """Whether a function takes an engine and a batch and goes backward."""
    names = [argument.arg for argument in function.args.args if argument.arg not in {"self", "cls"}]
    return len(names) == 2 and names[0] in ENGINE_PARAMETERS and Kind.BACKWARD in index.kinds(function)


def drive(state: Machine, function: Function) -> None:
    """Runs a function, then every engine that it has made and not run, or the update function that it is or gives back."""
    node = function.node
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    updates = [function] if _is_update(state.index, node) else []
    if not updates:
        given = state.force(state.call_function(function, [], {}, None))
        parts = given.items if isinstance(given, Items) else [given]
        updates = [part for part in parts if isinstance(part, Function) and Kind.BACKWARD in kinds_of(state, part) and _takes_two(part)]
    made: list[Engine] = [one for one in state.memory.get("ignite", ()) if not one.entered and _trains(state, one)]
    made += [state.memory[("ignite", _new(state, update).actor.uid)] for update in updates if not made]
    for one in made:
        call = ast.copy_location(ast.Call(ast.Name(node.name, ast.Load()), [], []), node)
        play(state, one, call, NONE, None, judged=False)


def _takes_two(function: Function) -> bool:
    return len(parameters_of(function)) == 2


KINDS = {"run": {Kind.BACKWARD, Kind.STEP}}
LOOPS = ("run",)
TRACKED = (
    *ENGINES,
    *TRAINERS,
    *UPDATES,
    "add_event_handler",
    "on",
    "auto_model",
    "auto_optim",
    "auto_dataloader",
    "Parallel",
    "LRScheduler",
    "Checkpoint",
    "ModelCheckpoint",
    "EMAHandler",
    "attach",
)
FUNCTIONS: dict[str, Handler] = {
    **dict.fromkeys(ENGINES, engine),
    **dict.fromkeys(TRAINERS, supervised_trainer),
    **dict.fromkeys(UPDATES, supervised_step),
    "Parallel": parallel,
    "spawn": spawn,
    "auto_model": auto_model,
    "auto_optim": auto_optim,
    "auto_dataloader": auto_loader,
    "LRScheduler": schedule_wrapper,
    "create_lr_scheduler_with_warmup": schedule_wrapper,
    "Checkpoint": checkpoint,
    "ModelCheckpoint": checkpoint,
    "EMAHandler": average,
    **dict.fromkeys(EVENTS, filtered),
}
METHODS: dict[str, Handler] = {"run": run, "add_event_handler": add_handler, "attach": attach, **dict.fromkeys(EVENTS, filtered)}
DECORATORS = {"on": on}
